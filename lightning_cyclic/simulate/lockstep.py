"""The reference: lockstep data parallelism with bucketed, overlapped all-reduces.

As PyTorch's DistributedDataParallel does it, every worker at the same time:

    forward | backward of stage S-1 ... 1, 0
                       | all-reduce of bucket 0 | of bucket 1 | ... | update

A bucket is reduced when all its gradients are ready and the bucket before it is through. How long
that takes depends on the way that the library has:

    ring        2 (N-1) rounds of 1/N of the bytes
    tree        2 log2(N) rounds of 1/2, 1/4, ... of them, as many bytes in all: fewer latencies
    two-level   inside each host, then between hosts, each worker its share of the bytes

The tree stands for what libraries with trees come close to: recursive halving and doubling
(Thakur, Rabenseifner and Gropp 2005, section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log2
from typing import NamedTuple, final

from lightning_cyclic.simulate.costs import Costs, Network

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lockstep:
    """Hold what one step of lockstep data parallelism costs each worker.

    Args:
        all_reduce: which of :data:`~lightning_cyclic.simulate.lockstep.ALL_REDUCES` they are.
    """

    step_s: float
    compute_s: float
    sent_bytes: float
    sent_messages: int
    num_buckets: int
    all_reduce: str = "ring"

    @property
    def bubble(self) -> float:
        return 1 - self.compute_s / self.step_s if self.step_s else 0.0


def lockstep(
    costs: Costs,
    network: Network,
    num_workers: int,
    *,
    micro_per_worker: float = 1,
    bucket_bytes: float = 0,
    all_reduce: str = "ring",
) -> Lockstep:
    """Compute one step of lockstep data parallelism.

    Args:
        network: the links between the workers; a round is as fast as the slowest of them.
        micro_per_worker: micro-batches that each worker accumulates before it reduces; gradients
            are reduced during the backward of the last.
        bucket_bytes: least size of a bucket; whole stages are added, from the last to the first,
            until it is reached. 0 gives one bucket per stage, PyTorch's default is 25 MiB.

    Example:
        >>> costs = Costs.even(8, compute_s=1.0, model_bytes=1e6)
        >>> round(lockstep(costs, Network(bandwidth_bytes_per_s=2e6), 4).step_s, 2)
        1.17
    """
    buckets = list(_buckets(costs, bucket_bytes))
    return _step(costs, network, num_workers, micro_per_worker, buckets, all_reduce)


def best_lockstep(
    costs: Costs, network: Network, num_workers: int, *, micro_per_worker: float = 1
) -> Lockstep:
    """Compute the fastest step: of all all-reduces, each in up to 128 buckets of equal size.

    Args:
        costs: what each stage costs; gradients of a stage are ready little by little.
        micro_per_worker: as in :func:`lockstep`.

    Example:
        >>> costs = Costs.even(8, compute_s=1.0, model_bytes=1e6)
        >>> network = Network(latency_s=0.001, bandwidth_bytes_per_s=1e6)
        >>> best = best_lockstep(costs, network, 64)
        >>> best.all_reduce, best.num_buckets, round(best.step_s, 2)
        ('tree', 8, 2.48)
    """
    steps = (
        _step(costs, network, num_workers, micro_per_worker, _equal_buckets(costs, num), name)
        for name in ALL_REDUCES
        for num in _COUNTS
    )
    return min(steps, key=lambda step: step.step_s)


def _step(
    costs: Costs,
    network: Network,
    num_workers: int,
    micro_per_worker: float,
    buckets: Sequence[tuple[float, float]],
    all_reduce: str,
) -> Lockstep:
    micro_s = sum(costs.forward_s) + sum(costs.backward_s)
    update_s = sum(costs.update_s)
    before_s = (micro_per_worker - 1) * micro_s + sum(costs.forward_s)
    reduced_s, messages = 0.0, 0
    for backward_s, num_bytes in buckets:
        reduced = ALL_REDUCES[all_reduce](num_bytes, num_workers, network)
        reduced_s = max(reduced_s, before_s + backward_s) + reduced.seconds
        messages += reduced.messages
    return Lockstep(
        step_s=max(reduced_s, micro_per_worker * micro_s) + update_s,
        compute_s=micro_per_worker * micro_s + update_s,
        sent_bytes=2 * (num_workers - 1) * sum(costs.param_bytes) / num_workers,
        sent_messages=messages,
        num_buckets=len(buckets),
        all_reduce=all_reduce,
    )


def _equal_buckets(costs: Costs, num: int) -> list[tuple[float, float]]:
    """Return when, in seconds of backward, each of equal buckets is complete, and its bytes."""
    size = sum(costs.param_bytes) / num
    found: list[tuple[float, float]] = []
    elapsed_s, ready = 0.0, 0.0  # behind the stages so far
    for backward_s, num_bytes in zip(costs.backward_s[::-1], costs.param_bytes[::-1], strict=True):
        while num_bytes and len(found) < num - 1 and (len(found) + 1) * size < ready + num_bytes:
            share = ((len(found) + 1) * size - ready) / num_bytes
            found.append((elapsed_s + share * backward_s, size))
        elapsed_s, ready = elapsed_s + backward_s, ready + num_bytes
    return [*found, *[(elapsed_s, size)] * (num - len(found))]


def _buckets(costs: Costs, bucket_bytes: float) -> Iterator[tuple[float, float]]:
    """Yield when, in seconds of backward, each bucket is complete, and its bytes."""
    elapsed_s, num_bytes = 0.0, 0.0
    for j in range(len(costs.backward_s) - 1, -1, -1):
        elapsed_s += costs.backward_s[j]
        num_bytes += costs.param_bytes[j]
        if num_bytes >= bucket_bytes or j == 0:
            yield elapsed_s, num_bytes
            num_bytes = 0.0


class AllReduce(NamedTuple):
    seconds: float
    messages: int


def ring(num_bytes: float, num_workers: int, network: Network) -> AllReduce:
    """Return what a ring all-reduce costs; a round is as slow as the slowest link."""
    link, rounds = network.slowest, 2 * (num_workers - 1)
    one_round_s = link.latency_s + link.transfer_s(num_bytes / num_workers)
    return AllReduce(rounds * one_round_s, rounds)


def tree(num_bytes: float, num_workers: int, network: Network) -> AllReduce:
    link, rounds = network.slowest, 2 * ceil(log2(num_workers))
    sent = 2 * num_bytes * (num_workers - 1) / num_workers
    return AllReduce(rounds * link.latency_s + link.transfer_s(sent), rounds)


def two_level(num_bytes: float, num_workers: int, network: Network) -> AllReduce:
    """Return what sums inside hosts cost, then between them, and telling them inside.

    Endless where no host has several workers, or hosts are unlike each other.
    """
    per_host = set(Counter(network.hosts).values())
    if network.inside is None or len(per_host) != 1:
        return AllReduce(inf, 0)
    (k,) = per_host
    inside = tree(num_bytes, k, network.inside)
    between = tree(num_bytes / k, num_workers // k, replace(network, hosts=(), inside=None))
    return AllReduce(inside.seconds + between.seconds, inside.messages + between.messages)


ALL_REDUCES: Mapping[str, Callable[[float, int, Network], AllReduce]] = {
    "ring": ring,
    "tree": tree,
    "two-level": two_level,
}
