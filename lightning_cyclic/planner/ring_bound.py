"""The ring bound: a step time that no data-parallel plan can beat, from its numbers alone.

A new version of a stage is made of all workers' gradients, so it has visited each of them before
who reads it computes the next gradient with it:

    F(i,j) B(i,j) -> N-1-i workers add -> owner -> the readers before it in the chain -> F(i,j)

That way takes as many steps as the version that is read is old, and one more. The longest way
over its steps, the compute of a step, and what each port has to send are three bounds. What is
left out is that messages wait for each other at a port.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from lightning_cyclic.simulate.costs import Costs, Network


def ring_bound_s(
    costs: Costs,
    network: Network,
    num_workers: int,
    *,
    slack: int = 0,
    chunks: int = 1,
    sharding: str = "optimizer",
) -> float:
    """Return the seconds that a step takes at least.

    Args:
        costs: what each stage costs.
        network: the links between the workers.
        num_workers: N.
        slack: slots that a new version needs to travel; with ``2 S - 1`` all versions are delayed.
        chunks: in which a stage travels.
        sharding: "optimizer" or "none".

    Example:
        >>> costs = Costs.even(8, compute_s=1.0, model_bytes=1.0)
        >>> network = Network(latency_s=0.25, bandwidth_bytes_per_s=100.0)
        >>> [round(ring_bound_s(costs, network, 8, slack=slack), 2) for slack in (0, 4, 15)]
        [2.13, 1.7, 1.5]
    """
    link = _quickest(network)
    compute_s = sum(costs.forward_s) + sum(costs.backward_s)
    most_bytes = _most_bytes(costs, num_workers, slack, sharding)
    ways_s = _ways_s(costs, link, num_workers, slack, chunks) if num_workers > 1 else ()
    return max(compute_s, link.transfer_s(most_bytes), *ways_s)


def _most_bytes(costs: Costs, num_workers: int, slack: int, sharding: str) -> float:
    """Return the bytes of the port that has most to send, or to receive, in a step."""
    num_stages, last = len(costs.forward_s), num_workers - 1
    sums, params = sum(costs.sent_sum_bytes), sum(costs.sent_param_bytes)
    sent = [sums + params] * last + [params]  # but for what nobody is behind them to need
    received = [params] + [sums + params] * last
    for j in range(num_stages):
        num_fresh = fresh_readers(j, num_stages, num_workers, slack)
        first = (num_workers - num_fresh) % num_workers
        owner = first if sharding == "optimizer" else last
        end = first - 1 if first else last - (owner == last)  # of the new version's way
        sent[end] -= costs.sent_param_bytes[j]
        received[owner] -= costs.sent_param_bytes[j]
        if owner != last:  # to whom the total goes
            sent[last] += costs.sent_sum_bytes[j]
            received[owner] += costs.sent_sum_bytes[j]
    return max(*sent, *received) if num_workers > 1 else 0.0


def _ways_s(
    costs: Costs, link: Network, num_workers: int, slack: int, chunks: int
) -> Iterator[float]:
    """Yield, of each stage, the ways to who reads its newest version first, and to others."""
    num_stages = len(costs.forward_s)
    both = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    behind_s = [*accumulate(reversed(both))][::-1]  # from a stage's forward to its backward
    for j, in_between_s in enumerate(behind_s):
        whole_s = link.transfer_s(costs.sent_param_bytes[j])
        hop_s = link.latency_s + whole_s / chunks
        num_fresh = fresh_readers(j, num_stages, num_workers, slack)
        if num_fresh > 1:
            yield in_between_s + num_fresh * hop_s
        if num_fresh < num_workers:  # who is behind these, around the ring, reads the one before
            hops = num_workers + max(num_fresh - 1, 0)
            yield (in_between_s + hops * hop_s) / 2


def fresh_readers(j: int, num_stages: int, num_workers: int, slack: int) -> int:
    """Return how many workers read the newest version of stage j: the last ones.

    Example:
        >>> [fresh_readers(j, 4, 8, 0) for j in range(4)]
        [1, 3, 5, 7]
    """
    spare = 2 * j - slack  # slots for which the newest version is there before the last reads
    return 0 if spare < 0 else min(num_workers, 1 + spare * num_workers // (2 * num_stages))


def _quickest(network: Network) -> Network:
    """Return a link that none is faster than."""
    if network.inside is None:
        return network
    return Network(
        latency_s=min(network.latency_s, network.inside.latency_s),
        bandwidth_bytes_per_s=max(
            network.bandwidth_bytes_per_s, network.inside.bandwidth_bytes_per_s
        ),
    )
