"""What training keeps and sends beside the weights, of each byte of them.

    dense       weights | gradient | masters, float32 gradient | optimizer state
    compressed  weights | gradient f | masters, float32 gradient, state f | index f

Weights stay dense, with zeros where they are pruned, as forwards and backwards need them so.
Everything else has the kept fraction f of the elements alone, behind one int32 index. Bytes per
parameter with Adam, at the optimizer's step: 20 or 22 f + 2 in low precision with master weights,
16 or 20 f + 4 in "32-true".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self, final

from lightning_cyclic.errors import PlanError, one_of

PRECISIONS: Final = {"32-true": 4, "bf16-true": 2, "16-true": 2}  # bytes of each weight
_FLOAT32_BYTES = 4
_INDEX_BYTES = 4  # int32


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StatesPerParam:
    """Hold bytes per byte of weights, as these are in forwards.

    Args:
        gradient: of a gradient, and of a sum of them.
        optimizer: of its state, and of what it has in its step: master weights and gradients in
            float32, or the kept weights side by side.
        index: of the places of kept elements.
        kept: fraction of the elements that are kept, and that messages carry.
        sums: of a sum of gradients of several workers, which is float32.
        break_even: fraction from which on compressed states take more than dense ones.
    """

    gradient: float
    optimizer: float
    index: float
    kept: float
    sums: float
    break_even: float

    @classmethod
    def of(cls, precision: str, sparsity: float | None, state_per_param: float) -> Self:
        """Count what is kept.

        Args:
            precision: of the weights.
            sparsity: pruned fraction; None for dense training.
            state_per_param: bytes of optimizer state per byte of parameters in float32.

        Raises:
            PlanError: an unknown precision, or a sparsity outside [0, 1).

        Source: section III of SAMO, https://arxiv.org/abs/2302.05045, without its copy in the
            step, as weights are written in place.

        Example:
            >>> states = StatesPerParam.of("bf16-true", 0.9, 2.0)
            >>> round(2 * (1 + states.gradient + states.optimizer + states.index), 9)
            4.2
        """
        if precision not in PRECISIONS:
            raise PlanError(one_of(precision, list(PRECISIONS), "precision", "use bf16-true"))
        if sparsity is not None and not 0 <= sparsity < 1:
            raise PlanError(
                f"sparsity={sparsity}; allowed: from 0 to below 1, the pruned fraction of the "
                "parameters; give 0.9 for nine in ten, or leave it out for dense training"
            )
        size = PRECISIONS[precision]
        float32 = _FLOAT32_BYTES / size
        is_low = size < _FLOAT32_BYTES
        dense = state_per_param * float32 + 2 * float32 * is_low  # masters, gradients in float32
        # weights in float32 are no masters: the optimizer's step has a copy of those kept
        compressed = dense + float32 * (not is_low)
        index = _INDEX_BYTES / size
        kept = 1.0 if sparsity is None else 1.0 - sparsity
        is_dense = sparsity is None
        return cls(
            gradient=kept,
            optimizer=dense if is_dense else kept * compressed,
            index=0.0 if is_dense else kept * index,
            kept=kept,
            sums=float32,
            break_even=(1 + dense) / (1 + compressed + index),
        )
