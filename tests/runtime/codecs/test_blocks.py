"""int8 in blocks: each element as near as its scale allows, and nothing hidden."""

from __future__ import annotations

import pytest
import torch

from lightning_cyclic.runtime.codecs.blocks import Int8
from lightning_cyclic.runtime.codecs.coded import Codes

CODEC = Int8()


def through(x: torch.Tensor) -> torch.Tensor:
    return Codes(CODEC).through(0, "a", x)


@pytest.mark.parametrize("shape", [(16, 16), (1000,), (7, 9, 11)])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_element_is_rounded_to_its_scale(
    shape: tuple[int, ...], size: float, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(0)
    x = (size * torch.randn(shape, generator=g)).to(dtype)
    came = through(x)
    assert came.shape == x.shape
    assert came.dtype == torch.promote_types(dtype, torch.float32)
    for block, made in zip(x.view(-1).split(256), came.view(-1).split(256), strict=True):
        scale = block.abs().max().to(came.dtype) / 127
        assert (made - block).abs().max() <= 0.5001 * scale
        assert len(made.unique()) > 20
        (largest,) = block.abs().topk(1).indices
        torch.testing.assert_close(made[largest], block[largest].to(came.dtype))


def test_scales_are_those_of_256_neighbours() -> None:
    x = torch.cat([torch.full((256,), 1e-3), torch.full((256,), 1e3)])
    torch.testing.assert_close(through(x), x, rtol=1e-6, atol=0)


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(600)
    x[300] = 1e-44  # below what is normal
    assert through(x).equal(torch.zeros(600))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_arrives(bad: float) -> None:
    x = torch.ones(600)
    x[300] = bad
    came = through(x)
    assert not came[256:512].isfinite().any()
    assert came[:256].isfinite().all()
    assert came[512:].isfinite().all()


def test_a_quarter_is_sent() -> None:
    like = torch.empty(100, 100, device="meta")
    sent = CODEC.encode(torch.ones(100, 100), {})
    assert [(x.shape, x.dtype) for x in sent] == [(x.shape, x.dtype) for x in CODEC.sent(like)]
    assert sum(x.nbytes for x in sent) == CODEC.num_bytes(10_000) == 40 * (256 + 4)
