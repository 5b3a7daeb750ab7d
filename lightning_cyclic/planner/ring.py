"""The numbers of a data-parallel plan around a ring, for the network that it is to run on.

Stages, slack and groups shorten different waits, and each has its price: messages, or old weights.
Plans are simulated in the order of what they can be at best (:func:`ring_bound_s`), until no other
can be clearly faster; of those within 1 % of the fastest, the simplest is taken. What would take
too long to simulate is not chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from math import floor, inf, log
from typing import Final, NamedTuple, TypeAlias, final

from lightning_cyclic.plan import Plan, make_plan, programs_of
from lightning_cyclic.plan.presets import PRESETS
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.engine import simulate

ALIKE: Final = 1.01  # predictions this close are alike: networks are not known better
_STEPS = 10  # to be steady, and to see it for some
_MOST_SIMULATED = 24  # plans: what comes after them gains little
_MOST_CELLS = 5_000  # (worker, stage, step) cells of one of them: half a second
Cut: TypeAlias = Callable[[int], Costs]
"""From a number of stages to what each of them costs."""


def ring_bound_s(
    costs: Costs,
    network: Network,
    num_workers: int,
    *,
    slack: int = 0,
    sharding: str = "optimizer",
    group_size: int = 1,
    to_owners: bool = False,
) -> float:
    """Return the seconds that a step takes at least, whatever the data-parallel plan.

    A new version of a stage is made of all workers' gradients, so it has visited each group of
    workers before who reads it computes the next gradient with it:

        F(i,j) B(i,j) -> N-1-i workers add -> owner -> the readers before it in the chain -> F(i,j)

    That way takes as many steps as the version that is read is old, and one more. The longest way
    over its steps, the compute of a step, and what each port has to send are three bounds. What is
    left out is that messages wait for each other at a port.

    A worker alone is a group. Of several, one leads in a stage; the others send their gradients to
    it, and get parameters from it, so that a way has two more messages.

    Args:
        slack: slots that a new version needs to travel; with ``2 S - 1`` all versions are delayed.
        sharding: "optimizer" or "none".
        group_size: workers that run in the same slots; it divides N.
        to_owners: whether gradients go straight to owners, one by one, in place of sums.

    Example:
        >>> costs = Costs.even(8, compute_s=1.0, model_bytes=1.0)
        >>> network = Network(latency_s=0.25, bandwidth_bytes_per_s=100.0)
        >>> [round(ring_bound_s(costs, network, 8, slack=slack), 2) for slack in (0, 4, 15)]
        [2.13, 1.7, 1.5]
        >>> round(ring_bound_s(costs, network, 8, group_size=2), 2)
        1.76
    """
    compute_s = sum(costs.forward_s) + sum(costs.backward_s)
    if num_workers == 1:
        return compute_s
    if group_size == 1:
        most = _most_bytes(costs, num_workers, slack, sharding, to_owners=to_owners)
        port_s = quickest(network).transfer_s(most)
    elif to_owners:
        port_s = 0.0  # nothing is claimed
    else:
        port_s = _port_of_groups_s(costs, network, num_workers, group_size)
    ring = _Ring(network, num_workers, group_size, to_owners=to_owners)
    return max(compute_s, port_s, *_ways_s(costs, ring, slack))


def _most_bytes(
    costs: Costs, num_workers: int, slack: int, sharding: str, *, to_owners: bool
) -> float:
    """Return the bytes of the port that has most to send, or to receive, in a step."""
    num_stages, last = len(costs.forward_s), num_workers - 1
    params = sum(costs.sent_param_bytes)
    sent, received = [params] * num_workers, [params] * num_workers
    for j in range(num_stages):
        num_fresh = fresh_readers(j, num_stages, num_workers, slack)
        first = (num_workers - num_fresh) % num_workers
        owner = first if sharding == "optimizer" else last
        end = first - 1 if first else last - (owner == last)  # of the new version's way
        sent[end] -= costs.sent_param_bytes[j]  # but for what nobody is behind them to need
        received[owner] -= costs.sent_param_bytes[j]
        for w, to in _ways_of_gradients(last, owner, to_owners=to_owners):
            sent[w] += costs.sent_sum_bytes[j]
            received[to] += costs.sent_sum_bytes[j]
    return max(*sent, *received)


def _ways_of_gradients(last: int, owner: int, *, to_owners: bool) -> Iterator[tuple[int, int]]:
    """Yield who sends a stage's gradients, or their sum so far, to whom."""
    for w in range(last + 1):
        if to_owners:
            if w != owner:
                yield w, owner
        elif w < last:
            yield w, w + 1
        elif owner != last:  # to whom the total goes
            yield last, owner


def _port_of_groups_s(costs: Costs, network: Network, num_workers: int, size: int) -> float:
    """Return for how long ports are busy that have the same place in each group, on average."""
    num_groups, found_s = num_workers // size, 0.0
    inside = network.inside or network
    near = num_groups - 1  # messages between leads that stay on a host
    if network.inside is not None:
        hosts = network.hosts[::size]
        near = sum(a == b for a, b in zip(hosts, (*hosts[1:], hosts[0]), strict=True))
        near = min(near, num_groups - 1)
    for place in range(size):
        far_bytes, sent, received = 0.0, 0.0, 0.0
        for j, (a_sum, params) in enumerate(
            zip(costs.sent_sum_bytes, costs.sent_param_bytes, strict=True)
        ):
            if (len(costs.forward_s) - 1 - j) % size == place:  # leads in the stage
                far_bytes += (num_groups - 1 - near) / num_groups * (a_sum + params)
                sent += (size - 1) * params
                received += (size - 1) * a_sum
            else:
                sent += a_sum
                received += params
        found_s = max(
            found_s, network.transfer_s(far_bytes), inside.transfer_s(max(sent, received))
        )
    return found_s


