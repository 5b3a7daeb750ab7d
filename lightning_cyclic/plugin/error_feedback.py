"""Error feedback: turn each late update u_t into ``2 * u_t - u_(t-1)``, whatever the optimizer.

With gradients one update old, u_t is what update t - 1 should have been; the difference
``u_t - u_(t-1)`` is what it missed. Before the first update, u is 0. At a constant learning rate
without decay the weights are those that one-step prediction would give to the forward:
``V_t - u_(t-1)`` for the weights V of a run with prediction. Experimental.

Source: the study of pipelines one step late, https://arxiv.org/abs/2606.30634. The formula is
    inferred from accounts of it; check against the paper before naming it after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

from torch import Tensor, nn

from lightning_cyclic.plan import Plan


@final
class ErrorFeedback:
    """Correct the updates of stages whose gradients are old (``plan.delay(j) > 0``)."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._updates: dict[nn.Parameter, Tensor] = {}  # u_(t-1)

    @contextmanager
    def corrected(
        self, plan: Plan, stages: Mapping[int, Sequence[nn.Parameter]]
    ) -> Iterator[None]:
        """Correct, behind the body, what it changes of parameters of stages with gradients."""
        if not self._is_on:
            yield
            return
        late = [p for j, ps in stages.items() if plan.delay(j) > 0 for p in ps]
        before = [p.detach().clone() for p in late]
        yield
        for p, values in zip(late, before, strict=True):
            if p.grad is not None:
                update = values - p.detach()
                previous = self._updates.get(p)
                self._updates[p] = update
                p.data.sub_(update if previous is None else update - previous)

    def state(self, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return name -> last update, of the parameters that this worker updates."""
        return {n: self._updates[p] for n, p in named.items() if p in self._updates}

    def put_state(self, state: Mapping[str, Tensor], named: Mapping[str, nn.Parameter]) -> None:
        """Take last updates from a checkpoint, and forget any others."""
        if self._is_on:
            self._updates = {p: state[n].to(p.device) for n, p in named.items() if n in state}
