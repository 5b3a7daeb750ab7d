"""Which units of a stage are run again in its backward, for a limit of memory.

A stage is a chain of units. A schedule of it says, from its first unit to its last, what is kept:

    0        unit 0 keeps what its backward needs
    (1 2 3)  a segment: units 1 to 3 keep nothing but what enters unit 1. Their backward begins
             with a run of them again, which follows a schedule of its own: (1 2) 3, or 1 2 3

so that a unit runs once for each segment around it, and once more. Bytes count from when they are
kept to when the backward has passed; what lives within one unit's run does not.

The best schedule is built from the best ones of parts. From unit s on, the first step is either to
keep s, or to take s to p for a segment and go on behind it:

    seconds(s, t, m) = min( f_s + seconds(s + 1, t, m - kept_s),
                            min over p: f_s + .. + f_p + seconds(p + 1, t, m - output_p)
                                                       + seconds(s, p, m) )

Seconds are a step function of m, whose steps are kept as they are: nothing is rounded.
Micro-batches that wait for their backward while another one has it keep what the outermost level
keeps; of several at once that level is chosen by both (``_Waiting``).

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory", section 4, https://arxiv.org/abs/1911.13214; for equal units
Griewank and Walther, Algorithm 799 ("revolve"), https://doi.org/10.1145/347837.347846.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias, TypeVar, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.simulate.costs import Costs
from lightning_cyclic.simulate.memory import memory, most_at_once, spans, steps_to_count

MOST_STEPS = 256
"""Steps of a function of memory that are kept; of functions with more, some are left out."""


class Unit(NamedTuple):
    """Hold what a unit costs.

    Args:
        forward_s: of one run of its forward, in seconds.
        kept_bytes: that it keeps for its backward, its output included, its input not.
        output_bytes: that enters the next unit, or whatever is to be kept in front of that.
        is_joined: whether all that it is given is the output of the unit before, so that a
            segment may hold both.
        must_keep: whether it cannot be run again.
    """

    forward_s: float
    kept_bytes: int
    output_bytes: int
    is_joined: bool = True
    must_keep: bool = False


class Keep(NamedTuple):
    """Say that a unit keeps what its backward needs."""

    k: int


class Again(NamedTuple):
    """Say that units are run again for their backward.

    Args:
        first: of them.
        last: of them.
        inside: the schedule of that run.
    """

    first: int
    last: int
    inside: tuple[Keep | Again, ...]


Schedule: TypeAlias = tuple[Keep | Again, ...]


class Rematerialisation(NamedTuple):
    """Hold a schedule, and what it costs.

    Args:
        peak_bytes: most that all micro-batches under way keep together.
        again_s: seconds of the units that run again, of one micro-batch.
    """

    schedule: Schedule
    peak_bytes: int
    again_s: float

    @property
    def runs_again(self) -> int:
        """Return how many runs of units the backward of a micro-batch makes."""
        return sum(map(_runs, self.schedule))


def _runs(node: Keep | Again) -> int:
    if isinstance(node, Keep):
        return 0
    return node.last - node.first + 1 + sum(map(_runs, node.inside))


def best_schedule(
    units: Sequence[Unit], limit_bytes: int, *, at_once: int = 1, most_steps: int = MOST_STEPS
) -> Rematerialisation:
    """Return the schedule with the least recomputation that a limit allows.

    Args:
        units: of the chain.
        limit_bytes: for what all micro-batches under way keep together, but for what enters the
            chain, which is kept anyway.
        at_once: micro-batches that are under way at once, at most.
        most_steps: of a function of memory; the schedule is the optimum as long as none has more.

    Raises:
        PlanError: no schedule keeps to the limit; with the least one that some schedule does.

    Example:
        >>> units = [Unit(forward_s=1.0, kept_bytes=3, output_bytes=1)] * 4
        >>> found = best_schedule(units, 8)
        >>> found.peak_bytes, found.again_s
        (7, 2.0)
        >>> found.schedule
        (Again(first=0, last=1, inside=(Keep(k=0), Keep(k=1))), Keep(k=2), Keep(k=3))
    """
    waiting = _Waiting(units, limit_bytes, at_once, most_steps)
    allowed = [x for x in waiting.steps(0) if x.need <= limit_bytes]
    if not allowed:
        least = waiting.steps(0)[0].need
        raise PlanError(
            f"limit_bytes={limit_bytes} cannot be met by {len(units)} units, whichever of them "
            f"are run again; allowed: {least} or more; raise it, or use smaller micro-batches"
        )
    found = min(allowed, key=lambda x: (x.seconds, x.need))
    once_s = sum(u.forward_s for u in units)
    return Rematerialisation(tuple(waiting.schedule(found)), found.need, found.seconds - once_s)


def least_bytes(units: Sequence[Unit], *, at_once: int = 1, most_steps: int = MOST_STEPS) -> int:
    """Return the least limit that some schedule keeps to."""
    return _Waiting(units, 0, at_once, most_steps).steps(0)[0].need


# ---------------------------------------------------------------------- one backward


class _Step(NamedTuple):
    """Be a step of a function of memory: from so many bytes on, so many seconds.

    Args:
        last: of the segment that comes first; _KEPT where the first unit is kept.
        inside: number of the step that the segment's units take, among theirs.
        rest: the same of what comes behind; _NONE at the end.
    """

    need: int
    seconds: float
    last: int
    inside: int
    rest: int


_KEPT, _NONE = -1, -1


@final
class _Parts:
    """Know the best schedules of all parts of a chain."""

    def __init__(self, units: Sequence[Unit], limit: int, most_steps: int) -> None:
        self.units = units
        self.limit = limit
        self._before_s = [0.0, *accumulate(u.forward_s for u in units)]
        self._most_steps = most_steps
        self.steps = cache(self._steps)

    def ends(self, s: int) -> Iterator[int]:
        """Yield where segments that begin at a unit may end."""
        for p in range(s, len(self.units)):
            unit = self.units[p]
            if unit.must_keep or (p > s and not unit.is_joined):
                return
            yield p

    def through_s(self, s: int, p: int) -> float:
        return self._before_s[p + 1] - self._before_s[s]

    def schedule(self, s: int, t: int, n: int) -> Iterator[Keep | Again]:
        """Yield what a step of units s to t does."""
        while n != _NONE:
            step = self.steps(s, t)[n]
            if step.last == _KEPT:
                yield Keep(s)
                s += 1
            else:
                yield Again(s, step.last, tuple(self.schedule(s, step.last, step.inside)))
                s = step.last + 1
            n = step.rest

    def _steps(self, s: int, t: int) -> list[_Step]:
        """Return the steps for units s to t, from the least memory to the most."""
        found = _lower(self._found(s, t))
        allowed = [x for x in found if x.need <= self.limit] or found[:1]
        return _thinned(allowed, self._most_steps)

    def _found(self, s: int, t: int) -> list[_Step]:
        kept, forward_s = self.units[s].kept_bytes, self.units[s].forward_s
        if s == t:
            return [_Step(kept, forward_s, _KEPT, _NONE, _NONE)]
        found = [
            _Step(kept + rest.need, forward_s + rest.seconds, _KEPT, _NONE, n)
            for n, rest in enumerate(self.steps(s + 1, t))
        ]
        for p in self.ends(s):
            if p < t:
                found += self._with_segment(s, p, t)
        return found

    def _with_segment(self, s: int, p: int, t: int) -> Iterator[_Step]:
        """Yield what a segment s to p makes: each step of either part, with the best of the other.

        The two are under way one after the other, so that each has all of the memory.
        """
        output, through_s = self.units[p].output_bytes, self.through_s(s, p)
        insides, rests = self.steps(s, p), self.steps(p + 1, t)
        a = b = 0
        need = max(insides[0].need, output + rests[0].need)
        while True:
            while a + 1 < len(insides) and insides[a + 1].need <= need:
                a += 1
            while b + 1 < len(rests) and output + rests[b + 1].need <= need:
                b += 1
            yield _Step(need, through_s + insides[a].seconds + rests[b].seconds, p, a, b)
            following = [insides[a + 1].need] if a + 1 < len(insides) else []
            following += [output + rests[b + 1].need] if b + 1 < len(rests) else []
            if not following:
                return
            need = min(following)


def _order(step: _Step | _Wait) -> tuple[object, ...]:
    """Sort by bytes and seconds; of equal ones that comes first which runs first units again.

    They run again when all others have gone, so that what lives within a run adds least.
    """
    return step[:-3], step.last == _KEPT, step[-3:]


def _lower(found: list[_Step]) -> list[_Step]:
    """Return those with less than all that need no more, in the order of what they need."""
    kept: list[_Step] = []
    for x in sorted(found, key=_order):
        if not kept or x.seconds < kept[-1].seconds:
            kept.append(x)
    return kept


_Some = TypeVar("_Some", "_Step", "_Wait")


def _thinned(steps: list[_Some], most: int) -> list[_Some]:
    """Leave steps out: keep the first, and of those that need about as much the fastest."""
    if len(steps) <= most:
        return steps
    first, span = steps[0], steps[-1].need - steps[0].need + 1
    best: dict[int, _Some] = {}
    for x in steps[1:]:
        part = (x.need - first.need) * (most - 1) // span
        if part not in best or x.seconds < best[part].seconds:
            best[part] = x
    left = [first]
    left.extend(best.values())
    return left


# ---------------------------------------------------------------------- several at once


class _Wait(NamedTuple):
    """Be a schedule of the outermost level, from a unit on.

    Args:
        need: bytes while one micro-batch is in its backward and all others wait for theirs.
        waits: bytes that one keeps while it waits.
        last: as of a step; so are the others.
    """

    need: int
    seconds: float
    waits: int
    last: int
    inside: int
    rest: int


_END = _Wait(0, 0.0, 0, _KEPT, _NONE, _NONE)


@final
class _Waiting:
    """Choose the outermost level, of which every micro-batch that waits keeps a copy."""

    def __init__(self, units: Sequence[Unit], limit: int, at_once: int, most_steps: int) -> None:
        self._parts = _Parts(units, limit, most_steps)
        self._at_once = at_once
        self._most_steps = most_steps
        self.steps = cache(self._steps)

    def schedule(self, step: _Wait) -> Iterator[Keep | Again]:
        s = 0
        while step is not _END:
            if step.last == _KEPT:
                yield Keep(s)
                s += 1
            else:
                yield Again(s, step.last, tuple(self._parts.schedule(s, step.last, step.inside)))
                s = step.last + 1
            step = self.steps(s)[step.rest]

    def _steps(self, s: int) -> list[_Wait]:
        if s == len(self._parts.units):
            return [_END]
        kept: list[_Wait] = []
        for x in sorted(self._found(s), key=_order):
            if kept and x.need > self._parts.limit:
                break
            if not any(y.seconds <= x.seconds and y.waits <= x.waits for y in kept):
                kept.append(x)
        return _thinned(kept, self._most_steps)

    def _found(self, s: int) -> Iterator[_Wait]:
        units, n = self._parts.units, self._at_once
        kept, forward_s = units[s].kept_bytes, units[s].forward_s
        for b, rest in enumerate(self.steps(s + 1)):
            need, waits = n * kept + rest.need, kept + rest.waits
            yield _Wait(need, forward_s + rest.seconds, waits, _KEPT, _NONE, b)
        for p in self._parts.ends(s):
            is_last = p == len(units) - 1  # what it gives leaves the chain
            output = 0 if is_last else units[p].output_bytes
            through_s, insides = self._parts.through_s(s, p), self._parts.steps(s, p)
            for b, rest in enumerate(self.steps(p + 1)):
                waits, beside = output + rest.waits, n * output + rest.need
                for a, inside in enumerate(insides):
                    need = (n - 1) * waits + inside.need
                    seconds = through_s + rest.seconds + inside.seconds
                    yield _Wait(max(beside, need), seconds, waits, p, a, b)


# ---------------------------------------------------------------------- for how much there is room


class Room(NamedTuple):
    """Hold what a stage may keep.

    Args:
        limit_bytes: of its worker, for all that this keeps.
        left_bytes: of it, for activations.
        at_once: micro-batches of the stage that are under way at once, at most.
        of_worker: the same of all its worker's stages together.
    """

    limit_bytes: int
    left_bytes: int
    at_once: int
    of_worker: int

    @property
    def bytes(self) -> int:
        """Return those of the stage's own micro-batches, which have equal shares."""
        return self.left_bytes * self.at_once // self.of_worker

    def limit_for(self, needed_bytes: int) -> int:
        """Return the limit of the worker that would leave the stage so much."""
        left = -(-needed_bytes * self.of_worker // self.at_once)
        return self.limit_bytes - self.left_bytes + left


def rooms(
    plan: Plan, param_bytes: Sequence[float], limit_bytes: int, state_per_param: float
) -> tuple[dict[int, Room], ...]:
    """Share what the limit of each worker leaves for activations among its stages.

    Each micro-batch of each of them has an equal share.

    Args:
        plan: of a training.
        param_bytes: of each stage.
        limit_bytes: of all that :class:`Memory` counts.
        state_per_param: bytes of optimizer state per byte of parameters.

    Returns:
        For each worker, the room of each stage that it runs.
    """
    steps = steps_to_count(plan.num_stages, max(1, plan.num_microbatches // plan.replicas))
    shown = replace(plan, num_steps=steps)
    nothing = (0.0,) * plan.num_stages
    costs = Costs(
        forward_s=nothing, backward_s=nothing, param_bytes=tuple(map(float, param_bytes)),
        cut_bytes=nothing, activation_bytes=nothing,
    )  # fmt: skip
    kept = memory(shown, costs, state_per_param=state_per_param)
    found = []
    for of_weights, spans_of_worker in zip(kept, spans(shown), strict=True):
        at_once = most_at_once(spans_of_worker, "activations")
        left, total = int(limit_bytes - of_weights.total), sum(at_once.values())
        found.append(
            {j: Room(limit_bytes, left, count, total) for j, count in sorted(at_once.items())}
        )
    return tuple(found)
