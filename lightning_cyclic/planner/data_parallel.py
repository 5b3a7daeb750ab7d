"""The numbers of data-parallel training on a network, so that it is never worse than lockstep.

    lockstep, at its best  ──┐
    plans around the ring  ──┴─>  the fastest; of those within 1 %, the simplest

Stages and slack shorten different waits, and each has its price: messages, or old weights.
From the plan that can be fastest by :func:`ring_bound_s` the search goes to better neighbours, by
simulation. It is a function of its arguments alone, the same on each machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, TypeAlias, final

from lightning_cyclic.planner.ring_bound import ring_bound_s
from lightning_cyclic.planner.ring_numbers import RingChoices, RingNumbers
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.lockstep import Lockstep, best_lockstep
from lightning_cyclic.simulate.steady import is_quick, steady_step_s

ALIKE: Final = 1.01  # predictions this close are alike: networks are not known better
# what is changed at once on the way to a better neighbour: to be delayed is the largest slack
_LADDERS = (
    ("num_stages",), ("is_delayed", "slack"), ("sharding",), ("group_size",),
)  # fmt: skip

_MOST_SIMULATED = 24  # plans: what comes after them gains little, and takes long for many workers

Cut: TypeAlias = Callable[[int], Costs]
"""From a number of stages to what each of them costs."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RingStep:
    """Hold the best plan around the ring.

    Args:
        numbers: of the plan.
        step_s: seconds that a step is predicted to take.
        num_simulated: how many plans were simulated to find it.
    """

    numbers: RingNumbers
    step_s: float
    num_simulated: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """Hold what was chosen, and what lockstep takes at its best.

    Args:
        ring: the best plan around the ring; None where lockstep is as fast, or faster.
        lockstep: the best that DistributedDataParallel can do.
    """

    ring: RingStep | None
    lockstep: Lockstep

    @property
    def step_s(self) -> float:
        """Return the seconds that a step is predicted to take."""
        return self.lockstep.step_s if self.ring is None else self.ring.step_s

    @property
    def speed(self) -> float:
        """Return how many times as many steps per second it makes as lockstep: never below 1."""
        return self.lockstep.step_s / self.step_s if self.step_s else 1.0


def choose_data_parallel(
    cut: Cut, network: Network, num_workers: int, choices: RingChoices
) -> DataParallel:
    """Choose the numbers of a plan that is predicted to be fastest, or lockstep.

    Args:
        cut: what stages cost, by how many there are.
        network: the links between the workers.
        num_workers: N.
        choices: what is chosen from.

    Returns:
        Of what was looked at and is within 1 % of the fastest, the simplest: lockstep, then fresh
        weights before old ones, then fewer stages.

    Raises:
        PlanError: the network has hosts of another number of workers.

    Example:
        >>> def cut(num_stages):
        ...     return Costs.even(num_stages, compute_s=0.1, model_bytes=25e6)
        >>> network = Network(latency_s=1e-3, bandwidth_bytes_per_s=1.25e9)
        >>> found = choose_data_parallel(cut, network, 8, RingChoices(most_stages=8))
        >>> found.ring.numbers.num_stages, found.ring.numbers.slack, round(found.speed, 2)
        (8, 0, 1.15)
        >>> free = choose_data_parallel(cut, Network(), 8, RingChoices(most_stages=8))
        >>> free.ring is None, free.speed
        (True, 1.0)
    """
    network.check(num_workers)
    lockstep = best_lockstep(cut(choices.most_stages), network, num_workers)
    limit_s = lockstep.step_s / ALIKE
    ring = best_around_ring(cut, network, num_workers, choices, below_s=limit_s)
    return DataParallel(ring=ring, lockstep=lockstep)


def best_around_ring(
    cut: Cut, network: Network, num_workers: int, choices: RingChoices, *, below_s: float = inf
) -> RingStep | None:
    """Return the simplest of the plans that are predicted to be within 1 % of the fastest.

    Args:
        cut: as of :func:`choose_data_parallel`, as are the next three.
        network: the links between the workers.
        num_workers: N.
        choices: what is chosen from.
        below_s: what a step has to take less than.

    Returns:
        The best plan; None if none takes less.
    """
    every = list(choices.numbers(num_workers, network))
    return _Search(cut, network, num_workers, every).best(below_s)