@final
class _Ring:
    """Know how long a message takes at least to go from group to group."""

    def __init__(
        self, network: Network, num_workers: int, group_size: int, *, to_owners: bool
    ) -> None:
        self.to_owners = to_owners
        self.num_groups = num_workers // group_size
        self.is_grouped = group_size > 1
        self._far, self._near = network, quickest(network)
        # of so many hops in a row one leaves a host, if there are several
        most = max(Counter(network.hosts[::group_size]).values(), default=1)
        self._run = most if most < self.num_groups else 0

    def way_s(self, num_bytes: float, hops: int) -> float:
        """Return the seconds of a message that is handed on so many times around the ring."""
        far = hops // self._run if self._run else 0
        return (hops - far) * self._hop_s(self._near, num_bytes) + far * self._hop_s(
            self._far, num_bytes
        )

    def of_sums_s(self, num_bytes: float, hops: int) -> float:
        """Return the same of a sum; a gradient goes to its owner at once."""
        if self.to_owners:  # of a group its way to the lead is as far at least
            hops = int(not self.is_grouped)
        return self.way_s(num_bytes, hops)

    def in_group_s(self, sum_bytes: float, param_bytes: float) -> float:
        """Return the seconds from a worker to its lead, and back."""
        if not self.is_grouped:
            return 0.0
        return self._hop_s(self._near, sum_bytes) + self._hop_s(self._near, param_bytes)

    def _hop_s(self, link: Network, num_bytes: float) -> float:
        return link.latency_s + link.transfer_s(num_bytes)


def _ways_s(costs: Costs, ring: _Ring, slack: int) -> Iterator[float]:
    """Yield, of each stage, the ways to who reads its newest version first, and to others."""
    num_stages, num_groups = len(costs.forward_s), ring.num_groups
    both = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    behind_s = [*accumulate(reversed(both))][::-1]  # from a stage's forward to its backward
    for j, in_between_s in enumerate(behind_s):
        sums, params = costs.sent_sum_bytes[j], costs.sent_param_bytes[j]
        to_itself_s = in_between_s + ring.in_group_s(sums, params)
        num_fresh = fresh_readers(j, num_stages, num_groups, slack)
        if num_fresh > 0:
            is_owner = num_fresh == 1
            way_s = (
                0.0 if is_owner else ring.of_sums_s(sums, 1) + ring.way_s(params, num_fresh - 1)
            )
            yield to_itself_s + way_s
        if num_fresh < num_groups:  # who is behind these, around the ring, reads the one before
            sums_s = ring.of_sums_s(sums, max(num_fresh, 1))
            way_s = sums_s + ring.way_s(params, num_groups - 1)
            yield (to_itself_s + way_s) / 2


def fresh_readers(j: int, num_stages: int, num_workers: int, slack: int) -> int:
    """Return how many workers, or groups, read the newest version of stage j: the last ones.

    Example:
        >>> [fresh_readers(j, 4, 8, 0) for j in range(4)]
        [1, 3, 5, 7]
    """
    spare = 2 * j - slack  # slots for which the newest version is there before the last reads
    return 0 if spare < 0 else min(num_workers, 1 + spare * num_workers // (2 * num_stages))


def quickest(network: Network) -> Network:
    """Return a link that none is faster than."""
    if network.inside is None:
        return network
    return Network(
        latency_s=min(network.latency_s, network.inside.latency_s),
        bandwidth_bytes_per_s=max(
            network.bandwidth_bytes_per_s, network.inside.bandwidth_bytes_per_s
        ),
    )


@final
class RingNumbers(NamedTuple):
    """Hold the numbers of a plan around the ring.

    Args:
        preset: "cyclic_dp", or "cyclic_dp_v1".
        slack: slots that a new version is given to travel; 0 where all are delayed.
        to_owners: whether gradients go straight to owners.
    """

    preset: str
    num_stages: int
    slack: int = 0
    group_size: int = 1
    to_owners: bool = False

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
            to_owners=self.to_owners,
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
    to_owners: bool = False,
) -> RingNumbers | None:
    """Return the simplest of the plans that are predicted to be within 1 % of the fastest.

    Args:
        preset: "cyclic_dp", or "cyclic_dp_v1".
        cut: what stages cost, by how many there are.
        slack: the only one to look at. [0, and powers of two]
        group_sizes: numbers of workers that may run in the same slots.
        to_owners: whether gradients go straight to owners.

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
        for each in _numbers(preset, costs, slack, group_sizes)
        for numbers in (each._replace(to_owners=to_owners),)
        if num_workers * numbers.num_stages * _STEPS <= _MOST_CELLS
    }
    found: dict[RingNumbers, float] = {}
    for numbers in _in_order(bounds, num_workers)[:_MOST_SIMULATED]:
        if bounds[numbers] >= min(found.values(), default=inf) / ALIKE:
            break  # neither it nor what is behind it can be clearly faster
        plan = numbers.plan(num_workers)
        found[numbers] = simulate(
            programs_of(plan), costs[numbers.num_stages], network, plan
        ).step_s
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
        to_owners=numbers.to_owners,
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
    return [1 << k for k in range(most.bit_length())]
