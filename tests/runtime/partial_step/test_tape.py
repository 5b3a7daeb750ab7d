"""Events: what calls gave back, told to other workers as JSON."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import torch

from lightning_cyclic.runtime.partial_step.tape import (
    Alias,
    Event,
    Plain,
    describe,
    spec_from_data,
    spec_to_data,
    tape_from_data,
    tape_to_data,
)
from lightning_cyclic.runtime.values.plain import TensorSpec
from lightning_cyclic.runtime.values.trees import LEAF, flatten, unflatten

X, Y = torch.arange(6.0).reshape(2, 3), torch.ones(2, dtype=torch.int64)


class Out(NamedTuple):
    logits: Any
    extra: Any


def sent(tape):
    """Return a tape as another worker reads it."""
    return tape_from_data(json.loads(json.dumps(tape_to_data(tape))))


def test_a_result_is_described_by_specs_aliases_and_plain_values():
    made = X.t() + 1
    event, leaves = describe("layer()", {"y": Out(made, [Y, 3]), "x": X}, [Y, X], (1,))
    assert event.name == "layer()"
    assert event.mutated == (1,)
    assert not event.is_read
    assert event.outs == (TensorSpec.of(made), Alias(0), Plain(3), Alias(1))
    assert leaves[0] is made
    assert event.structure == flatten({"y": Out(0, [0, 0]), "x": 0})[1]


def test_a_tape_survives_json():
    outs = (X, None, X.t(), Y, X.requires_grad_(False), float("inf"), torch.float16, "text")
    tape = (
        describe("encoder.layer()", Out(outs, {"k": X[:0]}), [Y], (0,))[0],
        describe("cat", X.clone().requires_grad_(), [], ())[0],
        Event("item", LEAF, (), (), True),
        Event("nothing", flatten(())[1], ()),
    )
    back = sent(tape)
    assert back == tape
    assert hash(back[1]) == hash(tape[1])
    assert [type(o) for o in back[0].outs] == [type(o) for o in tape[0].outs]
    assert unflatten(back[0].structure, list(range(9))) == unflatten(
        tape[0].structure, list(range(9))
    )
    assert type(unflatten(back[0].structure, list(range(9)))) is Out


def test_kinds_of_outputs_with_equal_fields_stay_apart():
    tape = (Event("f", flatten((0, 0))[1], (Alias(1), Plain(1))),)
    assert [type(out) for out in sent(tape)[0].outs] == [Alias, Plain]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64]
    + [torch.complex64, torch.float8_e4m3fn],
)
def test_a_spec_survives_json(dtype: torch.dtype):
    spec = TensorSpec.of(torch.zeros(2, 0, 3, dtype=dtype))
    assert spec_from_data(json.loads(json.dumps(spec_to_data(spec)))) == spec


def test_tapes_are_equal_if_nothing_differs():
    def tape(x=X, name="f", alias=0, plain=1, mutated=(), read=False, keys="ab"):
        structure = flatten(dict.fromkeys([*keys, "c"]))[1]
        outs = (TensorSpec.of(x), Alias(alias), Plain(plain))
        return (Event(name, structure, outs, mutated, read),)

    assert tape() == tape(X + 1)
    others = [
        tape(X.t()), tape(X.double()), tape(X.clone().requires_grad_()), tape(name="g"),
        tape(alias=1), tape(plain=2), tape(mutated=(0,)), tape(read=True), tape(keys="ba"),
        tape() + tape(), (),
    ]  # fmt: skip
    for other in others:
        assert other != tape()
        assert sent(other) == other
