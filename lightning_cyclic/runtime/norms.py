"""The norms of a step's gradients, where stages have different owners.

Each owner computes the norms of its own stages' gradients, tensor by tensor, and the program has
it tell those who decide about a step (N). Each then reduces the same numbers in the same order,
so that all clip by the same bits as one process that holds everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.dataflow import Datum, Item


@final
class Norms:
    """Keep the norms of some steps.

    Args:
        plan: says who owns which stage, and who is told.
        worker: this worker.
        parameters: of each stage.
        fetch: takes in what is on its way.
    """

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
        self._own = [j for j in range(plan.num_stages) if plan.owner(j) == worker]
        self._known: dict[int, dict[int, Tensor]] = {}  # step -> stage -> norms of its tensors

    def shape(self, j: int) -> Tensor:
        """Return a tensor like the norms of a stage, shape (number of its parameters,)."""
        return torch.empty(len(self._parameters[j]), dtype=torch.float64)

    def note(self, t: int, j: int, grads: Sequence[Tensor | None]) -> Tensor:
        """Compute the norms of the gradients of an own stage, unless they are known.

        Returns:
            One number for each parameter, -1 for one without a gradient; float64, which holds
            each exactly.
        """
        known = self._known.setdefault(t, {})
        if j not in known:
            known[j] = _norms(grads, self._parameters[j])
        return known[j]

    def put(self, t: int, j: int, norms: Tensor) -> None:
        """Take in what the owner of a stage has told."""
        self._known.setdefault(t, {})[j] = norms

    def total(self, t: int, order: Sequence[nn.Parameter]) -> Tensor:
        """Return the 2-norm of step ``t``'s gradients over all stages, shape ().

        Args:
            t: a step whose own norms are noted, and whose others all owners have told, or will.
            order: all trained parameters, in the order in which the norms are reduced.
        """
        by_parameter: dict[int, Tensor] = {}
        for j, values in self._all_of(t).items():
            by_parameter |= {
                id(p): x.to(p.dtype)
                for p, x in zip(self._parameters[j], values.unbind(), strict=True)
            }
        present = [by_parameter[id(p)] for p in order if id(p) in by_parameter]
        present = [x for x in present if not bool(x < 0)]
        if not present:
            return torch.zeros(())
        total: Tensor = torch.linalg.vector_norm(torch.stack(present))
        return total

    def is_finite(self, t: int, stages: Collection[int] | None = None) -> bool:
        """Say whether the gradients of step ``t`` are finite, of some own stages or of all."""
        known = self._all_of(t) if stages is None else self._known.get(t, {})
        norms = [x for j, x in known.items() if stages is None or j in stages]
        return all(bool(torch.isfinite(x).all()) for x in norms)

    def forget(self, t: int) -> None:
        """Forget the norms of steps up to ``t``."""
        self._known = {k: norms for k, norms in self._known.items() if k > t}

    def _all_of(self, t: int) -> dict[int, Tensor]:
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


def _norms(grads: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> Tensor:
    if not parameters:
        return torch.empty(0, dtype=torch.float64)
    missing = torch.full((), -1.0, dtype=torch.float64, device=parameters[0].device)
    # exact in double; cast back before the reduction
    each = [missing if g is None else torch._foreach_norm([g])[0].double() for g in grads]
    return torch.stack(each)
