"""What workers of stages do together: put weights together, and reduce over replicas."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.transport.base import Line

_OPERATIONS = {
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


@final
class Collectives:
    """Carry out what every worker must call.

    Args:
        replicas: how many there are.
        size: workers of each.
    """

    def __init__(self, module: nn.Module, replicas: int, size: int, assembly: Assembly) -> None:
        self._module = module
        self._width = replicas
        self._size = size
        self._assembly = assembly
        self._reduces = replicas > 1 and not assembly.is_alone
        self._peers: Line | None = self._met() if self._reduces else None

    def _met(self) -> Line | None:
        """Return the process group of the workers with this one's place in their replicas."""
        rank, mine = self._assembly.rank, None
        # All ranks make all groups: those that members make alone have names that come again when
        # a group has been closed, and whoever is early finds addresses of the closed one. But over
        # gloo torch fails on the ranks outside, where the default group knows its GPU.
        default: Any = dist.group.WORLD
        by_members = dist.get_backend() == "gloo" and default.bound_device_id is not None
        for place in range(self._size):
            ranks = [replica * self._size + place for replica in range(self._width)]
            if rank in ranks or not by_members:
                made = self._assembly.line(None, ranks, by_members=by_members)
                mine = made if rank in ranks else mine
        return mine

    def gather(self, cuts: Cuts, plan: Plan) -> dict[str, Tensor]:
        """Return all parameters and the buffers that change, whole, on every worker.

        Those of others are in host memory. Other buffers are each worker's own: caches may have
        any size by now.
        """
        named: dict[str, Tensor] = dict(self._module.named_parameters())
        named |= dict(self._module.named_buffers())
        by_source: dict[int, dict[str, Tensor]] = {}
        for j in range(cuts.num_stages):
            changed = (b for b in cuts.buffers[j] if b in cuts.changed)
            held = {n: named[n] for n in (*cuts.parameters[j], *changed)}
            by_source.setdefault(rank_of(plan.owner(j), self._size), {}).update(held)
        whole: dict[str, Tensor] = {}
        for source, held in by_source.items():
            whole |= self._assembly.spread(held, source, "to put the weights together")
        return whole

    def reduce(self, tensor: Tensor, how: str) -> Tensor:
        """Reduce over replicas: over the workers that have this one's place in them.

        Workers of one replica have the same value, and each place reduces by itself, so that
        they may do so in steps that flow, each when it is told of one.
        """
        if not self._reduces:
            return tensor
        if self._peers is None or self._peers.group is None:  # behind the end
            self._peers = self._met()
        assert self._peers is not None
        group = self._peers.group
        reduced = tensor.to(_device_for(group))  # which is the tensor itself, mostly
        dist.all_reduce(reduced, _OPERATIONS.get(how, dist.ReduceOp.SUM), group=group)
        if reduced is not tensor:
            tensor.copy_(reduced)
        if how not in ("mean", "avg"):
            return tensor
        if tensor.is_floating_point():
            return tensor.div_(self._width)
        return tensor.div_(self._width, rounding_mode="floor")


def _device_for(group: Any) -> torch.device:
    """Return where a process group takes tensors: in the host's memory, if it may be chosen."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


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