@final
class _Search:
    """Go from the plan that can be fastest to better neighbours.

    Args:
        cut: as of :func:`choose_data_parallel`.
        network: the links.
        num_workers: N.
        every: all numbers.
    """

    def __init__(
        self, cut: Cut, network: Network, num_workers: int, every: Sequence[RingNumbers]
    ) -> None:
        self._network = network
        self._num_workers = num_workers
        self._costs = {n: cut(n) for n in {numbers.num_stages for numbers in every}}
        self._bound_s = {numbers: self._least_s(numbers) for numbers in every}
        self.step_s: dict[RingNumbers, float] = {}  # of those that were simulated
        self._ladders: defaultdict[object, list[RingNumbers]] = defaultdict(list)
        for numbers in sorted(self._bound_s):
            for names in _LADDERS:
                self._ladders[names, _without(numbers, names)].append(numbers)

    def best(self, below_s: float) -> RingStep | None:
        """Return the best plan; None if none takes less than a limit."""
        for start in sorted(self._starts(), key=lambda n: self._bound_s[n]):
            limit_s = min([below_s, *(s / ALIKE for s in self.step_s.values())])
            if self._bound_s[start] < limit_s:
                self._climb(start)
        least_s = min(self.step_s.values(), default=inf)
        if not least_s < below_s:
            return None
        best = self._simplest(self.step_s)
        limit_s = min(ALIKE * least_s, below_s)
        while (simpler := self._first(best, limit_s, simpler=True)) is not None:
            best = simpler
        best = self._simplest({n: s for n, s in self.step_s.items() if s <= limit_s})
        return RingStep(numbers=best, step_s=self.step_s[best], num_simulated=len(self.step_s))

    def _starts(self) -> Iterator[RingNumbers]:
        """Yield what can be fastest, of all and of each kind of weights, sharding and groups."""
        yield self._simplest(self._bound_s)
        kinds: defaultdict[tuple[object, ...], dict[RingNumbers, float]] = defaultdict(dict)
        for numbers, bound_s in self._bound_s.items():
            kinds[numbers.is_delayed, numbers.sharding, numbers.group_size][numbers] = bound_s
        yield from (self._simplest(alike) for _, alike in sorted(kinds.items()))

    def _climb(self, best: RingNumbers) -> None:
        """Go on to what takes clearly less, as long as there is a neighbour that does."""
        if self._simulate(best) == inf:
            return
        while (better := self._first(best, self.step_s[best] / ALIKE)) is not None:
            best = better

    def _first(
        self, best: RingNumbers, limit_s: float, *, simpler: bool = False
    ) -> RingNumbers | None:
        """Return the first neighbour that takes no longer than a limit."""
        rank = best.rank(self._num_workers)
        # first what can gain most; of equal ones, more before less
        for numbers in sorted(self._neighbours(best), key=lambda n: self._bound_s[n]):
            if simpler and numbers.rank(self._num_workers) >= rank:
                continue
            if numbers not in self.step_s and len(self.step_s) >= _MOST_SIMULATED:
                continue
            if self._bound_s[numbers] <= limit_s and self._simulate(numbers) <= limit_s:
                return numbers
        return None

    def _neighbours(self, best: RingNumbers) -> Iterator[RingNumbers]:
        """Yield the numbers that differ in one thing, by one place; more before less."""
        for step in (1, -1):
            for names in _LADDERS:
                ladder = self._ladders[names, _without(best, names)]
                place = ladder.index(best) + step
                if 0 <= place < len(ladder):
                    yield ladder[place]

    def _simplest(self, seconds: dict[RingNumbers, float]) -> RingNumbers:
        limit_s = ALIKE * min(seconds.values())
        return min(
            (n for n, s in seconds.items() if s <= limit_s),
            key=lambda n: n.rank(self._num_workers),
        )

    def _simulate(self, numbers: RingNumbers) -> float:
        if numbers not in self.step_s:
            plan, costs = numbers.plan(self._num_workers), self._costs[numbers.num_stages]
            # hundreds of workers whose messages have no turns would take minutes
            self.step_s[numbers] = (
                steady_step_s(plan, costs, self._network) if is_quick(plan) else inf
            )
        return self.step_s[numbers]

    def _least_s(self, numbers: RingNumbers) -> float:
        slack = 2 * numbers.num_stages if numbers.is_delayed else numbers.slack
        return ring_bound_s(
            self._costs[numbers.num_stages],
            self._network,
            self._num_workers,
            slack=slack,
            sharding=numbers.sharding,
            group_size=numbers.group_size,
        )


def _without(numbers: RingNumbers, names: Sequence[str]) -> tuple[object, ...]:
    return tuple(value for name, value in numbers._asdict().items() if name not in names)
