"""Factors of a gradient, from what goes into a layer and what comes back, block by block of rows.

    x        rows of what goes into a layer          b x m
    delta    gradients of what comes out of it       b x n
    gradient of the weight: the sum of delta' x over all rows, n x m, which is never made

    with r rows in the factors so far, c = r + b and w = r / c, for each block:

    V = orthonormal(w V + x' (delta U) / c / sigma)
    U = orthonormal(w U + delta' (x V) / c / sigma)
    sigma = w sigma + column sums of (delta U) * (x V) / c

A power iteration from both sides, which goes on from block to block and from step to step: U
diag(sigma) V' follows the mean of delta' x over rows. What a step begins with, of the step before,
counts as one block. A block with fewer rows counts by its rows; where blocks are alike, w and c
are those of the authors, (i + 1) / (i + 2) and (i + 2) b.

Source: Huang et al., "Low-Rank Gradient Descent for Memory-Efficient Training of Deep In-Memory
    Arrays", ACM JETC 2023, https://arxiv.org/abs/2004.12041
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

_SEED: Final = 0  # of the first factors: the same on every worker, and in every run
_LEAST: Final = 1e-6  # of the largest sigma: what is below would blow its column up
_TINY: Final = 1e-12  # where all are 0


class Factors(NamedTuple):
    """Hold a matrix of a low rank, ``u diag(sigma) v'``.

    Args:
        u: n x rank, orthonormal.
        sigma: rank.
        v: m x rank, orthonormal.
    """

    u: Tensor
    sigma: Tensor
    v: Tensor

    def dense(self) -> Tensor:
        return (self.u * self.sigma) @ self.v.mT


def first_factors(n: int, m: int, rank: int, dtype: torch.dtype, device: torch.device) -> Factors:
    """Return factors that nothing is known of: they count as no rows."""
    generator = torch.Generator().manual_seed(_SEED)
    u, v = (
        torch.linalg.qr(torch.randn(side, rank, generator=generator, dtype=dtype)).Q.to(device)
        for side in (n, m)
    )
    return Factors(u, torch.ones(rank, dtype=dtype, device=device), v)


def behind_block(
    before: Factors, num_rows: int, x: Tensor, delta: Tensor
) -> tuple[Factors, Tensor]:
    """Return the factors behind a block, and whether all that it brought is finite.

    Args:
        before: what there was; it stays behind a block with something that is not finite.
        num_rows: that it stands for.
    """
    u, sigma, v = before
    count = num_rows + len(x)
    kept, scale = num_rows / count, _away_from_zero(sigma) * count
    given = x.mT @ (delta @ u)
    v = _orthonormal(kept * v + given / scale)
    back = delta.mT @ (x @ v)
    u = _orthonormal(kept * u + back / scale)
    sigma = kept * sigma + ((delta @ u) * (x @ v)).sum(0) / count
    # here: what is not finite may be lost within a factorisation
    is_finite = given.isfinite().all() & back.isfinite().all() & sigma.isfinite().all()
    now = Factors(u, sigma, v)
    return Factors(
        *(torch.where(is_finite, *pair) for pair in zip(now, before, strict=True))
    ), is_finite


def _orthonormal(x: Tensor) -> Tensor:
    """Return orthonormal columns that turn with those of a matrix, and do not jump."""
    q, r = torch.linalg.qr(x)
    turned: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)
    return turned


def _away_from_zero(sigma: Tensor) -> Tensor:
    size = sigma.abs()
    size = size.clamp(min=(_LEAST * size.max()).clamp(min=_TINY))
    return torch.where(sigma < 0, -size, size)
