"""What all workers do together: agree on what rank 0 finds, put weights together, reduce."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cyclic.errors import CyclicError, PlanError, StepError, VerificationError
from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.agreement import device_for, gather_texts
from lightning_cyclic.runtime.stages.cuts import Cuts

_RAISED = {kind.__name__: kind for kind in (StepError, VerificationError)}
_OPERATIONS = {
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


@final
class Collectives:
    """Carry out what every worker must call.

    Args:
        group: process group of all workers for tensors of the host; None for one worker.
    """

    def __init__(self, module: nn.Module, replicas: int, size: int, group: Any) -> None:
        self._module = module
        self._width = replicas
        self._size = size
        self._group = group
        self._peers = _peers(replicas, size) if group is not None and replicas > 1 else None

    def agree(self, find: Callable[[], Any], waiting: AbstractContextManager[None]) -> Any:
        """Return on every worker what rank 0 finds.

        Args:
            find: called on rank 0 alone; returns what JSON can say.
            waiting: the context in which all others are waited for.

        Raises:
            PlanError, StepError: on every worker, what rank 0 met.
        """
        if self._group is None:
            return find()
        text = ""
        if dist.get_rank() == 0:
            try:
                text = json.dumps(["found", find()])
            except CyclicError as error:
                text = json.dumps([type(error).__name__, str(error)])
        with waiting:
            text = gather_texts(text, self._group)[0]
        kind, data = json.loads(text)
        if kind != "found":
            raise _RAISED.get(kind, PlanError)(data)
        return data

    def gather(self, cuts: Cuts, plan: Plan) -> dict[str, Tensor]:
        """Return all parameters and the buffers that change, whole, on every worker.

        Those of others are in host memory. Other buffers are each worker's own: caches may have
        any size by now.
        """
        named = self._named()
        by_kind: dict[tuple[int, torch.dtype], list[str]] = {}
        for j in range(cuts.num_stages):
            source = rank_of(plan.owner(j), self._size)
            changed = (b for b in cuts.buffers[j] if b in cuts.changed)
            for name in [*cuts.parameters[j], *changed]:
                by_kind.setdefault((source, named[name].dtype), []).append(name)
        whole: dict[str, Tensor] = {}
        for (source, _), names in by_kind.items():
            whole |= self._sent_to_all({n: named[n] for n in names}, source)
        return whole

    def _sent_to_all(self, mine: dict[str, Tensor], source: int) -> dict[str, Tensor]:
        """Return tensors of one dtype that a rank has, on every rank, by one message."""
        is_source = source == dist.get_rank()
        if is_source:
            mine = {n: x.detach() for n, x in mine.items()}
        sizes = [x.numel() for x in mine.values()]
        if is_source:
            flat = torch.cat([x.reshape(-1).cpu() for x in mine.values()])
        else:  # absent: they have shapes alone
            flat = torch.empty(sum(sizes), dtype=next(iter(mine.values())).dtype)
        dist.broadcast(flat, source, group=self._group)
        if is_source:
            return mine
        parts = zip(mine.items(), torch.split(flat, sizes), strict=True)
        return {n: part.view(x.shape) for (n, x), part in parts}

    def reduce(self, tensor: Tensor, how: str) -> Tensor:
        """Reduce over replicas: over the workers that have this one's place in them.

        Workers of one replica have the same value, and each place reduces by itself, so that
        they may do so in steps that flow, each when it is told of one.
        """
        if self._peers is None:
            return tensor
        reduced = tensor.to(device_for(self._peers))  # which is the tensor itself, mostly
        dist.all_reduce(reduced, _OPERATIONS.get(how, dist.ReduceOp.SUM), group=self._peers)
        if reduced is not tensor:
            tensor.copy_(reduced)
        if how not in ("mean", "avg"):
            return tensor
        if tensor.is_floating_point():
            return tensor.div_(self._width)
        return tensor.div_(self._width, rounding_mode="floor")

    def meet(self) -> None:
        dist.barrier(group=self._group)

    def _named(self) -> dict[str, Tensor]:
        return dict(self._module.named_parameters()) | dict(self._module.named_buffers())


def _peers(replicas: int, size: int) -> Any:
    """Return the process group of the workers with this one's place in their replicas."""
    rank, mine = dist.get_rank(), None
    # Over NCCL every rank takes part in making every group. Over gloo torch fails on the ranks
    # outside, where the default group knows its GPU, as Lightning's do.
    by_members = dist.get_backend() == "gloo"
    for place in range(size):
        ranks = [replica * size + place for replica in range(replicas)]
        if rank in ranks or not by_members:
            made = dist.new_group(ranks, use_local_synchronization=by_members)
            mine = made if rank in ranks else mine
    return mine


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
