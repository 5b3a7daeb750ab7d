"""Which worker is which rank."""

from __future__ import annotations


def rank_of(worker: int, size: int) -> int:
    """Return the rank of a worker, or the worker of a rank.

    The last stage of a replica is on its first rank: rank 0 has the loss and the metrics, which
    it shows and logs.

    Args:
        worker: counted from the input side, replica by replica.
        size: workers per replica.
    """
    replica, place = divmod(worker, size)
    return replica * size + size - 1 - place
