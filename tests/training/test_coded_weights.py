"""Codecs of new weights: what versions add to the ones before, and exact weights at their owners."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_cyclic import Dct, PowerSgd, TopK
from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.codecs.choice import codec_of
from lightning_cyclic.runtime.codecs.weights import weight_codec_of
from tests.harness.rows import more
from tests.harness.runs import run, saving
from tests.harness.trainers import assert_same
from tests.training.test_compression import (
    NUM_STEPS,
    STAGES,
    Bytes,
    Net,
    differ,
    fit,
    micro_batches,
    own_batches,
)

pytestmark = pytest.mark.multi

TOP = TopK(density=0.1)
BOTH = {"gradients": TOP, "weights": TOP}
INT8 = {"weights": "int8"}


def by_rule(n: int, compress: dict[str, Any]) -> dict[str, Tensor]:
    """Train by the rule of lockstep_dp: versions that all have, and exact weights of the owner."""
    module, left = Net(), dict[Any, Any]()
    of_gradients, of_weights = codec_of(compress.get("gradients")), compress["weights"]
    of_weights = weight_codec_of(of_weights)
    optimizer, named = module.configure_optimizers(), dict(module.named_parameters())
    exact = {name: p.detach().clone() for name, p in named.items()}
    for step in micro_batches(n):
        sums: dict[str, Tensor] = {}
        for i in range(n):
            optimizer.zero_grad()
            loss = module.loss(*step[i])
            torch.autograd.backward(loss, torch.ones_like(loss) / n)
            for name, p in named.items():
                assert p.grad is not None
                grad = p.grad.clone()
                if of_gradients is not None and of_gradients.takes(grad):
                    sent = of_gradients.encode(grad, left.setdefault((i, name), {}))
                    grad = of_gradients.decode(sent, torch.empty_like(p, device="meta"))
                sums[name] = sums[name] + grad if name in sums else grad
        versions = {name: p.detach().clone() for name, p in named.items()}
        for name, p in named.items():
            p.grad = sums[name]
            p.data.copy_(exact[name])
        optimizer.step()
        for name, p in named.items():
            exact[name] = p.detach().clone()
            if of_weights.takes(p):
                sent = of_weights.encode(exact[name] - versions[name], {})
                like = torch.empty_like(p, device="meta")
                p.data.copy_(versions[name] + of_weights.decode(sent, like))
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize(
    ("n", "compress"), [(2, BOTH), (4, INT8), more(2, INT8), more(4, BOTH)], ids=str
)
def test_all_add_what_owners_send(n: int, compress: dict[str, Any]) -> None:
    expected = by_rule(n, compress)
    for rank in fit("lockstep_dp", n, compress):
        assert_same(rank.weights, expected)
    uncoded = fit("lockstep_dp", n, compress | {"weights": None})
    assert differ(uncoded[0].weights, expected)


@pytest.mark.parametrize(
    ("preset", "n", "compress"),
    [
        ("lockstep_dp", 2, BOTH),
        ("cyclic_dp", 2, BOTH),
        ("cyclic_dp", 4, INT8),
        ("cyclic_dp_v1", 2, INT8),
        more("cyclic_dp", 4, BOTH),
        more("cyclic_dp_v1", 4, BOTH),
        more("lockstep_dp", 4, INT8),
    ],
    ids=str,
)
def test_processes_have_the_bits_of_one(preset: str, n: int, compress: dict[str, Any]) -> None:
    (one,) = fit(preset, n, compress, 1)
    for rank in fit(preset, n, compress):
        assert_same(rank.weights, one.weights)
