"""The reference: lockstep data parallelism with bucketed, overlapped ring all-reduces.

As PyTorch's DistributedDataParallel does it, every worker at the same time:

    forward | backward of stage S-1 ... 1, 0
                       | all-reduce of bucket 0 | of bucket 1 | ... | update

A bucket is reduced when all its gradients are ready and the bucket before it is through. A ring
all-reduce of b bytes among N workers takes 2 (N-1) rounds of b/N bytes and one latency each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from lightning_cyclic.simulate.costs import Costs, Network


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lockstep:
    """Hold what one step of lockstep data parallelism costs each worker.

    Args:
        step_s: seconds per step.
        compute_s: seconds of it with compute.
        sent_bytes: bytes that each worker sends per step.
        sent_messages: messages that each worker sends per step.
        num_buckets: number of all-reduces per step.
    """

    step_s: float
    compute_s: float
    sent_bytes: float
    sent_messages: int
    num_buckets: int

    @property
    def bubble(self) -> float:
        """Return the share of the step for which compute is idle."""
        return 1 - self.compute_s / self.step_s if self.step_s else 0.0


def lockstep(
    costs: Costs,
    network: Network,
    num_workers: int,
    *,
    micro_per_worker: float = 1,
    bucket_bytes: float = 0,
) -> Lockstep:
    """Compute one step of lockstep data parallelism.

    Args:
        costs: what each stage costs.
        network: the links between the workers; a round is as fast as the slowest of them.
        num_workers: number of workers.
        micro_per_worker: micro-batches that each worker accumulates before it reduces; gradients
            are reduced during the backward of the last.
        bucket_bytes: least size of a bucket; whole stages are added, from the last to the first,
            until it is reached. 0 gives one bucket per stage, PyTorch's default is 25 MiB.

    Returns:
        The step.

    Example:
        >>> costs = Costs.even(8, compute_s=1.0, model_bytes=1e6)
        >>> round(lockstep(costs, Network(bandwidth_bytes_per_s=2e6), 4).step_s, 2)
        1.17
    """
    rounds, link = 2 * (num_workers - 1), network.slowest
    micro_s = sum(costs.forward_s) + sum(costs.backward_s)
    update_s = sum(costs.update_s)
    before_s = (micro_per_worker - 1) * micro_s + sum(costs.forward_s)
    reduced_s, num_buckets = 0.0, 0
    for backward_s, num_bytes in _buckets(costs, bucket_bytes):
        one_round_s = link.latency_s + link.transfer_s(num_bytes / num_workers)
        reduced_s = max(reduced_s, before_s + backward_s) + rounds * one_round_s
        num_buckets += 1
    return Lockstep(
        step_s=max(reduced_s, micro_per_worker * micro_s) + update_s,
        compute_s=micro_per_worker * micro_s + update_s,
        sent_bytes=rounds * sum(costs.param_bytes) / num_workers,
        sent_messages=rounds * num_buckets,
        num_buckets=num_buckets,
    )


def _buckets(costs: Costs, bucket_bytes: float) -> Iterator[tuple[float, float]]:
    """Yield when, in seconds of backward, each bucket is complete, and its bytes."""
    elapsed_s, num_bytes = 0.0, 0.0
    for j in range(len(costs.backward_s) - 1, -1, -1):
        elapsed_s += costs.backward_s[j]
        num_bytes += costs.param_bytes[j]
        if num_bytes >= bucket_bytes or j == 0:
            yield elapsed_s, num_bytes
            num_bytes = 0.0
