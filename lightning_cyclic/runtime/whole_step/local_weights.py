"""Local weights: a worker's own, which it trains alone, and the outer ones, which all have alike.

    end of a step   update_alone   the user's optimizer, on all stages, by the own gradients
    ADD                            of what all had before, less what there is now: a gradient of
                                   the outer weights, whose sum over workers the program makes
    UPDATE          update_outer   the owner: their mean, and SGD with Nesterov momentum
    behind it       meet           all: both are the new outer weights

Between steps the module has the worker's own weights. Behind a flush it has the outer ones, at
which validation and checkpoints look; the next step goes on from the own ones, so that a flush
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.gradient_store import GradientStore, Sum
from lightning_cyclic.runtime.stages.stage_map import StageMap
from lightning_cyclic.runtime.whole_step.engine_state import LocalState
from lightning_cyclic.runtime.whole_step.versions import VersionStore

_MOMENTUM = "momentum_buffer"  # as SGD names it


@final
class LocalWeights:
    """Keep both.

    Args:
        stores: of this worker's own weights, by stage. What they show now are the outer ones.
        grads: has gradients where the own weights are updated, and behind that differences.
        state: where to go on. [the own weights are the outer ones]
    """

    def __init__(
        self,
        plan: Plan,
        worker: int,
        stages: StageMap,
        stores: Sequence[VersionStore],
        grads: GradientStore,
        state: LocalState | None,
    ) -> None:
        self._plan, self._stages = plan, stages
        self._stores, self._grads = stores, grads
        self._outer = {p: p.detach().clone() for store in stores for p in store.parameters}
        owned = [j for j in range(plan.num_stages) if plan.owner(j) == worker]
        self._masters = {j: self._masters_of(j) for j in owned}
        self._optimizers = {j: self._outer_optimizer(j) for j in owned if self._masters[j]}
        if state is not None:
            self._restore(state)
        self.show_outer()

    def _masters_of(self, j: int) -> dict[str, nn.Parameter]:
        """Return outer weights of an own stage by name, in float32 or wider."""
        named = zip(self._stages.trained[j], self._grads.parameters_of(j), strict=True)
        wide = torch.float32
        return {
            n: nn.Parameter(self._outer[p].to(torch.promote_types(p.dtype, wide)))
            for n, p in named
        }

    def _outer_optimizer(self, j: int) -> torch.optim.Optimizer:
        rule = self._plan.local
        assert rule is not None
        momentum = rule.outer_momentum
        return torch.optim.SGD(
            self._masters[j].values(), lr=rule.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    # ------------------------------------------------------------------ in a step

    def update_alone(self, t: int, update: Callable[[int, Sequence[int]], object]) -> None:
        """Update all stages by this worker's gradients; leave differences of what is exchanged.

        Args:
            update: (step, stages) -> applies what is in ``p.grad``.
        """
        stages = range(self._plan.num_stages)
        words = [self._grads.show(t, j).word for j in stages]
        update(t, stages)
        for j, store in enumerate(self._stores):
            store.end_update(t)
            parameters = self._grads.parameters_of(j)
            for p in parameters:
                p.grad = None
            if self._plan.exchanges(t, j):
                differences = [
                    self._outer[p] - p.detach() if p.requires_grad else None for p in parameters
                ]
                self._grads.extend(t, j, Sum(differences, words[j]))

    def update_outer(self, t: int, stages: Collection[int]) -> None:
        """Make new outer weights of stages, of sums of differences in ``p.grad``."""
        for j in stages:
            if not self._plan.exchanges(t, j):  # it has been updated alone
                continue
            pairs = list(zip(self._masters[j].values(), self._grads.parameters_of(j), strict=True))
            for master, p in pairs:
                if p.grad is not None:  # else it is frozen
                    master.grad = p.grad.to(master.dtype) / self._plan.num_workers
            if pairs:
                self._optimizers[j].step()
            for p in self._stores[j].parameters:  # what is frozen since goes back
                p.data.copy_(self._outer[p])
            for master, p in pairs:
                if master.grad is not None:
                    p.data.copy_(master.detach())
                    master.grad = None

    def meet(self, t: int) -> None:
        """Note new outer weights, which have come as the newest version."""
        for j in range(self._plan.num_stages):
            if self._plan.exchanges(t, j):
                for p in self._stores[j].parameters:
                    self._outer[p].copy_(p.detach())

    def show_outer(self) -> None:
        """Let the module have the outer weights, until the next forward enters its stages."""
        for store in self._stores:
            store.show_other([self._outer[p] for p in store.parameters])

    # ------------------------------------------------------------------ where to go on

    def state(self, t: int) -> LocalState:
        """Return what a checkpoint needs; behind a flush."""
        momentum: dict[str, Tensor] = {}
        masters: dict[str, Tensor] = {}
        for n, p, master in self._named_masters():
            state = self._optimizers[self._stages.stage_of[n]].state.get(master, {})
            if state.get(_MOMENTUM) is not None:
                momentum[n] = state[_MOMENTUM].clone()
            if master.dtype != p.dtype:
                masters[n] = master.detach().clone()
        return LocalState(own=self._own(t), momentum=momentum, masters=masters)

    def _own(self, t: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for stage, store in zip(self._stages.stages, self._stores, strict=True):
            each = zip(stage.parameters, store.parameters, store[t].tensors, strict=True)
            found |= {n: x.clone() for n, p, x in each if not torch.equal(x, self._outer[p])}
        return found

    def _restore(self, state: LocalState) -> None:
        with torch.no_grad():
            for stage, store in zip(self._stages.stages, self._stores, strict=True):
                for n, p in zip(stage.parameters, store.parameters, strict=True):
                    if n in state.own:
                        p.copy_(state.own[n])  # in the version that is shown
            for n, _, master in self._named_masters():
                if n in state.masters:
                    master.copy_(state.masters[n])
                if n in state.momentum:
                    optimizer = self._optimizers[self._stages.stage_of[n]]
                    optimizer.state[master] = {_MOMENTUM: state.momentum[n].to(master.device)}

    def _named_masters(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        for j, masters in self._masters.items():
            pairs = zip(masters.items(), self._grads.parameters_of(j), strict=True)
            yield from ((n, p, master) for (n, master), p in pairs)
