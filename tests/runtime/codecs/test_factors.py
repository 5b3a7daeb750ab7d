"""Factors of gradients: the authors' rule, and how near they come to the best of their rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cyclic.runtime.codecs.factored import Form
from lightning_cyclic.runtime.codecs.factors import behind_block, first_factors
from lightning_cyclic.runtime.codecs.low_rank import LowRank
from tests.references import sbpca

N, M, BATCH = 40, 60, 256
FORM = Form(torch.Size([N, M]), (M, 1), torch.float32, torch.device("cpu"))


def rows(spectrum: float = 0.6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a batch whose gradient, delta' x, has singular values that fall by a factor."""
    g = torch.Generator().manual_seed(seed)
    sizes = spectrum ** torch.arange(float(N))
    left, right = (torch.linalg.qr(torch.randn(side, N, generator=g)).Q for side in (N, M))
    codes = torch.randn(BATCH, N, generator=g) * sizes.sqrt()
    return codes @ right.T, codes @ left.T / BATCH


def stream(rank: int) -> tuple[LowRank, dict[str, Any]]:
    codec, states = LowRank("low rank", rank, ["w"]), dict[str, Any]()
    codec.begin(lambda name: states.setdefault(name, {}))
    return codec, states


def gradient(codec: LowRank, x: Tensor, delta: Tensor, block: int) -> Tensor:
    codec.begin_step()
    return codec.follow("w", FORM, zip(x.split(block), delta.split(block), strict=True)).matrix()


def error(rank: int, block: int, steps: int = 40) -> tuple[float, float]:
    """Return the error relative to the gradient, and the least of any matrix of the rank."""
    x, delta = rows()
    codec, _ = stream(rank)
    for _ in range(steps):
        found = gradient(codec, x, delta, block)
    exact = delta.T @ x
    values = torch.linalg.svdvals(exact)
    best = values[rank:].norm() / values.norm()
    return float((found - exact).norm() / exact.norm()), float(best)


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_error_is_hardly_more_than_that_of_the_best_of_the_rank(rank: int, block: int) -> None:
    found, best = error(rank, block)
    assert best <= found + 1e-4 <= 1.1 * best + 0.03


def test_at_full_rank_and_many_blocks_it_is_the_gradient() -> None:
    x, delta = rows(spectrum=0.9)
    codec, _ = stream(N)
    for _ in range(40):
        found = gradient(codec, x, delta, 16)
    exact = delta.T @ x
    assert torch.cosine_similarity(found.flatten(), exact.flatten(), dim=0) > 0.99
    assert abs(found.norm() / exact.norm() - 1) < 0.05


@pytest.mark.parametrize(("block", "num_rows"), [(32, 256), (48, 256), (256, 256), (300, 7)])
def test_rule_is_that_of_the_authors_with_blocks_by_their_rows(block: int, num_rows: int) -> None:
    codec, _ = stream(3)
    plain = sbpca.Stream(3)
    for seed in range(4):
        x, delta = (y[:num_rows] for y in rows(seed=seed))
        found = gradient(codec, x, delta, block)
        pairs = list(zip(x.split(block), delta.split(block), strict=True))
        torch.testing.assert_close(found, plain.gradient(pairs), rtol=1e-4, atol=1e-7)


def test_batches_of_a_step_are_blocks_of_one() -> None:
    x, delta = rows()
    one, other = stream(3)[0], stream(3)[0]
    for _ in range(3):
        whole = gradient(one, x, delta, 32)
        other.begin_step()
        for part in (slice(0, 128), slice(128, 256)):
            pairs = zip(x[part].split(32), delta[part].split(32), strict=True)
            found = other.follow("w", FORM, pairs)
        assert torch.equal(found.matrix(), whole)


def test_gradients_of_zeros_are_zeros_and_leave_a_stream_that_goes_on() -> None:
    x, delta = rows()
    codec, _ = stream(2)
    for _ in range(2):
        assert not gradient(codec, x, torch.zeros_like(delta), 32).any()
    for _ in range(40):
        found = gradient(codec, x, delta, 32)
    exact = delta.T @ x
    assert (found - exact).norm() / exact.norm() < 1.1 * error(2, 32)[1] + 0.03


def test_no_rows_have_a_gradient_of_zeros() -> None:
    codec, _ = stream(2)
    found = gradient(codec, torch.zeros(0, M), torch.zeros(0, N), 32)
    assert torch.equal(found, torch.zeros(N, M))


@pytest.mark.parametrize("what", ["x", "delta"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_arrives_and_leaves_nothing(what: str, value: float) -> None:
    (x, delta), (codec, states) = rows(), stream(2)
    gradient(codec, x, delta, 256)
    before = dict(states["w"])
    broken = {"x": x.clone(), "delta": delta.clone()}
    broken[what][7, 3] = value
    assert not gradient(codec, **broken, block=256).isfinite().any()
    for key, kept in before.items():
        assert torch.equal(states["w"][key], kept)
    assert gradient(codec, x, delta, 256).isfinite().all()


def test_columns_turn_and_do_not_jump() -> None:
    """A gradient that hardly changes has factors that hardly do."""
    x, delta = rows()
    factors = first_factors(N, M, 3, torch.float32, x.device)
    factors, _ = behind_block(factors, 0, x, delta)
    for _ in range(30):
        before = factors
        factors, _ = behind_block(factors, BATCH, x, delta)
    for now, then in zip(factors, before, strict=True):
        assert (now - then).abs().max() < 0.01
    for side in (factors.u, factors.v):
        torch.testing.assert_close(side.T @ side, torch.eye(3), rtol=0, atol=1e-5)
