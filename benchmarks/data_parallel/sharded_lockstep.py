"""What a lockstep step with sharded parameters takes, by formula: the reference of sharding.py.

As FSDP does it, every worker at the same time, block after block: an all-gather before a block's
forward and before its backward, a reduce-scatter behind its backward.

    gathers     0   1   2   ...                   either one ahead of compute, or in its way
    compute         F0  F1  F2  ...  B2  B1  B0
    reductions                           2   1   0

Collectives of a worker run one after the other. One of b bytes takes, among N workers,

    ring        N - 1 rounds, of one latency and b/N bytes each
    doubling    log2 N rounds (rounded up), of one latency each, and (N - 1)/N of b in all

The simulator has no collectives, which no program of ours contains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_cyclic.simulate import Costs, Network


def collective_s(algorithm: str, num_bytes: float, network: Network, num_workers: int) -> float:
    """Return the seconds of one all-gather or reduce-scatter."""
    rounds = num_workers - 1 if algorithm == "ring" else math.ceil(math.log2(num_workers))
    moved = num_bytes * (num_workers - 1) / num_workers
    return rounds * network.latency_s + network.transfer_s(moved)


def step_s(
    costs: Costs, network: Network, num_workers: int, *, algorithm: str, overlaps: bool
) -> float:
    """Return the seconds of a step.

    Args:
        costs: what each block costs.
        network: the links between the workers.
        num_workers: how many.
        algorithm: "ring" or "doubling".
        overlaps: whether gathers run one block ahead of compute, and reductions beside it; else
            compute waits for each.
    """
    uses = list(_uses(costs))
    each_s = [collective_s(algorithm, use[1], network, num_workers) for use in uses]
    reduced_s = [x if use[2] else 0.0 for x, use in zip(each_s, uses, strict=True)]
    if not overlaps:
        return sum(each_s) + sum(reduced_s) + sum(use[0] for use in uses) + sum(costs.update_s)
    compute_s, network_s = 0.0, each_s[0]  # when they are free
    gathered_s = network_s
    for use, next_s, reduce_s in zip(uses, [*each_s[1:], 0.0], reduced_s, strict=True):
        began_s = max(compute_s, gathered_s)
        network_s = gathered_s = max(network_s, began_s) + next_s
        compute_s = began_s + use[0]
        if reduce_s:
            network_s = max(network_s, compute_s) + reduce_s
    return max(network_s, compute_s) + sum(costs.update_s)


def best_step_s(costs: Costs, network: Network, num_workers: int, algorithm: str) -> float:
    """Return the seconds of the best step with overlap, over sizes of blocks.

    Neighbours are joined, so that the same bytes take fewer messages, down to eight blocks: two
    are there at once, and a quarter of the model.
    """
    counts = (len(costs.param_bytes) >> k for k in range(20))
    return min(
        step_s(_joined(costs, n), network, num_workers, algorithm=algorithm, overlaps=True)
        for n in counts
        if n >= min(8, len(costs.param_bytes))
    )


def _joined(costs: Costs, num_blocks: int) -> Costs:
    whole = {"compute_s": sum(costs.forward_s) + sum(costs.backward_s)}
    whole |= {"model_bytes": sum(costs.param_bytes), "update_s": sum(costs.update_s)}
    return Costs.even(num_blocks, **whole)


def _uses(costs: Costs) -> Iterator[tuple[float, float, bool]]:
    """Yield seconds, bytes and direction of each forward and backward."""
    for seconds, num_bytes in zip(costs.forward_s, costs.param_bytes, strict=True):
        yield seconds, num_bytes, False
    each = zip(reversed(costs.backward_s), reversed(costs.param_bytes), strict=True)
    for seconds, num_bytes in each:
        yield seconds, num_bytes, True
