"""In which dtype gradients of several workers are added, and in which sums of them travel.

    gradient     as autograd makes it: in its parameter's dtype
    sum          of those of several workers: in the widest of the gradients' and the wire's
    on the wire  sums: as the user says, else as they are made; gradients never in a wider one
    update       in its parameter's dtype again, where that is not the wider one

Unless the user says otherwise, sums are made and travel in float32 or wider: in bfloat16 a sum
over hundreds of workers would soon be too large for another gradient to change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lightning_cyclic.errors import StepError

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True, slots=True)
class SumDtypes:
    """Say which dtype sums have.

    Args:
        wire: in which they travel. [float32, or wider where gradients are]
        may_overflow: whether somebody looks for sums that are too large for it.
    """

    wire: torch.dtype | None = None
    may_overflow: bool = False

    def of_sums(self, gradient: torch.dtype) -> torch.dtype:
        """Return in which dtype sums of gradients of a dtype travel."""
        if self.wire is None or gradient.is_complex:
            return torch.promote_types(gradient, torch.float32)
        return self.wire

    def of_gradients(self, gradient: torch.dtype) -> torch.dtype:
        """Return in which dtype single gradients travel: never in a wider one than their own."""
        sent = self.of_sums(gradient)
        return gradient if torch.promote_types(sent, gradient) == sent else sent

    def of_addition(self, total: torch.dtype, own: torch.dtype) -> torch.dtype:
        """Return in which dtype two are added."""
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
            f"gradients have an element of {float(x.abs().max()):g}, but reduce_dtype='fp16' "
            "sends "
            f"none above {torch.finfo(torch.float16).max:g}; allowed: smaller gradients, or a "
            "dtype with a larger range; use reduce_dtype='bf16', or "
            "Trainer(precision='16-mixed'), which leaves out such a step"
        )


AS_MADE = SumDtypes()  # or in float32, where they are made in a narrower dtype
