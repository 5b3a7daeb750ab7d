"""Neighbours: in which order ranks stand on the ring, so that few of its hops cross the network.

Hosts hang on switches, and switches on others: a tree. A ring that visits one branch after the
other crosses into each as seldom as any ring can, once, on every level of the tree.

    launched over two hosts in turn   0 on a   1 on b   2 on a   3 on b   4 hops cross
    in the order 0, 2, 1, 3           0 on a   2 on a   1 on b   3 on b   2 hops cross

Rank 0 stays rank 0: the others meet at its host, and it logs and saves from the very start.
"""

from __future__ import annotations

from collections.abc import Sequence

Path = Sequence[str]
"""Where a rank is: names of switches from the top down, then that of its host."""


def ring_order(paths: Sequence[Path]) -> list[int]:
    """Return the launched ranks in the order of the ring: as launched, if that is as good.

    Branches come in the order of their first ranks, and so do ranks of one host.

    Args:
        paths: where each launched rank is.

    Example:
        >>> ring_order([("a",), ("b",), ("a",), ("b",)])
        [0, 2, 1, 3]
        >>> ring_order([("a",), ("b",), ("b",), ("a",)])  # two hops cross already
        [0, 1, 2, 3]
    """
    branches = _branches(paths)
    first: dict[tuple[str, ...], int] = {}
    for rank, names in enumerate(branches):
        for name in names:
            first.setdefault(name, rank)
    order = sorted(range(len(paths)), key=lambda r: ([first[name] for name in branches[r]], r))
    found = crossings([paths[rank] for rank in order])
    return order if found != crossings(paths) else list(range(len(paths)))


def listed_order(hosts: Sequence[str], listed: Sequence[str]) -> list[int]:
    """Return the launched ranks in the order of the ring, where hosts come as they are listed.

    The list is a ring, too, and begins with the host of rank 0.

    Args:
        hosts: of each launched rank.
        listed: each of them once.

    Example:
        >>> listed_order(["a", "b", "c", "a"], ["c", "b", "a"])
        [0, 3, 2, 1]
    """
    place = {host: k for k, host in enumerate(listed)}
    start = place[hosts[0]]
    return sorted(range(len(hosts)), key=lambda r: ((place[hosts[r]] - start) % len(listed), r))


def crossings(paths: Sequence[Path]) -> tuple[int, ...]:
    """Return how many hops of the ring cross into another branch, level by level; hosts last.

    Args:
        paths: where each rank is, in the order of the ring.

    Example:
        >>> crossings([("left", "a"), ("left", "b"), ("right", "c"), ("left", "a")])
        (2, 3)
    """
    branches = _branches(paths)
    hops = list(zip(branches, branches[1:] + branches[:1], strict=True))
    depth = len(branches[0]) if branches else 0
    return tuple(sum(here[k] != there[k] for here, there in hops) for k in range(depth))


def _branches(paths: Sequence[Path]) -> list[list[tuple[str, ...]]]:
    """Return the branches that each rank is in, from the top; of all ranks as many."""
    depth = max(map(len, paths), default=0)
    padded = [(*path, *[""] * (depth - len(path))) for path in paths]
    return [[path[: k + 1] for k in range(depth)] for path in padded]
