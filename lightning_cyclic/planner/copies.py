"""The copies that workers keep who have one stage of a pipeline, counted on small programs.

How many versions, micro-batches and sums such a worker keeps depends on how far its stage is from
the last one and on how many micro-batches there are, and once the pipeline is full in proportion
only. So programs of a few stages, replicas and micro-batches are counted, and what grows from one
to the next grows on:

    small program   0  1  2  3  4  5
                    |  |________|  |
    the plan's      0  1 ........ 8  9

Nothing is assumed of a schedule or a rule: where small programs do not grow in proportion, or
cannot be, the plan's own is counted. Parameters that stages share add messages, and no copies.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.simulate.memory import KINDS, memory

_STAGES = 6  # of the largest small program: the first, the last, and four between
_REPLICAS = 3  # the first, the last, and one for all between

Row: TypeAlias = tuple[float, ...]  # copies of each kind, in the order of KINDS
Copies: TypeAlias = list[list[Row]]  # by replica (the first, those between, the last), and stage
_Count: TypeAlias = Callable[[int, int], Copies]


@final
class Counter:
    """Count copies, and remember what small programs keep.

    Args:
        state_per_param: bytes of optimizer state per byte of parameters.
        gradient_per_param: bytes of gradient per byte of parameters. [1]
        index_per_param: bytes of the index of kept elements per byte of parameters. [0: dense]
    """

    def __init__(
        self,
        slack: int,
        state_per_param: float,
        *,
        gradient_per_param: float = 1.0,
        index_per_param: float = 0.0,
    ) -> None:
        self._slack = slack
        self._state_per_param = state_per_param
        shares = {"gradients": gradient_per_param, "in_flight": gradient_per_param,
                  "index": index_per_param}  # fmt: skip
        # counted as whole copies, as fractions that are added up need not grow evenly
        self._shares = tuple(shares.get(kind, 1.0) for kind in KINDS)
        self._counted: dict[tuple[object, ...], Copies] = {}

    def copies(
        self, preset: str, num_stages: int, of_each: int, replicas: int, *, remat: bool
    ) -> Copies:
        """Return the copies of each kind that the workers of some replicas keep.

        Returns:
            By replica and stage; where there are more than three replicas, the second stands for
            all between the first and the last.
        """

        def count(stages: int, micro: int) -> Copies:
            return self._count(preset, stages, micro, min(replicas, _REPLICAS), remat)

        try:
            found = self._by_small_programs(count, num_stages, of_each)
        except PlanError:  # of a small program; the plan's own may be possible
            found = None
        whole = count(num_stages, of_each) if found is None else found
        return [
            [tuple(x * share for x, share in zip(row, self._shares, strict=True)) for row in rows]
            for rows in whole
        ]

    def _by_small_programs(self, count: _Count, num_stages: int, of_each: int) -> Copies | None:
        spare = 2 + self._slack  # micro-batches beyond one per stage that fill the pipeline
        few = min(num_stages, _STAGES)
        if of_each >= num_stages + spare and (of_each > few + spare or num_stages > few):
            found = _filled(count, few, few + spare, of_each)
            if found is not None and num_stages > few:
                found = _stretched(count, few + spare, found, num_stages)
            return found
        if num_stages > _STAGES + 1 and num_stages <= of_each + 1 < num_stages + spare + 1:
            return _alongside(count, num_stages, of_each - num_stages)
        return None

    def _count(
        self, preset: str, num_stages: int, of_each: int, replicas: int, remat: bool
    ) -> Copies:
        key = preset, num_stages, of_each, replicas, remat
        if key not in self._counted:
            plan = make_plan(
                preset,
                num_stages=num_stages,
                num_workers=num_stages * replicas,
                num_microbatches=of_each * replicas,
                num_steps=steps_to_count(num_stages, of_each),
                slack=self._slack,
                replicas=replicas,
                proved=False,
            )
            homes = [plan.axes.placement.workers_of(j) for j in range(num_stages)]
            for again in (False, True):
                workers = memory(
                    plan,
                    Stages.alike(num_stages).costs(),
                    remat=again,
                    state_per_param=self._state_per_param,
                    index_per_param=1.0,
                )
                self._counted[*key[:-1], again] = [
                    [tuple(getattr(workers[home[q]], kind) for kind in KINDS) for home in homes]
                    for q in range(replicas)
                ]
        return self._counted[key]


def steps_to_count(num_stages: int, of_each: int) -> int:
    """Return the steps after which the workers of a plan have kept the most that they ever do."""
    return 4 + -(-2 * num_stages // of_each)


def _filled(count: _Count, num_stages: int, full: int, of_each: int) -> Copies | None:
    """Let a program of few micro-batches have more; None where copies grow irregularly."""
    less, some, more = (count(num_stages, full + k) for k in (-1, 0, 1))
    found = []
    for rows in zip(less, some, more, strict=True):
        if any(_minus(b, a) != _minus(c, b) for a, b, c in zip(*rows, strict=True)):
            return None
        found.append([_grown(b, c, of_each - full) for _, b, c in zip(*rows, strict=True)])
    return found


def _stretched(count: _Count, full: int, filled: Copies, num_stages: int) -> Copies | None:
    """Let a program of few stages have more; None where copies change irregularly with them."""
    added, found = num_stages - _STAGES, []
    small = count(_STAGES - 1, full), count(_STAGES, full)
    for few, some, row in zip(*small, filled, strict=True):
        steps = {_minus(a, b) for those in (some, row) for a, b in pairwise(those[1:-1])}
        if len(steps) > 1 or few[1:] != some[2:]:
            return None
        first = _grown(row[0], _plus(row[0], _minus(some[0], few[0])), added)
        between = (_grown(row[2], row[1], added + 2 - j) for j in range(1, num_stages - 1))
        found.append([first, *between, row[-1]])
    return found


def _alongside(count: _Count, num_stages: int, excess: int) -> Copies | None:
    """Let micro-batches grow with the stages; None where copies change irregularly with them."""
    added, found = num_stages - _STAGES - 1, []
    small = [count(few, few + excess) for few in range(_STAGES - 1, _STAGES + 2)]
    for few, some, many in zip(*small, strict=True):
        steps = {_minus(a, b) for row in (few, some, many) for a, b in pairwise(row[1:-1])}
        pairs = (few, some), (some, many)
        grows = {_minus(b, a) for less, more in pairs
                 for a, b in zip(less[1:-1], more[2:-1], strict=True)}  # fmt: skip
        ends = {(_minus(b[0], a[0]), _minus(b[-1], a[-1])) for a, b in pairs}
        if max(len(steps), len(grows), len(ends)) > 1:
            return None
        (step,), (grow,) = steps, grows
        nearest = _plus(many[-2], grow, added)  # to the last stage
        between = [_plus(nearest, step, k) for k in reversed(range(num_stages - 2))]
        first = _grown(some[0], many[0], added + 1)
        found.append([first, *between, _grown(some[-1], many[-1], added + 1)])
    return found


def _plus(a: Row, b: Row, times: int = 1) -> Row:
    return tuple(x + y * times for x, y in zip(a, b, strict=True))


def _minus(a: Row, b: Row) -> Row:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _grown(a: Row, b: Row, times: int) -> Row:
    """Return a after so many steps as from a to b."""
    return tuple(x + (y - x) * times for x, y in zip(a, b, strict=True))
