"""Streaming batch PCA of one layer's gradient, written down from the authors' rule.

Of a batch in blocks i = 0, 1, ... of b rows each, with w = (i+1)/(i+2) and c = (i+2) b::

    V = qr(w V + x'(delta U) / c / sigma)
    U = qr(w U + delta'(x V) / c / sigma)
    sigma = w sigma + sum((delta U) * (x V)) / c

and the gradient is B U diag(sigma) V'. A block of another size counts by its rows, and the first
block of a run has nothing before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional


class Stream:
    """Follow the gradient of one weight."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.u = self.v = self.sigma = torch.empty(0)

    def gradient(self, blocks: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Go through a step's blocks, and return its gradient, n x m."""
        seen = len(blocks[0][0])
        if not self.u.numel():
            g, seen = torch.Generator().manual_seed(0), 0
            (_, n), (_, m) = (y.shape for y in reversed(blocks[0]))
            self.u, self.v = (
                torch.linalg.qr(torch.randn(k, self.rank, generator=g)).Q for k in (n, m)
            )
            self.sigma = torch.ones(self.rank)
        for x, delta in blocks:
            c = seen + len(x)
            w = seen / c
            self.v = _qr(w * self.v + x.T @ (delta @ self.u) / c / self.sigma)
            self.u = _qr(w * self.u + delta.T @ (x @ self.v) / c / self.sigma)
            self.sigma = w * self.sigma + ((delta @ self.u) * (x @ self.v)).sum(0) / c
            seen = c
        return sum(len(x) for x, _ in blocks) * self.u @ self.sigma.diag() @ self.v.T


def _qr(x: Tensor) -> Tensor:
    q, r = torch.linalg.qr(x)
    return q @ torch.diag(torch.tensor([-1.0 if d < 0 else 1.0 for d in r.diagonal()]))


def blocks(x: Tensor, delta: Tensor, size: int, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut rows of a linear layer into blocks, or the images of a 3 x 3 convolution."""
    if weight.dim() == 2:
        yield from zip(x.split(size), delta.split(size), strict=True)
        return
    for image, back in zip(x, delta, strict=True):  # whose places are more than a block has rows
        yield functional.unfold(image[None], 3, padding=1)[0].T, back.flatten(1).T


@contextmanager
def looking(module: nn.Module, seen: Mapping[str, list[tuple[Tensor, Tensor]]]) -> Iterator[None]:
    """Note what goes into layers and what comes back, by names of their weights."""
    handles = []
    for name, found in seen.items():

        def note(_: nn.Module, given: tuple[Tensor], y: Tensor, found=found) -> None:  # type: ignore[no-untyped-def]
            x = given[0].detach().clone()
            y.register_hook(lambda delta: found.append((x, delta.clone())))  # type: ignore[no-untyped-call]

        layer = module.get_submodule(name.removesuffix(".weight"))
        handles.append(layer.register_forward_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
