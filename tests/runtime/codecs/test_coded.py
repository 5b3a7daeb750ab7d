"""Messages of coded gradients: what comes out is what the codec makes, whatever lies beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.buffers import Layout
from lightning_cyclic.runtime.codecs.base import AbstractCodec, State
from lightning_cyclic.runtime.codecs.coded import CodedStage, Codes
from lightning_cyclic.runtime.gradient_store import Gradients


class Halved(AbstractCodec):
    """Sends the first half now and adds the second to the next gradient, with its length."""

    least_elements: ClassVar[int] = 6
    has_memory: ClassVar[bool] = True

    def sent(self, like: Tensor) -> Sequence[Tensor]:
        return [
            like.new_empty((like.numel() + 1) // 2, dtype=torch.float32),
            like.new_empty(1, dtype=torch.int32),
            like.new_empty((1, 2), dtype=torch.float32),
        ]

    def encode(self, gradient: Tensor, state: State) -> Sequence[Tensor]:
        x = gradient.reshape(-1).float()
        half = (len(x) + 1) // 2
        before = state.get("rest", torch.zeros(len(x) - half))
        state["rest"] = x[half:]
        ends = torch.stack([x[0], x[-1]]).view(1, 2)
        first = x[:half].clone()
        first[: len(before)] += before
        return [first, torch.tensor([len(x)], dtype=torch.int32), ends]

    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        first, length, ends = sent
        assert ends.shape == (1, 2)
        rest = torch.zeros(int(length) - len(first))
        return torch.cat([first, rest]).view(like.shape)


SHAPES = [(2, 4), (3,), (7,), (2, 3), ()]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.float64]
LIKES = [torch.empty(s, dtype=d, device="meta") for s, d in zip(SHAPES, DTYPES, strict=True)]
NAMES = list("abcde")


def gradients(seed: int, missing: int | None = None) -> Gradients:
    g = torch.Generator().manual_seed(seed)
    made = [(9 * torch.randn(x.shape, generator=g)).to(x.dtype) for x in LIKES]
    return [None if k == missing else x for k, x in enumerate(made)]


def sent_through(stage: CodedStage, worker: int, grads: Gradients) -> Gradients:
    """Return what another process reads of a message, whose memory was used before."""
    layout = Layout(stage.tensors, torch.device("cpu"), len(LIKES))
    buffer = layout.new()
    buffer.data.fill_(255)
    stage.write(worker, grads, buffer.tensors)
    found = stage.read([x is not None for x in grads], buffer.tensors)
    buffer.data.fill_(255)  # as the next message comes
    return found


@pytest.mark.parametrize("missing", [None, 0, 1, 2, 4])
def test_a_message_brings_what_the_owner_makes_of_its_own(missing: int | None) -> None:
    near, far = (CodedStage(Codes(Halved()), NAMES, LIKES) for _ in range(2))
    for t in range(3):
        grads = gradients(t, missing)
        came, kept = sent_through(far, 1, grads), near.through(1, grads)
        for x, y, grad, like in zip(came, kept, grads, LIKES, strict=True):
            assert (x is None) == (y is None) == (grad is None)
            if x is not None and y is not None and grad is not None:
                assert torch.equal(x, y)
                assert x.shape == like.shape
                is_coded = like.is_floating_point() and like.numel() >= 6
                assert torch.equal(x, grad) != is_coded


def test_what_is_sent_of_all_lies_close_together() -> None:
    stage = CodedStage(Codes(Halved()), NAMES, LIKES)
    assert [(tuple(x.shape), x.dtype) for x in stage.tensors] == [
        ((3,), torch.float32), ((2, 3), torch.int64), ((), torch.float64),  # as they are
        ((4 + 2 + 4 + 2,), torch.float32), ((2,), torch.int32),
    ]  # fmt: skip


def test_workers_have_memories_of_their_own() -> None:
    codes, x, y = Codes(Halved()), torch.arange(8.0), torch.ones(8)
    codes.through(0, "a", x)
    assert codes.through(1, "a", y).tolist() == [1] * 4 + [0] * 4
    assert codes.through(0, "b", y).tolist() == [1] * 4 + [0] * 4
    assert codes.through(0, "a", y).tolist() == [5, 6, 7, 8] + [0] * 4


def test_a_copy_goes_on_by_itself() -> None:
    codes, x = Codes(Halved()), torch.arange(8.0)
    codes.through(0, "a", x)
    copy, again = codes.copied(), Codes(Halved())
    again.put_states(codes.states())
    first = copy.through(0, "a", 2 * x)
    assert torch.equal(codes.through(0, "a", 2 * x), first)
    assert torch.equal(again.through(0, "a", 2 * x), first)
    assert not torch.equal(codes.through(0, "a", 2 * x), first)


def test_a_gradient_without_a_value_leaves_its_memory_as_it_is() -> None:
    codes = Codes(Halved())
    stage = CodedStage(codes, NAMES, LIKES)
    sent_through(stage, 0, gradients(0))
    before = codes.states()[0]["a"]["rest"]
    sent_through(stage, 0, gradients(1, missing=0))
    assert codes.states()[0]["a"]["rest"] is before


class Longer(Halved):
    """Sends more than it says."""

    def encode(self, gradient: Tensor, state: State) -> Sequence[Tensor]:
        return [torch.cat([x, x]) for x in super().encode(gradient, state)]


class Writing(Halved):
    """Says that it keeps nothing, and does."""

    has_memory: ClassVar[bool] = False


def test_a_codec_that_does_not_keep_its_word() -> None:
    with pytest.raises(StepError, match=r"Longer\(\) sends float32\[8\], .*'a', of float32\[2, 4"):
        Codes(Longer()).through(0, "a", torch.ones(2, 4))
    with pytest.raises(StepError, match=r"Writing\(\) keeps 'rest'.* allowed: .*; use has_memory"):
        Codes(Writing()).through(0, "a", torch.ones(2, 4))


def test_a_codec_is_named_by_what_it_was_made_with() -> None:
    class Named(Halved):
        def __init__(self, second: int, first: str) -> None:
            self.second, self.first = second, first

    assert repr(Named(2, "x")).endswith("Named(first='x', second=2)")


def test_a_codec_of_some_parameters_leaves_all_others_as_they_are() -> None:
    codec = Halved()
    codec.names = {"c"}
    stage = CodedStage(Codes(codec), NAMES, LIKES)
    assert [x.shape for x in stage.tensors[:4]] == [SHAPES[k] for k in (0, 1, 3, 4)]
    grads = gradients(0)
    found = stage.through(0, grads)
    assert [x is y for x, y in zip(found, grads, strict=True)] == [n != "c" for n in NAMES]


def test_a_codec_is_told_whose_backward_begins() -> None:
    told: list[State] = []

    class Listening(Halved):
        def begin(self, state_of: Callable[[str], State]) -> None:
            told.append(state_of("a"))

    codes = Codes(Listening())
    for worker in (1, 0, 1):
        codes.begin(worker)
    told[0]["rest"] = torch.ones(1)
    assert told[2] is told[0]
    assert not told[1]
    assert codes.states() == {1: {"a": told[0]}, 0: {"a": {}}}
