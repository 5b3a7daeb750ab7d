"""The exact global gradient norm when stages have different owners.

Each owner computes the norms of its own stages' gradients, tensor by tensor, and sends them to
every other owner; each then reduces the same numbers in the same order, so that all clip by the
same bits as one process that holds everything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport
from lightning_cyclic.runtime.waiting import Wait

_NORM_CHANNELS = 1 << 17  # beside the channels of stages


@final
class NormExchange:
    """Exchange per-tensor gradient norms between the owners of stages.

    Args:
        plan: says who owns which stage.
        parameters: the parameters of each stage.
        transport: how messages travel; None for one worker.
        wait: waits for a message and names it if it does not come.
        for_all: whether workers that own no stage are told, too.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Sequence[Sequence[nn.Parameter]],
        transport: AbstractTransport | None,
        wait: Wait,
        *,
        for_all: bool = False,
    ) -> None:
        self._parameters = parameters
        self._transport = transport
        self._wait = wait
        self._owners = [plan.owner(j) for j in range(plan.num_stages)]
        told = range(plan.num_workers) if for_all else self._owners
        self._others = sorted(set(told) - {self._me})
        self._remembered = 2 * plan.steps_under_way
        self._known: dict[int, dict[int, Tensor]] = {}  # step -> stage -> norms of its tensors
        self._sent: list[tuple[int, AbstractPending, Action]] = []

    def total_norm(self, t: int, order: Sequence[nn.Parameter]) -> Tensor:
        """Return the 2-norm of step ``t``'s gradients over all stages, shape ().

        Args:
            t: the step whose totals lie in ``p.grad`` of the owned stages.
            order: all trained parameters, in the order in which the norms are reduced.
        """
        for j, owner in enumerate(self._owners):
            if owner == self._me:
                self.begin(t, j)
        total = self.end(t, order)
        self.settle()
        self.forget(t)
        return total

    # ------------------------------------------------------------------ apart in time

    def begin(self, t: int, j: int) -> None:
        """Tell the others the norms of an own stage, whose totals lie in ``p.grad``.

        And forget steps so long over that every worker has read them: those of another worker
        are read within as many steps as can be under way, and each may be as many behind.
        """
        self.settle(before=t - self._remembered)
        self.forget(t - self._remembered)
        if not self._parameters[j]:
            return
        norms = torch.stack([_norm(p) for p in self._parameters[j]])
        self._known.setdefault(t, {})[j] = norms
        for peer in self._others:
            assert self._transport is not None
            data = norms.view(torch.uint8)
            pending = self._transport.isend(Payload.T, _NORM_CHANNELS + j, peer, data)
            action = Action(kind=Kind.SEND, payload=Payload.T, t=t, j=j, peer=peer)
            self._sent.append((t, pending, action))

    def end(self, t: int, order: Sequence[nn.Parameter]) -> Tensor:
        """Return the 2-norm of step ``t``'s gradients over all stages, shape ().

        Args:
            t: a step whose norms all owners have told, or will; steps in their order.
            order: as in :meth:`total_norm`.
        """
        norms = self._all_of(t)
        by_parameter: dict[int, Tensor] = {}
        for j, values in norms.items():
            by_parameter |= {
                id(p): x.to(p.dtype)
                for p, x in zip(self._parameters[j], values.unbind(), strict=True)
            }
        present = [by_parameter[id(p)] for p in order if id(p) in by_parameter]
        present = [x for x in present if not bool(x < 0)]  # -1 marks a tensor without gradient
        if not present:
            return torch.zeros(())
        total: Tensor = torch.linalg.vector_norm(torch.stack(present))
        return total

    def is_finite(self, t: int, stages: Collection[int] | None = None) -> bool:
        """Say whether the gradients of step ``t`` are finite, of some stages or of all."""
        norms = self._all_of(t) if stages is None else self._known.get(t, {})
        return all(bool(torch.isfinite(x).all()) for j, x in norms.items() if _among(j, stages))

    def settle(self, before: int | None = None) -> None:
        """Wait until what was sent of steps before one has arrived; or all."""
        still = []
        for t, pending, action in self._sent:
            if before is None or t < before:
                self._wait(pending, action)
            else:
                still.append((t, pending, action))
        self._sent = still

    def forget(self, t: int) -> None:
        """Forget the norms of steps up to ``t``."""
        self._known = {k: norms for k, norms in self._known.items() if k > t}

    @property
    def _me(self) -> int:
        return 0 if self._transport is None else self._transport.worker

    def _all_of(self, t: int) -> dict[int, Tensor]:
        """Return the norms of every stage, received if they have not been yet."""
        known, waits = self._known.setdefault(t, {}), []
        for j, owner in enumerate(self._owners):
            ps = self._parameters[j]
            if owner != self._me and j not in known and ps:
                assert self._transport is not None
                data = torch.empty(8 * len(ps), dtype=torch.uint8, device=ps[0].device)
                pending = self._transport.irecv(Payload.T, _NORM_CHANNELS + j, owner, data)
                action = Action(kind=Kind.RECV, payload=Payload.T, t=t, j=j, peer=owner)
                waits.append((pending, action))
                known[j] = data.view(torch.float64)
        for pending, action in waits:
            self._wait(pending, action)
        return dict(sorted(known.items()))


def _norm(p: nn.Parameter) -> Tensor:
    if p.grad is None:
        return torch.full((), -1.0, dtype=torch.float64, device=p.device)
    return torch._foreach_norm([p.grad])[0].double()  # exact; cast back before the reduction


def _among(j: int, stages: Collection[int] | None) -> bool:
    return stages is None or j in stages
