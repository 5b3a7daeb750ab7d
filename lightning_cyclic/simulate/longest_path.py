"""When the steps of a large plan end: longest paths through windows, wave by wave, with numpy.

Each number is made as the simulation of the program makes it: the largest of the ends that a node
waits for, and the seconds that it takes added to that. So both are equal, to the last digit.
"""

from __future__ import annotations

from typing import Any, TypeAlias, final

import numpy as np

from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.timetable import KINDS, NONE, Flags, Ints, Timetable, is_regular
from lightning_cyclic.simulate.window import Waits, waves, window

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


def ends_of_steps(
    plan: Plan, costs: Costs, network: Network, last: int
) -> list[list[float]] | None:
    """Return when each worker ended its compute of each step.

    Args:
        plan: any; its program is not made.
        costs: what each stage costs.
        network: the links between the workers.
        last: step.

    Returns:
        Of each worker its ends, up to the last step's, and 0.0 behind them; None where the plan
        has more than this knows of, or does not keep to its timetable's order.
    """
    timetable = Timetable(plan) if is_regular(plan) else None
    if timetable is None or not timetable.keeps_order:
        return None
    found: list[list[float]] = _Run(plan, timetable, costs, network).ends(last).T.tolist()
    return found


@final
class _Run:
    """Compute when the nodes of each window end, and keep as many windows as others look back.

    Nodes are sorted by wave, the computes of a wave before its messages, so that each is a slice.

    Args:
        plan: a regular one.
        timetable: of it.
        costs: what each stage costs.
        network: the links between the workers.
    """

    def __init__(self, plan: Plan, timetable: Timetable, costs: Costs, network: Network) -> None:
        self._num_steps = plan.num_steps
        self._timetable = timetable
        seconds, latency_s = _costs(timetable, costs, network)
        num_computes = len(timetable.computes.j)
        messages = seconds[num_computes:]
        found = window(timetable, messages > 0, _inside(timetable, network), 1)
        wave = waves(found)
        is_message = np.arange(len(wave)) >= num_computes
        order = np.lexsort((is_message, wave))
        self._place = np.argsort(order)
        self._shift = found.shift[order]
        self._seconds, self._latency_s = seconds[order], latency_s[order]
        backs = [waits.back.max(initial=0) for waits in (*found.waits, found.adds)]
        self._size, self._past = len(order), int(max(backs))
        self._lane, self._inlet, self._made, self._carried = (
            self._looked_up(waits, order) for waits in found.waits
        )
        self._born = [  # in which window what a node reads is there first
            (waits.back + found.shift[waits.node])[order]
            for waits in (found.made_by, found.carried_by)
        ]
        counts = np.bincount(2 * wave + is_message, minlength=2 * (1 + wave.max()))
        bounds = np.concatenate([[0], np.cumsum(counts)]).tolist()
        adding = np.argsort(self._place[found.adding])
        self._adding = self._place[found.adding][adding]
        self._adds = (found.adds.back * self._size + self._place[found.adds.node])[adding]
        added = np.searchsorted(self._adding, bounds).tolist()
        both = list(zip(bounds, added, strict=True))
        self._waves = list(zip(both[:-2:2], both[1:-1:2], both[2::2], strict=True))
        nothing = (1 + self._past) * self._size
        self._sent, self._done = np.zeros(nothing + 1), np.zeros(nothing + 1)
        self._sent[-1] = self._done[-1] = -np.inf

    def _looked_up(self, waits: Waits, order: Ints) -> Ints:
        """Return where in the windows that are kept stands what each node waits for."""
        place = waits.back * self._size + self._place[waits.node]
        return np.where(waits.node == NONE, (1 + self._past) * self._size, place)[order]

    def ends(self, last: int) -> Floats:
        """Return when each worker ended its compute of each step, up to the last; 0.0 appended."""
        table = self._timetable
        ends = np.zeros((last + 2, len(table.ends)))
        backward, update = self._place[table.ends], self._place[table.updates]
        number = max(int(self._shift[backward].max()), int(self._shift[update].max()))
        for n in range(last + number + 1):
            self._advance(n)
            for places, worker in (
                (backward, np.arange(len(backward))),
                (update, table.owner),
            ):
                t = n - self._shift[places]
                x = (t >= 0) & (t <= last)
                np.maximum.at(ends, (t[x], worker[x]), self._done[places[x]])
        return ends

    def _advance(self, n: int) -> None:
        """Compute window n from those before it."""
        size, sent, done = self._size, self._sent, self._done
        for kept in (sent, done):
            kept[size:-1] = kept[: -1 - size].copy()
        lane, inlet = self._lane, self._inlet
        made, carried, seconds, latency_s = self._there(n)
        for (begin, first), (middle, then), (end, behind) in self._waves:
            if begin < middle:
                start = np.maximum(done[lane[begin:middle]], done[made[begin:middle]])
                self._add(n, start, begin, first, then)
                np.add(start, seconds[begin:middle], out=done[begin:middle])
            if middle < end:
                start = np.maximum(sent[lane[middle:end]], done[made[middle:end]])
                np.maximum(start, done[carried[middle:end]], out=start)
                self._add(n, start, middle, then, behind)
                np.add(start, seconds[middle:end], out=sent[middle:end])
                start += latency_s[middle:end]
                np.maximum(start, done[inlet[middle:end]], out=start)
                np.add(start, seconds[middle:end], out=done[middle:end])

    def _add(self, n: int, start: Floats, begin: int, first: int, last: int) -> None:
        """Let those of a slice that add gradients of their group wait for these."""
        if first == last:
            return
        nodes = self._adding[first:last]
        steps = n - self._shift[nodes]
        x = (steps >= 0) & (steps < self._num_steps)
        nodes = nodes[x] - begin
        added = self._done[self._adds[first:last][x]].max(axis=1)
        start[nodes] = np.maximum(start[nodes], added)

    def _there(self, n: int) -> tuple[Ints, Ints, Floats, Floats]:
        """Return data, seconds and latencies; what is of no step only passes the time on."""
        made, carried, seconds, latency_s = (
            self._made, self._carried, self._seconds, self._latency_s,
        )  # fmt: skip
        is_there = (self._shift <= n) & (n - self._shift < self._num_steps)
        if is_there.all() and all(born.max() <= n for born in self._born):
            return made, carried, seconds, latency_s
        made, carried = (
            np.where(is_there & (born <= n), data, len(self._done) - 1)
            for data, born in zip((made, carried), self._born, strict=True)
        )
        seconds = np.where(is_there, seconds, 0.0)
        return made, carried, seconds, np.where(is_there, latency_s, -np.inf)


