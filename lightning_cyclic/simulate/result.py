"""What a simulation says: when everything happened, and how long a step takes in steady state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.simulate.graph import Lane


class Event(NamedTuple):
    """Hold when one action kept one lane of its worker busy."""

    worker: int
    lane: Lane
    action: Action
    start_s: float
    end_s: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Hold the outcome of a simulation.

    Args:
        makespan_s: seconds until the last action has ended.
        step_s: seconds per training step in steady state, of the slowest worker.
        busy_s: seconds of compute of each worker, over the whole run.
        bubble: share of a steady step for which each worker's compute lane is idle.
        events: every action with its times, worker by worker in program order.
    """

    makespan_s: float
    step_s: float
    busy_s: tuple[float, ...]
    bubble: tuple[float, ...]
    events: tuple[Event, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Return the seconds without compute of each worker, over the whole run."""
        return tuple(self.makespan_s - busy_s for busy_s in self.busy_s)


def summarise(events: Sequence[Event], num_workers: int) -> Result:
    """Derive the figures of a run from its events.

    The steady step time is the mean over the steps from the middle to the last but one: the
    first steps fill the pipe, and beside the last there is less traffic than in steady state.
    """
    compute = [event for event in events if event.action.kind in (Kind.F, Kind.B, Kind.UPDATE)]
    num_steps = 1 + max((event.action.t for event in compute), default=0)
    first, last = steady_window(num_steps)
    ends = _ends_of_steps(compute, num_workers, num_steps)
    step_s = max(((end[last] - end[first]) / (last - first) for end in ends), default=0.0)
    busy_s, steady_s = [0.0] * num_workers, [0.0] * num_workers
    for event in compute:
        busy_s[event.worker] += event.end_s - event.start_s
        if first < event.action.t <= last:
            steady_s[event.worker] += (event.end_s - event.start_s) / (last - first)
    return Result(
        makespan_s=max((event.end_s for event in events), default=0.0),
        step_s=step_s,
        busy_s=tuple(busy_s),
        bubble=tuple(max(1 - busy / step_s, 0.0) if step_s else 0.0 for busy in steady_s),
        events=tuple(events),
    )


def steady_window(num_steps: int) -> tuple[int, int]:
    """Return the steps between whose ends the steady step time is measured.

    Example:
        >>> steady_window(12), steady_window(2), steady_window(1)
        ((5, 10), (0, 1), (-1, 0))
    """
    last = num_steps - 2 if num_steps > 3 else num_steps - 1
    return (last // 2 if last else -1), last


def _ends_of_steps(
    compute: Sequence[Event], num_workers: int, num_steps: int
) -> list[list[float]]:
    """Return when each worker ended its compute of each step, with 0.0 appended.

    The appended value is ``ends[-1]``: the end of the step before step 0 is the start of the run.
    """
    ends = [[0.0] * (num_steps + 1) for _ in range(num_workers)]
    for event in compute:
        of_worker, t = ends[event.worker], event.action.t
        of_worker[t] = max(of_worker[t], event.end_s)
    return ends
