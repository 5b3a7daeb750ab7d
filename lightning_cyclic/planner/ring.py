"""The numbers of a data-parallel plan around a ring, for the network that it is to run on.

Stages, slack and groups shorten different waits, and each has its price: messages, or old weights.
Plans are simulated in the order of what they can be at best (:func:`ring_bound_s`), until no other
can be clearly faster; of those within 1 % of the fastest, the simplest is taken. What would take
too long to simulate is not chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from math import floor, inf, log
from typing import Final, NamedTuple, TypeAlias, final

from lightning_cyclic.plan import Plan, make_plan
from lightning_cyclic.plan.presets import PRESETS
from lightning_cyclic.planner.ring_bound import fresh_readers, ring_bound_s
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.engine import simulate

ALIKE: Final = 1.01  # predictions this close are alike: networks are not known better
_STEPS = 10  # to be steady, and to see it for some
_MOST_SIMULATED = 24  # plans: what comes after them gains little
_MOST_CELLS = 5_000  # (worker, stage, step) cells of one of them: half a second

Cut: TypeAlias = Callable[[int], Costs]
"""From a number of stages to what each of them costs."""


@final
class RingNumbers(NamedTuple):
    """Hold the numbers of a plan around the ring.

    Args:
        preset: "cyclic_dp", or "cyclic_dp_v1".
        num_stages: S.
        slack: slots that a new version is given to travel; 0 where all are delayed.
        group_size: workers that run in the same slots.
    """

    preset: str
    num_stages: int
    slack: int = 0
    group_size: int = 1

    @property
    def is_delayed(self) -> bool:
        """Say whether all forwards read the version before the newest."""
        return PRESETS[self.preset].weights == "delayed"

    def plan(self, num_workers: int, num_steps: int = _STEPS) -> Plan:
        """Make the plan, without a proof that it can run."""
        return make_plan(
            self.preset,
            num_stages=self.num_stages,
            num_workers=num_workers,
            num_steps=num_steps,
            slack=self.slack,
            group_size=self.group_size,
            proved=False,
        )

    def behind(self, num_workers: int) -> Fraction:
        """Return by how many updates forwards are behind, on average.

        Example:
            >>> str(RingNumbers("cyclic_dp", 8).behind(8))
            '7/16'
        """
        num_groups = num_workers // self.group_size
        if self.is_delayed:
            return Fraction(num_groups > 1)
        stages = range(self.num_stages)
        fresh = sum(fresh_readers(j, self.num_stages, num_groups, self.slack) for j in stages)
        return 1 - Fraction(fresh, self.num_stages * num_groups)

    def rank(self, num_workers: int) -> tuple[int, ...]:
        """Return what sorts simpler numbers first: less old weights, in tenths, then less of all.

        Coarse stages are older; in tenths, so that few stages do not give way to very many.
        """
        return round(10 * self.behind(num_workers)), self.group_size, self.num_stages, self.slack


def best_around_ring(
    preset: str,
    cut: Cut,
    network: Network,
    num_workers: int,
    most_stages: int,
    *,
    slack: int | None = None,
    group_sizes: Sequence[int] = (1,),
) -> RingNumbers | None:
    """Return the simplest of the plans that are predicted to be within 1 % of the fastest.

    Args:
        preset: "cyclic_dp", or "cyclic_dp_v1".
        cut: what stages cost, by how many there are.
        network: the links between the workers.
        num_workers: N.
        most_stages: that the module can be cut into.
        slack: the only one to look at. [0, and powers of two]
        group_sizes: numbers of workers that may run in the same slots.

    Returns:
        The numbers; None where all take too long to simulate.

    Example:
        >>> def cut(num_stages):
        ...     return Costs.even(num_stages, compute_s=0.1, model_bytes=25e6)
        >>> network = Network(latency_s=1e-3, bandwidth_bytes_per_s=1.25e9)
        >>> best_around_ring("cyclic_dp", cut, network, 8, 8)[:3]
        ('cyclic_dp', 8, 0)
    """
    costs = {n: cut(n) for n in _stages(num_workers, most_stages)}
    bounds = {
        numbers: _bound_s(numbers, costs[numbers.num_stages], network, num_workers)
        for numbers in _numbers(preset, costs, slack, group_sizes)
        if num_workers * numbers.num_stages * _STEPS <= _MOST_CELLS
    }
    found: dict[RingNumbers, float] = {}
    for numbers in _in_order(bounds, num_workers)[:_MOST_SIMULATED]:
        if bounds[numbers] >= min(found.values(), default=inf) / ALIKE:
            break  # neither it nor what is behind it can be clearly faster
        plan = numbers.plan(num_workers)
        found[numbers] = simulate(plan.programs, costs[numbers.num_stages], network, plan).step_s
    limit_s = ALIKE * min(found.values(), default=inf)
    alike = [numbers for numbers, step_s in found.items() if step_s <= limit_s]
    return min(alike, key=lambda numbers: numbers.rank(num_workers), default=None)


def _in_order(bounds: dict[RingNumbers, float], num_workers: int) -> list[RingNumbers]:
    """Sort by bounds; of those that are alike, the simplest first."""
    least_s = min(bounds.values(), default=1.0) or 1.0

    def key(numbers: RingNumbers) -> tuple[int, ...]:
        place = floor(log(max(bounds[numbers] / least_s, 1.0), ALIKE))
        return (place, *numbers.rank(num_workers))

    return sorted(bounds, key=key)


def _bound_s(numbers: RingNumbers, costs: Costs, network: Network, num_workers: int) -> float:
    return ring_bound_s(
        costs,
        network,
        num_workers,
        slack=2 * numbers.num_stages if numbers.is_delayed else numbers.slack,
        sharding=PRESETS[numbers.preset].sharding,
        group_size=numbers.group_size,
    )


def _numbers(
    preset: str, stages: Iterable[int], slack: int | None, group_sizes: Sequence[int]
) -> Iterator[RingNumbers]:
    for num_stages in stages:
        slacks = (0, *_doubled(2 * num_stages - 2)) if slack is None else (slack,)
        for size in group_sizes:
            if PRESETS[preset].weights == "delayed":
                yield RingNumbers(preset, num_stages, 0, size)
            else:
                yield from (RingNumbers(preset, num_stages, c, size) for c in slacks)


def _stages(num_workers: int, most: int) -> list[int]:
    multiples = (num_workers * k for k in _doubled(most // num_workers))
    return sorted({*_doubled(most), *multiples})


def sizes_of_groups(num_workers: int, hosts: Sequence[object]) -> list[int]:
    """Return how many neighbours can be a group, each on one host, of two or more groups.

    Args:
        num_workers: N.
        hosts: of each worker; empty where each has its own.

    Example:
        >>> sizes_of_groups(8, "aaaabbbb"), sizes_of_groups(8, "aaaaaaaa"), sizes_of_groups(8, "")
        ([1, 2, 4], [1, 2, 4], [1])
    """
    hosts = hosts or range(num_workers)
    blocks = {
        size: [set(hosts[w : w + size]) for w in range(0, num_workers, size)]
        for size in range(1, 1 + num_workers // 2)
        if num_workers % size == 0
    }
    return [size for size, found in blocks.items() if all(len(x) == 1 for x in found)] or [1]


def _doubled(most: int) -> Iterable[int]:
    """Return 1, 2, 4, ... up to a number."""
    return [1 << k for k in range(most.bit_length())]
