"""Numbering: the numbers of ranks on the ring are those that Lightning and torch have, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.utilities import rank_zero_info

from lightning_cyclic.runtime.rank_order import RankOrder, agree_on_numbers, here, numbers


@contextmanager
def numbered(
    environment: ClusterEnvironment, rank_order: RankOrder, num_local: int, limit_s: float
) -> Iterator[None]:
    """Give ranks their numbers before the process group is made, in the body.

    On one host they have those of the launcher, and nobody waits.

    Args:
        environment: in which this rank was launched; it answers with the new number from now on.
        rank_order: as in CyclicStrategy.
        num_local: ranks of this host.
        limit_s: of a wait for another rank, in seconds.

    Raises:
        ConfigurationError: on all ranks, where a list does not name the hosts that are there.
        StepError: on all ranks, where they were given different orders.
        WaitTimeoutError: a rank did not come.
        PeerError: rank 0 has gone.
    """
    rank, num_ranks = environment.global_rank(), environment.world_size()
    if dist.is_initialized():  # by an earlier fit, whose environment may have been another one
        if num_ranks == dist.get_world_size() and rank != dist.get_rank():
            _number(environment, dist.get_rank())
        yield
        return
    if num_ranks <= num_local:
        numbers([here()] * num_ranks, rank_order)  # which refuses a list of other hosts
        yield
        return
    os.environ["MASTER_ADDR"] = environment.main_address  # as Lightning does before it meets
    os.environ["MASTER_PORT"] = str(environment.main_port)
    meeting = dist.rendezvous(  # type: ignore[attr-defined]
        "env://", rank, num_ranks, timeout=timedelta(seconds=limit_s)
    )
    store, *_ = next(meeting)
    found = agree_on_numbers(store, rank_order, rank, num_ranks, limit_s)
    if found.is_new:
        _number(environment, found.order.index(rank))
        rank_zero_info(str(found))
    yield
    del store  # on rank 0 it listens, until the group's own store does


def _number(environment: ClusterEnvironment, rank: int) -> None:
    """Let an environment answer with another rank; most ignore it when they are told."""
    vars(environment)["global_rank"] = partial(int, rank)
    if "RANK" in os.environ:  # torchrun's, from which libraries that read data take their part
        os.environ["RANK"] = str(rank)
