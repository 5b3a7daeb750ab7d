"""Foresight: the predicted weights that forwards read under the ``predicted`` rule.

When the backward comes, the weights in the graph are others: the newest (PipeOptim), or a new
guess (SpecTrain). What the forward computed with them stays. So one stand-in for each stage serves
all micro-batches.

Under autocast a graph holds low-precision copies of the weights, so that a backward reads those
that its forward predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action
from lightning_cyclic.runtime.bits import unseen

Guess: TypeAlias = Callable[[int, Sequence[nn.Parameter], int, int], list[Tensor]]
"""(stage, its parameters, the version that they hold, updates to look ahead) -> values."""
Values: TypeAlias = dict[str, Tensor]


@final
class Foresight:
    """Guess the weights of stages, and keep guesses that are owed.

    Args:
        plan: says how far forwards and backwards look ahead.
        stages: stage -> name -> trained parameter.
        guess: looks ahead from a stage's own parameters.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Mapping[str, nn.Parameter]],
        guess: Guess,
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._guess = guess
        self._reserved: dict[tuple[int, int, int], Values] = {}

    def train_others(self, stages: Mapping[int, Mapping[str, nn.Parameter]]) -> None:
        """Guess other parameters from now on, behind a flush; what was frozen stays as it is."""
        self._stages = stages
        for (t, i, j), values in self._reserved.items():
            named = stages[j].items()
            self._reserved[t, i, j] = {n: values.get(n, p.detach().clone()) for n, p in named}

    def restart(self) -> None:
        """Forget the guesses from weights that others have taken the place of, behind a flush."""
        self._reserved.clear()

    def looks_ahead(self, a: Action) -> bool:
        """Say whether the forward or the backward of a micro-batch reads a guess."""
        assert a.i is not None
        plan = self._plan
        return plan.horizon(a.t, a.i, a.j) > 0 or plan.backward_horizon(a.j) > 0

    def forward(self, a: Action, newest: int) -> Values:
        """Return what a forward reads.

        Args:
            a: the forward.
            newest: version that the parameters hold.
        """
        assert a.i is not None
        reserved = self._reserved.pop((a.t, a.i, a.j), None)
        return self._made(a, newest) if reserved is None else reserved

    def backward(self, j: int, newest: int) -> Values:
        """Return what a backward reads."""
        return self._look(j, newest, self._plan.backward_horizon(j))

    def reserve(self, a: Action, newest: int) -> None:
        """Guess now for a forward that would run before the next update, but for a flush."""
        assert a.i is not None
        key = (a.t, a.i, a.j)
        if key not in self._reserved and self.looks_ahead(a):
            self._reserved[key] = self._made(a, newest)

    def _made(self, a: Action, newest: int) -> Values:
        assert a.i is not None
        return self._look(a.j, newest, self._plan.horizon(a.t, a.i, a.j))

    def _look(self, j: int, newest: int, horizon: int) -> Values:
        stage = self._stages[j]
        if horizon == 0:
            return {n: p.detach() for n, p in stage.items()}
        values = self._guess(j, list(stage.values()), newest, horizon)
        return dict(zip(stage, values, strict=True))

    # ------------------------------------------------------------------ checkpoints

    def owed(self) -> dict[str, dict[tuple[int, int], Tensor]]:
        """Return the guesses that later forwards are owed: name -> (t, i) -> values."""
        found: dict[str, dict[tuple[int, int], Tensor]] = {}
        for (t, i, _), values in self._reserved.items():
            for n, x in values.items():
                found.setdefault(n, {})[t, i] = x.clone()
        return found

    def put_owed(self, owed: Mapping[str, Mapping[tuple[int, int], Tensor]]) -> None:
        """Take guesses from a checkpoint."""
        for j, stage in self._stages.items():
            for t, i in sorted({key for n in stage for key in owed.get(n, {})}):
                values = {n: owed.get(n, {}).get((t, i), p) for n, p in stage.items()}
                self._reserved[t, i, j] = {
                    n: torch.empty_like(p).copy_(values[n]).detach() for n, p in stage.items()
                }


def overwrite(parameters: Mapping[str, nn.Parameter], values: Values) -> None:
    """Change values that graphs hold, unseen by autograd."""
    held = [parameters[n] for n in values]
    with torch.no_grad(), unseen(held):
        for q, x in zip(held, values.values(), strict=True):
            q.copy_(x)
