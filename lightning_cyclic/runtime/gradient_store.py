"""The gradients of one worker: sums by step and stage.

Stages and steps under way at once contend for ``p.grad``. It has the sum of one of them only
while autograd adds to it, and where Lightning and optimizers look: inside an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.buffers import Buffer

Gradients = list[Tensor | None]


class Sum(NamedTuple):
    """Hold the sum of a stage's gradients as far as it is.

    Args:
        grads: None for a parameter without a gradient.
        word: bits that any worker has said.
        buffer: in which the gradients lie, if they do.
    """

    grads: Gradients
    word: int = 0
    buffer: Buffer | None = None


@final
class GradientStore:
    """Keep them.

    Args:
        parameters_of: stage -> its parameters.
    """

    def __init__(self, parameters_of: Callable[[int], Sequence[nn.Parameter]]) -> None:
        self.parameters_of = parameters_of
        self._sums: dict[tuple[int, int], Sum] = {}

    @contextmanager
    def adding(self, t: int, j: int) -> Iterator[None]:
        """Let what the body leaves in ``p.grad`` of a stage go to the sum of a step."""
        self.show(t, j)
        try:
            yield
        finally:
            self.hide(t, j)

    def show(self, t: int, j: int) -> Sum:
        """Put the sum of a step into ``p.grad`` of a stage."""
        found = self.take(t, j)
        for p, grad in zip(self.parameters_of(j), found.grads, strict=True):
            p.grad = grad
        return found

    def hide(self, t: int, j: int, word: int = 0) -> None:
        """Take what is in ``p.grad`` of a stage away, for the sum of a step."""
        parameters = self.parameters_of(j)
        self._sums[t, j] = Sum([p.grad for p in parameters], word)
        for p in parameters:
            p.grad = None

    def of(self, t: int, j: int) -> Gradients:
        """Return the sum of a step, which stays."""
        found = self._sums.get((t, j))
        return [None] * len(self.parameters_of(j)) if found is None else found.grads

    def take(self, t: int, j: int) -> Sum:
        """Take the sum of a step away."""
        found = self._sums.pop((t, j), None)
        return Sum(self.of(t, j)) if found is None else found

    def put(self, t: int, j: int, found: Sum) -> None:
        """Keep the sum of a step in the place of what there is."""
        self._sums[t, j] = found

    def extend(self, t: int, j: int, found: Sum) -> None:
        """Add gradients of this worker to those that it has of the step, if any."""
        before = self._sums.pop((t, j), None)
        self.put(t, j, found)
        if before is not None:
            self.add(t, j, before)

    def add(self, t: int, j: int, come: Sum) -> None:
        """Add this worker's gradients to a sum, which comes first in the addition."""
        own = self.take(t, j)
        word = come.word | own.word
        if _all_there(come.grads) and _all_there(own.grads):
            torch._foreach_add_(come.grads, own.grads)  # type: ignore[arg-type]
            self.put(t, j, come._replace(word=word))
            return
        added = [_sum(total, x) for total, x in zip(come.grads, own.grads, strict=True)]
        self.put(t, j, Sum(added, word))


def refuse_sparse(j: int, *grads: Tensor | None) -> None:
    """Refuse sparse gradients of a stage where they are to travel.

    Raises:
        StepError: one of them is sparse.
    """
    if any(grad is not None and grad.is_sparse for grad in grads):
        raise StepError(
            f"a parameter of stage {j} has a sparse gradient; allowed: dense gradients, as they "
            "travel from rank to rank; use nn.Embedding(sparse=False)"
        )


def _all_there(grads: Gradients) -> bool:
    return bool(grads) and all(x is not None for x in grads)


def _sum(total: Tensor | None, own: Tensor | None) -> Tensor | None:
    if total is None or own is None:
        return own if total is None else total
    return total.add_(own)
