"""The gradients of one worker: sums by step and stage.

Stages and steps under way at once contend for ``p.grad``. It has the sum of one of them only
while autograd adds to it, and where Lightning and optimizers look: inside an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.buffers import Buffer
from lightning_cyclic.runtime.moments import keep

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True, slots=True)
class SumDtypes:
    """Say in which dtype gradients of several workers are added, and sums of them travel.

        gradient     as autograd makes it: in its parameter's dtype
        sum          of several workers': in the widest of the gradients' and the wire's
        on the wire  sums: as the user says, else as made; gradients never in a wider one
        update       in its parameter's dtype again, where that is not the wider one

    Unless the user says otherwise, sums are made and travel in float32 or wider: in bfloat16 a
    sum over hundreds of workers would soon be too large for another gradient to change it.

    Args:
        may_overflow: whether somebody looks for sums that are too large for it.
    """

    wire: torch.dtype | None = None
    may_overflow: bool = False

    def of_sums(self, gradient: torch.dtype) -> torch.dtype:
        if self.wire is None or gradient.is_complex:
            return torch.promote_types(gradient, torch.float32)
        return self.wire

    def of_gradients(self, gradient: torch.dtype) -> torch.dtype:
        """Return in which dtype single gradients travel: never in a wider one than their own."""
        sent = self.of_sums(gradient)
        return gradient if torch.promote_types(sent, gradient) == sent else sent

    def of_addition(self, total: torch.dtype, own: torch.dtype) -> torch.dtype:
        widest = torch.promote_types(total, own)
        return torch.promote_types(widest, torch.float32 if self.wire is None else self.wire)

    def narrowed(self, x: Tensor) -> Tensor:
        """Return a sum, or a gradient, in no wider dtype than the wire's.

        Raises:
            StepError: an element is too large for float16, and nobody else looks for that.
        """
        dtype = self.of_gradients(x.dtype)
        if dtype == x.dtype:
            return x
        sent = x.to(dtype)
        self._check(x, sent)
        return sent

    def _check(self, x: Tensor, sent: Tensor) -> None:
        if self.may_overflow or sent.dtype is not torch.float16 or not x.numel():
            return
        # a GPU is waited for: this is the one dtype that has no larger exponents
        if bool(sent.isfinite().all()) or not bool(x.isfinite().all()):
            return
        raise StepError(
            f"gradients have an element of {float(x.abs().max()):g}, but compress='fp16' sends "
            f"none above {torch.finfo(torch.float16).max:g}; allowed: smaller gradients, or a "
            "dtype with a larger range; use compress='bf16', or "
            "Trainer(precision='16-mixed'), which leaves out such a step"
        )


AS_MADE = SumDtypes()  # or in float32, where they are made in a narrower dtype


Gradients = list[Tensor | None]


class Sum(NamedTuple):
    """Hold the sum of a stage's gradients as far as it is.

    Args:
        grads: None for a parameter without a gradient.
    """

    grads: Gradients
    word: int = 0
    buffer: Buffer | None = None


@final
class GradientStore:
    """Keep them.

    Args:
        parameters_of: stage -> its parameters.
        dtypes: of sums. [float32 or wider]
    """

    def __init__(
        self,
        parameters_of: Callable[[int], Sequence[nn.Parameter]],
        dtypes: SumDtypes = AS_MADE,
    ) -> None:
        self.parameters_of = parameters_of
        self.dtypes = dtypes
        self._own: dict[tuple[int, int], Sum] = {}  # of this worker, that are in no sum yet
        self._sums: dict[tuple[int, int], Sum] = {}

    @contextmanager
    def adding(self, t: int, j: int) -> Iterator[None]:
        """Let what the body leaves in ``p.grad`` of a stage go to the sum of a step."""
        total = self._sums.get((t, j))
        # that autograd would add to in a narrower dtype
        is_wider = total is not None and not self._fits(j, total)
        if is_wider:
            del self._sums[t, j]
        self.show(t, j)
        try:
            yield
        finally:
            self.hide(t, j)
            if total is not None and is_wider:
                self._sums[t, j] = self._added(total, self._own.pop((t, j)))

    @contextmanager
    def apart(self, t: int, j: int) -> Iterator[None]:
        """Let what the body leaves in ``p.grad`` of a stage be by itself, till it is added."""
        try:
            yield
        finally:
            self.hide(t, j)

    def show(self, t: int, j: int) -> Sum:
        """Put the sum of a step into ``p.grad`` of a stage."""
        found = self._fitting(j, self.take(t, j))
        for p, grad in zip(self.parameters_of(j), found.grads, strict=True):
            p.grad = grad
        return found

    def hide(self, t: int, j: int, word: int = 0) -> None:
        """Take what is in ``p.grad`` of a stage away, for the sum of a step."""
        parameters = self.parameters_of(j)
        self._own[t, j] = Sum([p.grad for p in parameters], word)
        for p in parameters:
            p.grad = None

    def of(self, t: int, j: int) -> Gradients:
        """Return the sum of a step, which stays; it is whole."""
        for kept in (self._sums, self._own):
            if (t, j) in kept:
                found = kept[t, j] = self._fitting(j, _kept(kept[t, j]))
                return found.grads
        return [None] * len(self.parameters_of(j))

    def take_own(self, t: int, j: int) -> Sum:
        """Take the gradients of this worker that are in no sum yet."""
        return _kept(self._own.pop((t, j)))

    def take(self, t: int, j: int) -> Sum:
        own, total = self._own.pop((t, j), None), self._sums.pop((t, j), None)
        assert total is None or own is None or not any(x is not None for x in own.grads)
        return _kept(total or own or Sum([None] * len(self.parameters_of(j))))

    def put(self, t: int, j: int, found: Sum) -> None:
        self._sums[t, j] = found

    def extend(self, t: int, j: int, found: Sum) -> None:
        """Add gradients of this worker to those that it has of the step, if any."""
        before = self._own.pop((t, j), None)
        self._own[t, j] = found if before is None else self._added(before, found)

    def add(self, t: int, j: int, gradients: Sum | None = None) -> None:
        """Add gradients to the sum of a step so far, if any, which comes first in the addition.

        Args:
            t: step.
            j: stage.
            gradients: that have come from another worker. [None: this worker's own]
        """
        found = _kept(self._own.pop((t, j)) if gradients is None else gradients)
        before = self._sums.pop((t, j), None)
        self._sums[t, j] = found if before is None else self._added(_kept(before), found)

    def _fitting(self, j: int, found: Sum) -> Sum:
        """Return a sum in the dtypes in which optimizers want it; itself where it is so."""
        if self._fits(j, found):
            return found
        pairs = zip(self.parameters_of(j), found.grads, strict=True)
        grads = [x if x is None or takes(p, x) else x.to(p.dtype) for p, x in pairs]
        return found._replace(grads=grads)

    def _fits(self, j: int, found: Sum) -> bool:
        pairs = zip(self.parameters_of(j), found.grads, strict=True)
        return all(x is None or takes(p, x) for p, x in pairs)

    def _added(self, total: Sum, found: Sum) -> Sum:
        """Add gradients to a sum, which comes first, in the memory of one that is wide enough."""
        word = total.word | found.word
        for into, other in ((total, found), (found, total)):  # the same bits in either order
            if self._has_room(into.grads, other.grads):
                terms = (
                    [x for x in grads if x is not None] for grads in (into.grads, other.grads)
                )
                torch._foreach_add_(*terms)
                if other.buffer is not None:
                    other.buffer.let_go()
                return into._replace(word=word)
        pairs = zip(total.grads, found.grads, strict=True)
        # some may lie in either's buffer
        return Sum([self._one_added(x, y) for x, y in pairs], word)

    def _has_room(self, into: Gradients, other: Gradients) -> bool:
        sum_of = self.dtypes.of_addition
        return bool(into) and all(
            x is not None and y is not None and sum_of(x.dtype, y.dtype) == x.dtype
            for x, y in zip(into, other, strict=True)
        )

    def _one_added(self, total: Tensor | None, own: Tensor | None) -> Tensor | None:
        if total is None or own is None:
            return own if total is None else total
        dtype = self.dtypes.of_addition(total.dtype, own.dtype)
        if total.dtype != dtype and own.dtype == dtype:
            total, own = own, total
        return total.to(dtype).add_(own)


@contextmanager
def hidden(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let parameters have no gradients in the body."""
    held = [(p, p.grad) for p in parameters]
    for p, _ in held:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in held:
            p.grad = grad


def _kept(found: Sum) -> Sum:
    """Return a sum whose memory stays until this stream is done with it: lanes add, too."""
    keep(found.grads)
    return found


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


def takes(p: nn.Parameter, grad: Tensor) -> bool:
    """Say whether a parameter takes a gradient as it is: of its dtype, or of a narrower one."""
    if grad.dtype == p.dtype:
        return True
    allowed = getattr(p, "grad_dtype", p.dtype)  # before torch 2.9 there is no other than its own
    return allowed is None and torch.promote_types(p.dtype, grad.dtype) == p.dtype
