"""Surrogates: a loss whose backward deposits the gradients that a program has computed.

A pipelined step runs its backwards inside ``training_step``. Lightning is given a leaf in the
place of its loss, and cannot be served without one: between ``training_step`` and the optimizer's
step it zeroes gradients, scales the loss, and calls the module's own ``backward``, which may scale
it further; only behind that may ``p.grad`` hold the new gradients, times what it was scaled by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from lightning_cyclic.compat import Trainer, is_overridden


@final
class Surrogates:
    """Keep the gradients of a window of batches, and make surrogates that deposit them."""

    def __init__(self, trainer: Trainer, get_scale: Callable[[], float] | None = None) -> None:
        self._trainer = trainer
        self._get_scale = get_scale
        self._totals: list[tuple[nn.Parameter, Tensor | None, Tensor | None]] = []
        module, callbacks = trainer.lightning_module, trainer.callbacks  # type: ignore[attr-defined]
        self._may_be_seen = any(
            is_overridden("on_before_zero_grad", x) for x in (module, *callbacks)
        ) or is_overridden("optimizer_zero_grad", module)

    @property
    def batches_per_update(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    @contextmanager
    def collecting(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Take what the body adds to ``p.grad`` for the gradients of a batch."""
        # those of the last step, which nobody looks at any more, would be there twice
        drops = self.starts and not self._may_be_seen
        before = [None if drops else p.grad for p in parameters]
        if self.starts:  # Lightning zeroes gradients only behind this
            for p in parameters:
                p.grad = None
        yield
        self._totals = [(p, p.grad, b) for p, b in zip(parameters, before, strict=True)]
        if self.starts:
            for p, b in zip(parameters, before, strict=True):
                p.grad = b

    def stand_for(self, loss: Tensor) -> Tensor:
        """Return a surrogate of the loss of the batch that was collected."""
        return stand_in(loss, self._deposit)

    @property
    def starts(self) -> bool:
        """Say whether the batch under way is the first of its window."""
        return self._trainer.fit_loop.epoch_loop.batch_idx % self.batches_per_update == 0

    def _deposit(self, grad: Tensor) -> None:
        """Put the gradients of the window so far into ``p.grad``.

        They are those of the loss divided by ``accumulate_grad_batches``, as Lightning divides,
        and times the scale of a gradient scaler;
        code that scales it further (an overridden ``backward``) scales this batch's part.
        """
        batches, one = self.batches_per_update, torch.ones_like(grad)
        expected = one if self._get_scale is None else one * self._get_scale()
        # compared as it was rounded: 1/3 three times is not 1
        scaled = torch.where(grad == expected / batches, one, grad * batches / expected)
        factor = float(scaled) if grad.is_cpu else scaled  # a GPU would be waited for to say so
        starts = self.starts
        for p, total, before in self._totals:
            if total is None or (isinstance(factor, float) and factor == 1.0):
                p.grad = total
            elif starts or before is None:
                p.grad = total * factor
            else:
                p.grad = _scaled_since(before, total, factor)
        self._totals = []


def _scaled_since(before: Tensor, total: Tensor, factor: float | Tensor) -> Tensor:
    """Scale what was added since; by 1, keep the very bits."""
    scaled = before + (total - before) * factor
    return scaled if isinstance(factor, float) else torch.where(factor == 1, total, scaled)


def stand_in(loss: Tensor, deposit: Callable[[Tensor], None] = lambda grad: None) -> Tensor:
    """Return a stand-in of a loss, whose gradients the program has applied, or deposits."""
    made = loss.detach().clone().requires_grad_()

    def reached(leaf: Tensor) -> None:
        assert leaf.grad is not None
        deposit(leaf.grad)
        leaf.grad = None

    made.register_post_accumulate_grad_hook(reached)  # type: ignore[no-untyped-call]
    return made
