"""All-reduces: what a sum over all workers costs, by each way that libraries have.

    ring        2 (N-1) rounds of 1/N of the bytes
    tree        2 log2(N) rounds of 1/2, 1/4, ... of them, as many bytes in all: fewer latencies
    two-level   inside each host, then between hosts, each worker its share of the bytes

The tree stands for what libraries with trees come close to: recursive halving and doubling
(Thakur, Rabenseifner and Gropp 2005, section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil, inf, log2
from typing import NamedTuple

from lightning_cyclic.simulate.costs import Network


class AllReduce(NamedTuple):
    """Hold what a sum of some bytes costs each worker.

    Args:
        seconds: until all have it.
        messages: that a worker sends.
    """

    seconds: float
    messages: int


def ring(num_bytes: float, num_workers: int, network: Network) -> AllReduce:
    """Return what a ring all-reduce costs; a round is as slow as the slowest link."""
    link, rounds = network.slowest, 2 * (num_workers - 1)
    one_round_s = link.latency_s + link.transfer_s(num_bytes / num_workers)
    return AllReduce(rounds * one_round_s, rounds)


def tree(num_bytes: float, num_workers: int, network: Network) -> AllReduce:
    """Return what recursive halving and doubling costs."""
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
