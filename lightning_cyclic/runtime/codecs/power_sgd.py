"""Matrices of a low rank: what is sent of a gradient are two thin factors of it.

    w = gradient + left       n x m
    P = orthonormal(w Q)      n x r, with the Q of the step before, itself made orthonormal
    Q = w' P                  m x r
    sent = P, Q;  left = w - P Q'

One step of a power iteration, which goes on from step to step. The paper, and torch's hook of
DDP, add up P, and then Q, of all workers by two rounds of messages, so that all share one basis.
Here each worker has a basis of its own, and sends both factors to the owner at once: the owner's
sum may have the ranks of all of them together, and what is left is what this worker lacks alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.codecs.base import AbstractCodec, State, unless_broken, wide

_USUAL_SIDE = 1024  # of a matrix of which only the number of elements is known
_SEED = 0  # of the first Q: the same on every worker, and in every run


@final
@dataclass(frozen=True)
class PowerSgd(AbstractCodec):
    """Send a low-rank approximation of each matrix, and add what it lacks to the next gradient.

    A tensor of more dimensions is a matrix with its first one as rows. Vectors, and matrices whose
    factors would be no smaller than they are, are sent as they are.

    Args:
        rank: of the approximation, at least 1.

    Raises:
        ConfigurationError: another rank.

    Source: PowerSGD, Vogels et al., NeurIPS 2019, https://arxiv.org/abs/1905.13727, algorithm 1,
        with factors of each worker in the place of common ones.

    Example:
        >>> PowerSgd(rank=2).num_bytes(250_000)  # of a matrix of 500 x 500
        8000
    """

    rank: int

    has_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ConfigurationError(
                f"PowerSgd(rank={self.rank!r}); allowed: whole numbers from 1 on; use rank=4"
            )

    def takes(self, like: Tensor) -> bool:
        if like.dim() < 2 or not super().takes(like):
            return False
        rows, columns = _sides(like)
        return self.rank * (rows + columns) < rows * columns

    def num_bytes(self, num_elements: int) -> int:
        """Return the bytes that are sent of matrices of float32 of which nobody knows the sides.

        They count as 1024 x 1024 each, and what is left as one that is as square as can be.
        """
        num_matrices, rest = divmod(num_elements, _USUAL_SIDE**2)
        side = math.isqrt(rest)
        factors = min(self.rank * (side + -(-rest // max(side, 1))), rest)
        return 4 * (num_matrices * min(2 * self.rank * _USUAL_SIDE, _USUAL_SIDE**2) + factors)

    def sent(self, like: Tensor) -> Sequence[Tensor]:
        dtype = wide(like.dtype)
        return [torch.empty(n, self.rank, dtype=dtype, device="meta") for n in _sides(like)]

    def encode(self, gradient: Tensor, state: State) -> Sequence[Tensor]:
        given = gradient.reshape(_sides(gradient)).to(wide(gradient.dtype))
        left = state.get("left", torch.zeros_like(given))
        before = state["factor"] if "factor" in state else self._first(given)
        w = given + left
        p = torch.linalg.qr(w @ torch.linalg.qr(before).Q).Q
        q = w.mT @ p
        state["left"] = unless_broken(gradient, w - p @ q.mT, left)
        state["factor"] = unless_broken(gradient, q, before)
        # what is not finite may be lost within a factorisation
        return [p, torch.where(gradient.isfinite().all(), q, torch.nan)]

    def _first(self, w: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(_SEED)
        shape = w.shape[1], self.rank
        return torch.randn(shape, generator=generator, dtype=w.dtype).to(w.device)

    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        p, q = sent
        return (p @ q.mT).view(like.shape)


def _sides(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x.numel() // x.shape[0]
