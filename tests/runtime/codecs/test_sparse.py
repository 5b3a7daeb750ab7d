"""Few elements of a gradient: what is sent and what is left are all of it, always."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_cyclic import ConfigurationError, Dct, TopK
from lightning_cyclic.runtime.codecs.base import AbstractCodec

CODECS = [TopK(density=0.1), Dct(density=0.1, threshold_every=4), Dct(density=0.02)]
SHAPE = (30, 20)
N = 600
LIKE = torch.empty(SHAPE, device="meta")


def steps(num: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(seed)
    for t in range(num):  # larger and smaller ones, so that thresholds are off
        yield (torch.randn(SHAPE, generator=g) * math.exp(math.sin(t))).to(dtype)


def sent_of(codec: AbstractCodec, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
    like = torch.empty_like(gradient, device="meta")
    sent = codec.encode(gradient, state)
    assert [(x.shape, x.dtype) for x in sent] == [(x.shape, x.dtype) for x in codec.sent(like)]
    return codec.decode(sent, like)


def num_sent(x: Tensor) -> int:
    return int(x.count_nonzero())


@given(density=st.floats(0.002, 1.0), every=st.integers(1, 6), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=settings().max_examples // 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_sent_and_what_is_left_are_what_there_was(
    density: float, every: int, seed: int, dtype: torch.dtype
) -> None:
    for codec in (TopK(density=density), Dct(density=density, threshold_every=every)):
        state: dict[str, Tensor] = {}
        left = torch.zeros(N, dtype=torch.promote_types(dtype, torch.float32))
        for grad in steps(6, seed, dtype):
            w = grad.to(left.dtype).view(-1) + left
            sent = sent_of(codec, grad, state).view(-1)
            left = state["left"]
            assert torch.equal(sent + left, w)
            assert not (sent * left).any()
            assert num_sent(sent) <= math.ceil(density * N)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_nothing_is_lost_over_many_steps(codec: AbstractCodec) -> None:
    state: dict[str, Tensor] = {}
    given_, sent = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64)
    for grad in steps(40):
        given_ += grad
        sent += sent_of(codec, grad, state)
    left = state["left"].view(SHAPE).double()
    assert left.abs().max() > 1  # so that something is checked
    torch.testing.assert_close(sent + left, given_, rtol=0, atol=1e-5)  # w is rounded


def test_the_largest_are_sent_where_a_threshold_is_new() -> None:
    top, state = TopK(density=0.1), {}
    dct, of_dct = Dct(density=0.1, threshold_every=1), {}
    for grad in steps(5):
        w = (grad.view(-1) + state.get("left", torch.zeros(N))).abs()
        largest = set(w.topk(60).indices.tolist())
        sent = sent_of(top, grad, state)
        assert set(sent.view(-1).nonzero().squeeze(1).tolist()) == largest
        assert torch.equal(sent_of(dct, grad, of_dct), sent)


@pytest.mark.parametrize("codec", [TopK(density=0.01), Dct(density=0.01)], ids=repr)
def test_of_equal_elements_the_first_are_sent(codec: AbstractCodec) -> None:
    grad = torch.ones(SHAPE)
    grad.view(-1)[5] = -2
    grad.view(-1)[9] = -1
    sent = sent_of(codec, grad, {}).view(-1)
    assert sent.nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 4, 5]
    assert sent[4:6].tolist() == [1, -2]


def test_a_threshold_that_is_too_high_sends_fewer() -> None:
    codec, state = Dct(density=0.1, threshold_every=100), {}
    (grad,) = steps(1)
    assert num_sent(sent_of(codec, grad, state)) == 60
    threshold, state["left"] = state["threshold"], torch.zeros(N)
    assert 0 < num_sent(sent_of(codec, grad * 0.9, state)) < 60
    assert state["threshold"] is threshold


def test_a_threshold_that_is_too_low_is_chosen_anew() -> None:
    codec, state = Dct(density=0.1, threshold_every=100), {}
    (grad,) = steps(1)
    sent_of(codec, grad, state)
    threshold, state["left"] = state["threshold"], torch.zeros(N)
    more = sent_of(codec, grad * 10, state)
    largest = (grad * 10).abs().view(-1).topk(60)
    assert set(more.view(-1).nonzero().squeeze(1).tolist()) == set(largest.indices.tolist())
    assert state["threshold"] == largest.values[-1] > threshold
    state["left"] = torch.zeros(N)
    assert num_sent(sent_of(codec, grad * 9, state)) < 60


def test_a_threshold_is_chosen_every_so_many_steps() -> None:
    codec, state, seen = Dct(density=0.1, threshold_every=3), {}, []
    for t, grad in enumerate(steps(9)):  # ever smaller, so that none is too low
        sent_of(codec, grad * 0.01**t, state)
        seen.append(float(state["threshold"]))
    changes = [a != b for a, b in zip(seen, seen[1:], strict=False)]
    assert changes == [False, False, True, False, False, True, False, False]


def test_the_density_is_less_than_asked_for_while_a_threshold_is_old() -> None:
    """How much less is in docs/compression.md: half, of gradients that are all alike in size."""
    codec, state = Dct(density=0.1, threshold_every=1000), {}
    g = torch.Generator().manual_seed(0)
    sent = [num_sent(sent_of(codec, torch.randn(SHAPE, generator=g), state)) for _ in range(200)]
    assert max(sent) == 60
    assert 30 < sum(sent[100:]) / 100 < 60


@pytest.mark.parametrize("codec", [TopK(density=1), Dct(density=1)], ids=repr)
def test_at_density_1_bits_stay_as_they_are(codec: AbstractCodec) -> None:
    state: dict[str, Tensor] = {}
    for grad in steps(3):
        grad.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-42, 9.0])
        sent = sent_of(codec, grad, state)
        assert sent.view(torch.int32).equal(grad.view(torch.int32))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_gradient_of_zeros_sends_nothing(codec: AbstractCodec) -> None:
    state: dict[str, Tensor] = {}
    assert num_sent(sent_of(codec, torch.zeros(SHAPE), state)) == 0
    if isinstance(codec, Dct):
        assert state["threshold"] == torch.finfo(torch.float32).smallest_normal
        values, positions = codec.encode(torch.zeros(SHAPE), state)
        assert not values.any()
        assert (positions == N).all()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_bad", [1, 300])
def test_what_is_not_finite_arrives_and_leaves_nothing(
    codec: AbstractCodec, bad: float, num_bad: int
) -> None:
    state: dict[str, Tensor] = {}
    first, second, third = steps(3)
    sent_of(codec, first, state)
    left, threshold = state["left"], state.get("threshold")
    second.view(-1)[-num_bad:] = bad
    assert not sent_of(codec, second, state).isfinite().all()
    assert state["left"].equal(left)
    assert state.get("threshold") is threshold or state["threshold"] == threshold
    assert sent_of(codec, third, state).isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_first_gradient_that_is_not_finite_chooses_no_threshold(
    codec: AbstractCodec,
) -> None:
    state: dict[str, Tensor] = {}
    assert not sent_of(codec, torch.full(SHAPE, torch.nan), state).isfinite().all()
    (grad,) = steps(1)
    sent = sent_of(codec, grad, state)
    most = math.ceil(codec.density * N)  # type: ignore[attr-defined]
    assert num_sent(sent) == most
    assert sent.abs().max() == grad.abs().max()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_states_are_put_and_not_changed(codec: AbstractCodec) -> None:
    state: dict[str, Tensor] = {}
    first, second = steps(2)
    sent_of(codec, first, state)
    kept = dict(state)
    copies = {name: x.clone() for name, x in state.items()}
    sent_of(codec, second, state)
    assert all(kept[name].equal(copies[name]) for name in copies)
    assert not state["left"].equal(kept["left"])


def test_bytes_are_those_of_the_density() -> None:
    assert TopK(density=0.005).num_bytes(262_144) == 8 * 1311
    assert Dct(density=0.5).num_bytes(255) == 4 * 255  # as it is
    assert 4 * 10**6 / Dct(density=0.005).num_bytes(10**6) == 100


@pytest.mark.parametrize("kind", [TopK, Dct])
@pytest.mark.parametrize("density", [0, -0.1, 1.01, "all", True, math.nan, None])
def test_densities_that_cannot_be(kind: Any, density: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"density=.*; allowed: above 0, .*; use dens"):
        kind(density=density)


@pytest.mark.parametrize("every", [0, -3, 1.5, True, None])
def test_steps_that_cannot_be(every: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"threshold_every=.*; allowed: .*; use thresh"):
        Dct(density=0.1, threshold_every=every)
