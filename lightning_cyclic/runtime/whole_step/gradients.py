"""Gradients: take each stage's gradients out of ``p.grad`` as soon as autograd completes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.gradient_store import refuse_sparse

HandOver = Callable[[int, list[Tensor | None]], None]  # stage, its gradients


@final
class GradientCollector:
    """Hand over stages from the last to the first, whatever the order in which autograd ends.

    Stage 0 also holds the parameters that the first step did not use, so it is complete only
    when backward has ended; so is every stage of which a parameter got no gradient.

    Args:
        parameters: the parameters of each stage that get gradients.
        holders: those in whose ``grad`` these are, as soon as a parameter's is there.
        hand_over: takes a stage's gradients away.
        worker: this worker, for messages.
        lasting: stages whose backward needs parameters of which it makes no gradients, also when
            it has made all.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        holders: Sequence[Sequence[nn.Parameter]],
        hand_over: HandOver,
        worker: int,
        lasting: Collection[int] = (),
    ) -> None:
        self._holders = holders
        self._hand_over = hand_over
        self._worker = worker
        self._lasting = lasting
        self._counts = [0] * len(parameters)
        self._next = -1  # the stage to hand over next; those above it are gone
        self._collecting = False
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(self._counter(j))  # type: ignore[no-untyped-call]
            for j, ps in enumerate(parameters)
            for p in ps
            if p.requires_grad  # what was frozen since gets none
        ]
        self._trained = [sum(p.requires_grad for p in ps) for ps in parameters]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect from the backward in the body; afterwards every stage is handed over."""
        self._next = len(self._holders) - 1
        self._counts = [0] * len(self._holders)
        self._collecting = True
        try:
            yield
            while self._next >= 0:
                self._take_next()
        finally:
            self._collecting = False

    @property
    def is_collecting(self) -> bool:
        """Say whether a backward is under way whose gradients are handed over."""
        return self._collecting

    def is_turn_of(self, j: int) -> bool:
        """Say whether all stages behind one have been handed over."""
        return self._next <= j

    def is_over(self, j: int) -> bool:
        """Say whether a stage has been handed over."""
        return self._next < j

    def begin_stage(self, j: int) -> None:
        """Hand over the stages behind one whose backward begins: autograd has done with them."""
        while self._next > j:
            self._take_next()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _counter(self, j: int) -> Callable[[Tensor], None]:
        def count(parameter: Tensor) -> None:
            if not self._collecting:
                return
            if j > self._next:
                raise StepError(
                    f"stage {j} of rank {self._worker} got a gradient after its sum had been "
                    "sent; allowed: one backward that reaches each parameter once; do not call "
                    "backward inside training_step or backward hooks, and use "
                    "torch.utils.checkpoint with use_reentrant=False"
                )
            refuse_sparse(j, parameter.grad)
            self._counts[j] += 1
            while self._next > 0 and self._is_complete(self._next):
                self._take_next()

        return count

    def _is_complete(self, j: int) -> bool:
        is_followed = j not in self._lasting or any(self._counts[:j])
        return self._counts[j] == self._trained[j] and is_followed

    def _take_next(self) -> None:
        j, self._next = self._next, self._next - 1
        grads = [p.grad for p in self._holders[j]]
        for p in self._holders[j]:
            p.grad = None
        self._hand_over(j, grads)
