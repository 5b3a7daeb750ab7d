"""Rank order: which number each launched rank gets, found by all before their group is made.

    each rank   tells its host, its switches, and what was asked for, over the store of the
                group to come: there is no second port
    all         find the same order in what they read (plan/neighbours.py), or refuse it alike
    rank 0      stays until all have read, as the store is in its process

SLURM says by which switches a node is reached (SLURM_TOPOLOGY_ADDR), as ``top.leaf.node7``.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan.neighbours import crossings, listed_order, ring_order
from lightning_cyclic.runtime.agreement import require_same_lines
from lightning_cyclic.runtime.transport.names import tell_all

_KEY = "lightning_cyclic/rank_order"
_ADDRESS, _PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
_MOST_NAMED = 8
RankOrder = str | Sequence[str]


class Place(NamedTuple):
    """Say where a rank is.

    Args:
        host: its name.
        address: switches from the top down, then the node, as SLURM has them; or nothing.
    """

    host: str
    address: tuple[str, ...] = ()


def here() -> Place:
    """Return where this process is."""
    address, pattern = os.environ.get(_ADDRESS, ""), os.environ.get(_PATTERN, "")
    most = pattern.count(".") if pattern else -1  # the node's own name may have dots
    return Place(socket.gethostname(), tuple(address.split(".", most)) if address else ())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """Hold the numbers of ranks.

    Args:
        order: launched ranks, in the order of the ring.
        launched: hops of the ring that cross into another branch, as launched, level by level:
            switches from the top, and hosts last.
        now: the same in this order.
    """

    order: tuple[int, ...]
    launched: tuple[int, ...]
    now: tuple[int, ...]

    @property
    def is_new(self) -> bool:
        """Say whether some rank has another number than it was launched with."""
        return self.order != tuple(range(len(self.order)))

    def __str__(self) -> str:
        """Say what has changed, and what for."""
        moved = [f"rank {new} was launched as {old}" for new, old in enumerate(self.order)]
        moved = [text for rank, text in enumerate(moved) if self.order[rank] != rank]
        more = len(moved) - _MOST_NAMED
        rest = f", and {more} more have moved" if more > 0 else ""
        between = ["from host to host", "from switch to switch"]
        hops = [
            f"{now} of {len(self.order)} hops of the ring go {where} ({launched} as launched)"
            for now, launched, where in zip(
                self.now[::-1], self.launched[::-1], between, strict=False
            )
        ]
        return (
            f"ranks have the numbers of their order on the ring: {', '.join(hops)}; "
            f"{', '.join(moved[:_MOST_NAMED])}{rest}. Local ranks and devices stay as they are; "
            'CyclicStrategy(rank_order="launch") keeps the numbers, too.'
        )


def agree_on_numbers(
    store: Any, rank_order: RankOrder, rank: int, num_ranks: int, limit_s: float
) -> Numbering:
    """Find the numbers of all ranks together; all must call it.

    Args:
        store: of all ranks.
        rank_order: as in CyclicStrategy.
        rank: of this process, as launched.
        num_ranks: how many there are.
        limit_s: of a wait for the others, in seconds.

    Raises:
        ConfigurationError: on all ranks, where the list does not name the hosts that are there.
        StepError: on all ranks, where they were given different orders.
        WaitTimeoutError: a rank did not come.
        PeerError: rank 0 has gone.
    """
    key = f"{_KEY}/{store.add(f'{_KEY}/times/{rank}', 1)}"
    asked = rank_order if isinstance(rank_order, str) else list(rank_order)
    own = json.dumps([*here(), asked])
    told = [
        json.loads(text) for text in tell_all(store, f"{key}/is", own, rank, num_ranks, limit_s)
    ]
    if rank == 0:
        tell_all(store, f"{key}/read", "", rank, num_ranks, limit_s)
    else:
        store.set(f"{key}/read/{rank}", "")
    require_same_lines(
        "the arguments of CyclicStrategy",
        [f"rank_order={asked!r}" for *_, asked in told],
        "the same on every rank; start all ranks with one configuration",
    )
    return numbers([Place(host, tuple(address)) for host, address, _ in told], rank_order)


def numbers(places: Sequence[Place], rank_order: RankOrder) -> Numbering:
    """Number ranks by where they are.

    Args:
        places: of each rank, as launched.
        rank_order: as in CyclicStrategy.

    Raises:
        ConfigurationError: the list does not name the hosts that are there.

    Example:
        >>> a, b = Place("a"), Place("b")
        >>> numbers([a, b, a, b], "auto").order
        (0, 2, 1, 3)
    """
    paths = _paths(places)
    order = list(range(len(places)))
    if rank_order == "auto":
        order = ring_order(paths)
    elif not isinstance(rank_order, str):
        hosts = [path[-1] for path in paths]
        _check_listed(rank_order, list(dict.fromkeys(hosts)))
        order = listed_order(hosts, rank_order)
    return Numbering(
        order=tuple(order),
        launched=crossings(paths),
        now=crossings([paths[rank] for rank in order]),
    )


def _paths(places: Sequence[Place]) -> list[tuple[str, ...]]:
    """Return by which switches each rank is reached, where SLURM says so of all; and its host."""
    host_at: dict[tuple[str, ...], str] = {}
    for place in places:
        # an address that two hosts have was inherited, as by ssh from the job's first node
        if not place.address or host_at.setdefault(place.address, place.host) != place.host:
            return [(place.host,) for place in places]
    return [place.address for place in places]


def _check_listed(listed: Sequence[str], hosts: Sequence[str]) -> None:
    unknown = [host for host in listed if host not in hosts]
    missing = [host for host in hosts if host not in listed]
    if unknown or missing:
        what = [f"names no rank's host with {unknown}"] if unknown else []
        what += [f"leaves out {missing}"] if missing else []
        raise ConfigurationError(
            f"rank_order={list(listed)} {' and '.join(what)}; allowed: each host of this run "
            f'once, or "auto", or "launch"; use CyclicStrategy(rank_order={list(hosts)})'
        )