def _costs(timetable: Timetable, costs: Costs, network: Network) -> tuple[Floats, Floats]:
    """Return the seconds of each node, and the latency of each message."""
    computes, messages = timetable.computes, timetable.messages
    by_kind = {
        Kind.UPDATE: costs.update_s, Kind.F: costs.forward_s, Kind.B: costs.backward_s,
    }  # fmt: skip
    seconds = np.array([by_kind[kind] for kind in KINDS])[computes.kind, computes.j]
    num_bytes = np.array([costs.sent_param_bytes, costs.sent_sum_bytes])
    num_bytes = num_bytes[messages.is_sum.astype(int), messages.j]
    inside = _inside(timetable, network)
    bandwidth = _of_link(network, "bandwidth_bytes_per_s", inside)
    latency_s = _of_link(network, "latency_s", inside)
    sent_s = np.where(messages.source == messages.target, 0.0, num_bytes / bandwidth)
    return (
        np.concatenate([seconds, sent_s]),
        np.concatenate([np.zeros(len(seconds)), latency_s]),
    )


def _of_link(network: Network, name: str, inside: Flags) -> Floats:
    """Return a number of the link that each message takes."""
    found = np.full(len(inside), float(getattr(network, name)))
    if network.inside is not None:
        found[inside] = getattr(network.inside, name)
    return found


def _inside(timetable: Timetable, network: Network) -> Flags:
    """Say which messages stay on their host."""
    messages = timetable.messages
    if network.inside is None:
        return np.full(len(messages.j), False)
    hosts = np.array(network.hosts)
    found: Flags = hosts[messages.source] == hosts[messages.target]
    return found
