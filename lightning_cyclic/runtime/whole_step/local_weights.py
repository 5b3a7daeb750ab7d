"""Local weights: a worker's own, which it trains alone, and the outer ones, which all have alike.

    end of a step   update_alone   the user's optimizer, on all stages, by the own gradients
    ADD                            of what all had before, less what there is now: a gradient of
                                   the outer weights, whose sum over workers the program makes
    OUTER           make_outer     the owner: their mean, and SGD with Nesterov momentum
    U               put_outer      all others: what it has made
    UPDATE          move_on        the own weights, mixed with the outer ones if they are used now

Between steps the module has the worker's own weights. Behind a flush it has the outer ones, at
which validation and checkpoints look; the next step goes on from the own ones, so that a flush
changes nothing. It waits for exchanges that have begun: the outer weights are then as new as they
are where they are used, and nobody looks at them until then. So what is under way has no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.dataflow import Datum, Item
from lightning_cyclic.runtime.gradient_store import GradientStore, Sum
from lightning_cyclic.runtime.stages.stage_map import StageMap
from lightning_cyclic.runtime.whole_step.engine_state import LocalState
from lightning_cyclic.runtime.whole_step.versions import VersionStore

_MOMENTUM = "momentum_buffer"  # as SGD names it


@final
class LocalWeights:
    """Keep both.

    Lanes make outer weights, and take them in, while the main thread runs steps on the own ones;
    what they write it reads where the program has it wait for them.

    Args:
        stores: of this worker's own weights, by stage. What they show now are the outer ones.
        grads: has gradients where the own weights are updated, and behind that differences.
        fetch: waits for an item of the program.
        state: where to go on. [the own weights are the outer ones]
    """

    def __init__(
        self,
        plan: Plan,
        worker: int,
        stages: StageMap,
        stores: Sequence[VersionStore],
        grads: GradientStore,
        fetch: Callable[[Item], None],
        state: LocalState | None,
    ) -> None:
        assert plan.local is not None
        self._plan, self._stages, self._rule = plan, stages, plan.local
        self._stores, self._grads, self._fetch = stores, grads, fetch
        self._words: dict[int, int] = {}  # stage -> what all said in its last exchange
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
        lr, momentum = self._rule.outer_lr, self._rule.outer_momentum
        return torch.optim.SGD(
            self._masters[j].values(), lr=lr, momentum=momentum, nesterov=momentum > 0
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

    def make_outer(self, t: int, j: int) -> None:
        """Make outer weights of an own stage, of the sum of all differences of a step."""
        total = self._grads.take(t, j)
        masters, parameters = self._masters[j].values(), self._grads.parameters_of(j)
        for master, x in zip(masters, total.grads, strict=True):
            if x is not None:  # else it is frozen
                master.grad = x.to(master.dtype) / self._plan.num_workers
        if masters:
            self._optimizers[j].step()
        for master, p in zip(masters, parameters, strict=True):
            self._outer[p].copy_(master.detach())
            master.grad = None
        if total.buffer is not None:
            total.buffer.let_go()
        self._words[j] = total.word

    def outer(self, j: int) -> tuple[list[Tensor], int]:
        """Return the outer weights of a stage that its last exchange has made, and what all said.

        They stay until the next one has made others: for that, who is sent these must have used
        them.
        """
        return [self._outer[p] for p in self._stores[j].parameters], self._words[j]

    def put_outer(self, j: int, values: Sequence[Tensor], word: int) -> None:
        """Take in what the owner of a stage has made."""
        for p, x in zip(self._stores[j].parameters, values, strict=True):
            self._outer[p].copy_(x)
        self._words[j] = word

    def move_on(self, t: int, stages: Iterable[int]) -> None:
        """Let own weights be the version behind a step; use outer ones where it is time to."""
        for j in stages:
            store, used = self._stores[j], self._plan.used(t, j)
            if used is not None:
                self._fetch((Datum.OUTER, j, used))
            store.begin_update(t + 1, t + 1)
            if used is not None:
                self._use_outer(store.parameters)
            store.end_update(t + 1)
            store.words[t + 1] = self._words.get(j, 0) if used is not None else 0

    def _use_outer(self, parameters: Iterable[nn.Parameter]) -> None:
        part = self._rule.mixing
        for p in parameters:
            if not part or not p.requires_grad:  # what is frozen since goes back
                p.data.copy_(self._outer[p])
                continue
            wide = torch.promote_types(p.dtype, torch.float32)
            own, outer = p.detach().to(wide), self._outer[p].to(wide)
            p.data.copy_(own * part + outer * (1 - part))

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
