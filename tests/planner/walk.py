"""A schedule of rematerialisation, followed by hand: the bytes that it keeps, and its runs."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_cyclic.planner.rematerialisation import Keep, Schedule, Unit


class Walk:
    """Follow a schedule through F and B, and count: bytes one by one, and runs of units."""

    def __init__(self, units: Sequence[Unit], schedule: Schedule) -> None:
        self.units = units
        self.held: dict[tuple[str, int], int] = {}
        self.most = 0
        self.seconds = 0.0
        self.runs = 0
        self.forward(schedule, 0)
        self.waits = sum(self.held.values())
        once = self.runs
        self.backward(schedule, 0)
        self.runs -= once
        assert not self.held

    def forward(self, schedule: Schedule, depth: int) -> None:
        """Run units; on the outermost level what the last one gives leaves the chain."""
        for node in schedule:
            first, last = (node.k, node.k) if isinstance(node, Keep) else node[:2]
            for unit in self.units[first : last + 1]:
                self.seconds += unit.forward_s
                self.runs += 1
            if isinstance(node, Keep):
                self.held[f"kept {depth}", node.k] = self.units[node.k].kept_bytes
            elif last + 1 < len(self.units):
                self.held[f"output {depth}", last] = self.units[last].output_bytes
        self.most = max(self.most, sum(self.held.values()))

    def backward(self, schedule: Schedule, depth: int) -> None:
        for node in reversed(schedule):
            if isinstance(node, Keep):
                del self.held[f"kept {depth}", node.k]
                continue
            self.held.pop((f"output {depth}", node.last), None)
            self.forward(node.inside, depth + 1)
            self.backward(node.inside, depth + 1)


def need(walk: Walk, at_once: int) -> int:
    return (at_once - 1) * walk.waits + walk.most
