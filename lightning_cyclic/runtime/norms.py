"""The norms of a step's gradients, where stages have different owners.

Each owner computes the norms of its own stages' gradients, tensor by tensor, and the program has
it tell those who decide about a step (N). Each then reduces the same numbers in the same order,
so that all clip by the same bits as one process that holds everything.

Which parameters have a gradient is known to the hosts, so that nobody asks a GPU for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import reduce
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.dataflow import Datum, Item
from lightning_cyclic.runtime.buffers import Layout
from lightning_cyclic.runtime.messages import Message, Messages


class StageNorms(NamedTuple):
    """Hold the norms of a stage's gradients.

    Args:
        values: one for each parameter, 0 where it has no gradient; float64, which holds each
            exactly.
        there: which parameters have one; None for all.
    """

    values: Tensor
    there: Sequence[bool] | None = None

    def message(self) -> Message:
        """Return what the others are told."""
        return Message([self.values], there=self.there)


@final
class Norms:
    """Keep the norms of some steps."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        parameters: Sequence[Sequence[nn.Parameter]],
        fetch: Callable[[Item], None],
    ) -> None:
        self._plan = plan
        self._parameters = parameters
        self._fetch = fetch
        self._own = [j for j in range(plan.num_stages) if plan.optimizes(worker, j)]
        self._known: dict[int, dict[int, StageNorms]] = {}  # step -> stage -> its norms

    def layout(self, j: int, messages: Messages) -> Layout:
        """Return the one layout of the messages about a stage: a mark for each parameter."""
        num = len(self._parameters[j])
        return messages.layout([torch.empty(num, dtype=torch.float64)], num)

    def note(self, t: int, j: int, grads: Sequence[Tensor | None]) -> StageNorms:
        """Compute the norms of the gradients of an own stage, unless they are known."""
        known = self._known.setdefault(t, {})
        if j not in known:
            known[j] = _norms(grads, self._parameters[j])
        return known[j]

    def note_overflow(self, t: int, j: int) -> None:
        """Let an own stage's norms say that its gradients overflowed, whatever becomes of them."""
        values = _norms([None] * len(self._parameters[j]), self._parameters[j]).values
        self._known.setdefault(t, {})[j] = StageNorms(values.fill_(torch.inf))

    def put(self, t: int, j: int, message: Message) -> None:
        (values,) = message.tensors
        self._known.setdefault(t, {})[j] = StageNorms(values, message.there)

    def total(self, t: int, order: Sequence[nn.Parameter]) -> Tensor:
        """Return the 2-norm of step ``t``'s gradients over all stages, shape ().

        Args:
            t: a step whose own norms are noted, and whose others all owners have told, or will.
            order: all trained parameters, in the order in which the norms are reduced.
        """
        by_parameter: dict[int, Tensor] = {}
        for j, (values, there) in self._all_of(t).items():
            each = zip(self._parameters[j], values.unbind(), strict=True)
            marked = zip(each, there or [True] * len(values), strict=True)
            by_parameter |= {id(p): x for (p, x), here in marked if here}
        present = [p for p in order if id(p) in by_parameter]
        if not present:
            return torch.zeros(())
        dtype = reduce(torch.promote_types, (p.dtype for p in present))  # as stacking them does
        stacked = torch.stack([by_parameter[id(p)] for p in present]).to(dtype)
        total: Tensor = torch.linalg.vector_norm(stacked)
        return total

    def is_finite(self, t: int, stages: Collection[int] | None = None) -> bool:
        """Say whether the gradients of step ``t`` are finite, of some own stages or of all."""
        known = self._all_of(t) if stages is None else self._known.get(t, {})
        norms = [x.values for j, x in known.items() if stages is None or j in stages]
        return not norms or bool(torch.isfinite(torch.cat(norms)).all())  # asked once

    def forget(self, t: int) -> None:
        self._known = {k: norms for k, norms in self._known.items() if k > t}

    def _all_of(self, t: int) -> dict[int, StageNorms]:
        known = self._known.setdefault(t, {})
        for j in set(range(self._plan.num_stages)) - set(self._own) - set(known):
            if self._plan.norms == "none":
                raise StepError(
                    f"the norm over all stages was asked for in step {t}, but this run has no "
                    "clipping by it; allowed: Trainer(gradient_clip_val=...), or overriding "
                    "configure_gradient_clipping, from the beginning of the fit"
                )
            self._fetch((Datum.NORMS, t, j))
        return dict(sorted(known.items()))


def _norms(grads: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> StageNorms:
    there = [g is not None for g in grads]
    # as the optimizer sees them, which may have more precision than what travels
    pairs = zip(grads, parameters, strict=True)
    present = [g.to(p.dtype) for g, p in pairs if g is not None]
    if not present:
        device = parameters[0].device if parameters else torch.device("cpu")
        return StageNorms(torch.zeros(len(grads), dtype=torch.float64, device=device), there)
    norms = torch._foreach_norm(present)
    if all(there):
        return StageNorms(torch.stack(norms).double())  # exact in double
    rest, missing = iter(norms), torch.zeros_like(norms[0])
    values = torch.stack([next(rest) if here else missing for here in there])
    return StageNorms(values.double(), there)
