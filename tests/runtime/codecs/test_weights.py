"""Exact weights beside those that all have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_cyclic import TopK
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
    assert torch.equal(stepped(weights, p, by[1]), by[0])  # exact ones are updated
    (exact,) = weights.state({"w": p}).values()
    assert torch.equal(exact, by[0] + by[1])
    sent = codec.encode(exact - first, {})
    assert torch.equal(p, first + codec.decode(sent, torch.empty(300, device="meta")))


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
