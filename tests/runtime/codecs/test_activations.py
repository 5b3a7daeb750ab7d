"""Codecs of what crosses between stages: the largest of each sample, dtypes, and others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_cyclic import AbstractCodec, ConfigurationError, Dct, PowerSgd, StepError, TopK
from lightning_cyclic.runtime.codecs.activations import (
    AbstractCrossingCodec,
    Rounded,
    crossing_codec_of,
)
from lightning_cyclic.runtime.partial_step.coded_crossings import CodedCrossings
from lightning_cyclic.runtime.partial_step.packets import Packet
from lightning_cyclic.runtime.partial_step.plain_crossings import PlainCrossings

HANDLE = (0, 0, 0)


def normal(*size: int, seed: int = 0, **more: Any) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), **more)


def like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")


def through(codec: AbstractCrossingCodec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), like(x))


def back(codec: AbstractCrossingCodec, x: Tensor, grad: Tensor) -> Tensor:
    kept = codec.kept(codec.encode(x))
    return codec.decode_gradient(codec.encode_gradient(grad, kept), kept, like(x))


def largest_of(x: Tensor, density: float) -> Tensor:
    """Say which are the largest of each sample, one after the other."""
    mask = torch.zeros(x.shape, dtype=torch.bool)
    for b in range(len(x)):
        sizes = [abs(float(v)) for v in x[b].reshape(-1)]
        most = -int(-density * len(sizes) // 1)
        first = sorted(range(len(sizes)), key=lambda n: (-sizes[n], n))[:most]
        mask[b].view(-1)[first] = True
    return mask


# ---------------------------------------------------------------------- the largest of a sample


@pytest.mark.parametrize("shape", [(3, 100), (2, 5, 7, 4), (1, 300)])
@pytest.mark.parametrize("density", [0.04, 0.5])
def test_the_largest_of_each_sample_go_there_and_back(
    shape: tuple[int, ...], density: float
) -> None:
    codec, x, grad = (
        crossing_codec_of(TopK(density=density)),
        normal(*shape),
        normal(*shape, seed=1),
    )
    mask = largest_of(x, density)
    assert torch.equal(through(codec, x), torch.where(mask, x, 0.0))
    assert torch.equal(back(codec, x, grad), torch.where(mask, grad, 0.0))


@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), min_size=12, max_size=12))
def test_of_equal_ones_the_first_are_sent_and_the_second_time_the_same(
    values: list[float],
) -> None:
    codec, x = crossing_codec_of(TopK(density=0.3)), torch.tensor(values).reshape(2, 6)
    once = through(codec, x)
    assert torch.equal(once, torch.where(largest_of(x, 0.3), x, 0.0))
    assert torch.equal(codec.encode(once)[1], codec.encode(x)[1])


def test_gradients_are_those_of_a_mask_that_has_none() -> None:
    """As y = x * m(x) is, away from ties."""
    order = normal(3 * 90).argsort().argsort().to(torch.float64)
    x = (order - 134.75).reshape(3, 90).requires_grad_()  # no two are as large

    def crossed(x: Tensor) -> Tensor:
        crossings = PlainCrossings(crossing_codec_of(TopK(density=0.1)), size=3)
        crossings.note(x, 0)
        y: Tensor = crossings.at(1, x)
        assert y is not x
        return y

    assert torch.autograd.gradcheck(crossed, x)


@pytest.mark.parametrize(
    ("num_elements", "dtype"),
    [(65_536, torch.int16), (65_537, torch.int32), (300, torch.int16)],
)
def test_positions_take_two_bytes_as_long_as_that_is_enough(
    num_elements: int, dtype: torch.dtype
) -> None:
    codec, x = crossing_codec_of(TopK(density=0.5)), normal(1, num_elements)
    x[0, -1] = 9.0
    values, positions = codec.encode(x)
    assert positions.dtype == dtype
    assert len(values[0]) == -(-num_elements // 2)
    assert torch.equal(through(codec, x), torch.where(largest_of(x, 0.5), x, 0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_sent_in_their_own_dtype(dtype: torch.dtype) -> None:
    codec, x = crossing_codec_of(TopK(density=0.1)), normal(4, 80).to(dtype)
    assert codec.encode(x)[0].dtype == dtype
    assert torch.equal(through(codec, x), torch.where(largest_of(x, 0.1), x, 0.0))


def test_what_is_not_finite_is_sent_first() -> None:
    x = normal(2, 200)
    x[0, 17], x[1, 3], x[1, 150] = torch.nan, -torch.inf, torch.nan
    y = through(crossing_codec_of(TopK(density=0.01)), x)
    assert y[0, 17].isnan()
    assert y[1, 150].isnan()
    assert y[1, 3] == -torch.inf


SMALL = normal(3, 40)  # 120 elements


@pytest.mark.parametrize(
    ("codec", "x", "size", "is_taken"),
    [
        (TopK(density=0.1), normal(4, 80), 4, True),
        (TopK(density=0.1), normal(4, 80), 5, False),  # of another number of samples
        (TopK(density=1), normal(4, 80), 4, False),  # all: without positions
        (TopK(density=0.999), normal(4, 80), 4, False),
        (TopK(density=0.1), normal(300), 300, False),  # one element each
        (TopK(density=0.1), SMALL, 3, False),
        ("bf16", normal(4, 80), 5, True),
        ("bf16", normal(4, 80).half(), 4, False),  # it has 2 bytes, too
        ("bf16", SMALL, 3, False),
        ("int8", normal(4, 80), 4, True),
        ("int8", SMALL, 3, False),
        ("int8", normal(4, 80).to(torch.complex64), 4, False),
        ("bf16", torch.arange(400), 4, False),
        (TopK(density=0.1), torch.arange(400).reshape(4, 100), 4, False),
        ("bf16", torch.ones(4, 80).to_sparse(), 4, False),
    ],
)  # fmt: skip
def test_what_is_encoded(codec: Any, x: Tensor, size: int, is_taken: bool) -> None:
    assert crossing_codec_of(codec).takes(x, size) is is_taken


# ---------------------------------------------------------------------- dtypes, and others


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
def test_a_dtype_rounds_both_ways(codec: str) -> None:
    made, x, grad = crossing_codec_of(codec), normal(4, 80), normal(4, 80, seed=1)
    dtype = torch.bfloat16 if codec == "bf16" else torch.float16
    assert torch.equal(through(made, x), x.to(dtype).float())
    assert torch.equal(back(made, x, grad), grad.to(dtype).float())
    assert torch.equal(through(made, through(made, x)), through(made, x))


def test_what_is_too_large_for_float16_is_named_unless_a_loss_scale_looks_for_it() -> None:
    codec, x, large = crossing_codec_of("fp16"), normal(4, 80), normal(4, 80) * 1e6
    with pytest.raises(StepError, match=r"an activation has an element of .*e\+06, but .*'bf16'"):
        codec.encode(large)
    with pytest.raises(StepError, match="the gradient of an activation has"):
        back(codec, x, large)
    scaled = crossing_codec_of("fp16", is_scaled=True)
    assert back(scaled, x, large).isinf().any()
    with pytest.raises(StepError, match="an activation has"):
        scaled.encode(large)
    assert codec.encode(torch.full((4, 80), torch.inf))[0].isinf().all()  # it was so before


def test_whole_numbers_twice_are_within_a_rounding_of_once() -> None:
    """A tensor that crosses two boundaries is encoded at each."""
    codec, x = crossing_codec_of("int8"), normal(8, 256)
    once = through(codec, x)
    assert (once - x).abs().max() <= x.abs().max() / 254 * 1.001
    twice = through(codec, once)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0.0)


class Halves(AbstractCodec):
    """Sends a part of what it is given, itself, and what it has in memory, if anything."""

    has_memory = True

    def sent(self, like: Tensor) -> Sequence[Tensor]:
        return [like[:2]]

    def encode(self, gradient: Tensor, state: Any) -> Sequence[Tensor]:
        assert not state
        state["left"] = gradient[2:].clone()
        return [gradient[:2]]

    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        return torch.cat([sent[0], torch.zeros(len(like) - 2, *like.shape[1:])]).double()


def test_a_codec_of_a_users_has_an_empty_state_each_time_and_no_part_of_the_tensor() -> None:
    codec, x = crossing_codec_of(Halves()), normal(4, 80)
    for _ in range(2):
        y = through(codec, x)
        assert y.dtype == x.dtype
        assert torch.equal(y[:2], x[:2])
        assert not y[2:].any()
        assert torch.equal(back(codec, x, x), y)
    (sent,) = codec.encode(x)
    sent.zero_()
    assert x[:2].all()


@pytest.mark.parametrize(
    ("codec", "use"),
    [(Dct(density=0.02), r"use compress={'activations': TopK\(density=0.02\)}"),
     (PowerSgd(rank=2), r"use compress={'activations': TopK\(density=0.05\)}")],
)  # fmt: skip
def test_codecs_of_gradients_alone_say_what_to_use(codec: AbstractCodec, use: str) -> None:
    with pytest.raises(ConfigurationError, match=use) as caught:
        crossing_codec_of(codec)
    assert re.search(re.escape(repr(codec)), str(caught.value))


# ---------------------------------------------------------------------- in a packet


def crossed(codec: Any, x: Tensor, by_message: bool) -> tuple[Packet, CodedCrossings]:
    """Let a tensor cross from stage 0 to stage 1, of one worker or by a message."""
    said: list[str] = []
    crossings = CodedCrossings(crossing_codec_of(codec), torch.device("cpu"), said.append)
    packet = Packet(tensors={HANDLE: x, (0, 1, 0): x[0]}, with_grad=frozenset({HANDLE}))
    crossings.encode((0, 0, 0), packet, size=len(x))
    assert not said
    if by_message:
        packet = Packet.of([y.clone() for y in packet.sent()], packet.facts(), None)
    return crossings.decode((0, 0, 1), packet), crossings


@pytest.mark.parametrize("by_message", [False, True])
@pytest.mark.parametrize("codec", [TopK(density=0.1), "bf16", "int8"], ids=str)
def test_a_tensor_lies_in_memory_as_it_did(codec: Any, by_message: bool) -> None:
    made = crossing_codec_of(codec)
    for x in (normal(4, 9, 8).transpose(1, 2), normal(4, 12, 9)[:, :10, :8], normal(4, 80)):
        packet, crossings = crossed(codec, x, by_message)
        y = packet.tensors[HANDLE]
        assert y.stride() == x.stride()
        assert torch.equal(y, through(made, x))
        assert packet.with_grad == {HANDLE}
        assert torch.equal(packet.tensors[0, 1, 0], x[0])  # which has no gradient
        assert list(packet.tensors) == [HANDLE, (0, 1, 0)]
        grad = normal(*x.shape, seed=2)
        sent = crossings.encode_gradients((0, 0, 1), {HANDLE: grad})
        (came,) = crossings.decode_gradients((0, 0, 0), sent).values()
        assert torch.equal(came, back(made, x, grad))


def test_a_gradient_sends_no_positions() -> None:
    _, crossings = crossed(TopK(density=0.1), normal(4, 80), by_message=True)
    (sent,) = crossings.encode_gradients((0, 0, 1), {HANDLE: normal(4, 80)}).values()
    assert [x.shape for x in sent] == [(4, 8)]


def test_a_boundary_at_which_nothing_is_encoded_is_told_once() -> None:
    said: list[str] = []
    crossings = CodedCrossings(Rounded(torch.bfloat16), torch.device("cpu"), said.append)
    for i in range(2):
        packet = Packet(tensors={HANDLE: torch.arange(400)})
        crossings.encode((0, i, 0), packet, size=4)
        assert list(packet.tensors) == [HANDLE]
    assert len(said) == 1
    assert "from stage 0 to stage 1" in said[0]


def test_a_tensor_without_a_gradient_is_sent_as_it_is() -> None:
    crossings = CodedCrossings(Rounded(torch.bfloat16), torch.device("cpu"), lambda text: None)
    packet = Packet(tensors={HANDLE: normal(4, 80)})
    crossings.encode((0, 0, 0), packet, size=4)
    assert torch.equal(packet.tensors[HANDLE], normal(4, 80))
