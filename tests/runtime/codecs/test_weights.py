"""What weights lack that all have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_cyclic import AbstractCodec, TopK
from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.codecs.blocks import Int8
from lightning_cyclic.runtime.codecs.weights import CodedWeights, weight_codec_of

TOP = TopK(density=0.1)


def stepped(weights: CodedWeights, p: nn.Parameter, by: torch.Tensor) -> torch.Tensor:
    """Return what an update began with."""
    with weights.updating([p]):
        begun = p.detach().clone()
        p.data.add_(by)
    return begun


@pytest.mark.parametrize("codec", [TOP, Int8()], ids=str)
def test_what_was_not_sent_is_in_the_next_difference(codec) -> None:
    weights, p = CodedWeights(codec), nn.Parameter(torch.zeros(300))
    by = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    stepped(weights, p, by[0])
    first = p.detach().clone()
    assert not torch.equal(first, by[0])
    (left,) = weights.state({"w": p}).values()
    assert torch.equal(left, by[0] - first)
    assert torch.equal(stepped(weights, p, by[1]), first + left)  # exact ones are updated
    sent = codec.encode(first + left + by[1] - first, {})
    assert torch.equal(p, first + codec.decode(sent, torch.empty(300, device="meta")))


def test_what_others_change_between_updates_counts() -> None:
    """As on one device, where a callback may clip weights."""
    by = torch.linspace(-1, 1, 300)
    weights, p = CodedWeights(TOP), nn.Parameter(torch.zeros(300))
    stepped(weights, p, by)
    (left,) = weights.state({"w": p}).values()
    p.data.zero_()
    assert torch.equal(stepped(weights, p, by), left)


class Short(AbstractCodec):
    """Sends less than it says, which a copy into a message would spread."""

    def sent(self, like):
        return [like.new_empty(like.shape)]

    def encode(self, gradient, state):
        return [gradient[:1]]

    def decode(self, sent, like):
        return sent[0]


def test_other_shapes_than_were_said_are_refused() -> None:
    weights, p = CodedWeights(Short()), nn.Parameter(torch.zeros(300))
    with pytest.raises(StepError, match=r"float32\[1\] of what a weight has changed by"):
        stepped(weights, p, torch.ones(300))


def test_what_is_frozen_and_trained_again_goes_on_from_where_all_have_it() -> None:
    weights, p = CodedWeights(TOP), nn.Parameter(torch.zeros(300))
    by = torch.linspace(-1, 1, 300)
    stepped(weights, p, by)
    p.requires_grad_(False)
    weights.keep_trained()
    p.requires_grad_(True)
    version = p.detach().clone()
    assert torch.equal(stepped(weights, p, by), version)


def test_a_codec_that_is_named_is_made() -> None:
    assert isinstance(weight_codec_of("int8"), Int8)
    assert weight_codec_of(TOP) is TOP
