"""The exact global gradient norm when stages have different owners.

Each owner computes the norms of its own stages' gradients, tensor by tensor, and sends them to
every other owner; each then reduces the same numbers in the same order, so that all clip by the
same bits as one process that holds everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_cyclic.actions import Action, Kind, Payload
from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.transport import AbstractTransport
from lightning_cyclic.runtime.waiting import Wait

_NORM_CHANNELS = 1 << 17  # beside the channels of stages


@final
class NormExchange:
    """Exchange per-tensor gradient norms between the owners of stages.

    Args:
        plan: says who owns which stage.
        parameters: the parameters of each stage.
        transport: how messages travel.
        wait: waits for a message and names it if it does not come.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Sequence[Sequence[nn.Parameter]],
        transport: AbstractTransport,
        wait: Wait,
    ) -> None:
        self._parameters = parameters
        self._transport = transport
        self._wait = wait
        self._owners = [plan.owner(j) for j in range(plan.num_stages)]

    def total_norm(self, t: int, order: Sequence[nn.Parameter]) -> Tensor:
        """Return the 2-norm of step ``t``'s gradients over all stages, shape ().

        Args:
            t: the step whose totals lie in ``p.grad`` of the owned stages.
            order: all trained parameters, in the order in which the norms are reduced.
        """
        norms = self._own_norms()
        norms |= self._exchange(t, norms)
        by_parameter: dict[int, Tensor] = {}
        for j, values in norms.items():
            by_parameter |= {
                id(p): x.to(p.dtype)
                for p, x in zip(self._parameters[j], values.unbind(), strict=True)
            }
        present = [by_parameter[id(p)] for p in order if id(p) in by_parameter]
        present = [x for x in present if not bool(x < 0)]  # -1 marks a tensor without gradient
        total: Tensor = torch.linalg.vector_norm(torch.stack(present))
        return total

    def _own_norms(self) -> dict[int, Tensor]:
        me = self._transport.worker
        return {
            j: torch.stack([_norm(p) for p in ps])
            for j, ps in enumerate(self._parameters)
            if self._owners[j] == me
        }

    def _exchange(self, t: int, own: Mapping[int, Tensor]) -> dict[int, Tensor]:
        me, received, waits = self._transport.worker, {}, []
        for j, owner in enumerate(self._owners):
            if owner != me:
                ps = self._parameters[j]
                data = torch.empty(8 * len(ps), dtype=torch.uint8, device=ps[0].device)
                pending = self._transport.irecv(Payload.T, _NORM_CHANNELS + j, owner, data)
                waits.append(
                    (pending, Action(kind=Kind.RECV, payload=Payload.T, t=t, j=j, peer=owner))
                )
                received[j] = data.view(torch.float64)
        for j, values in own.items():
            for peer in sorted(set(self._owners) - {me}):
                data = values.view(torch.uint8)
                pending = self._transport.isend(Payload.T, _NORM_CHANNELS + j, peer, data)
                waits.append(
                    (pending, Action(kind=Kind.SEND, payload=Payload.T, t=t, j=j, peer=peer))
                )
        for pending, action in waits:
            self._wait(pending, action)
        return received


def _norm(p: nn.Parameter) -> Tensor:
    if p.grad is None:
        return torch.full((), -1.0, dtype=torch.float64, device=p.device)
    return torch._foreach_norm([p.grad])[0].double()  # exact; cast back before the reduction
