"""Values taken apart and put together: every container, at speed, and as JSON."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import logging
import pathlib
import timeit
from collections import Counter, OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import omegaconf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import register_pytree_node
from transformers import BatchEncoding, BatchFeature, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.values.plain import (
    is_plain,
    leaf_from_data,
    leaf_to_data,
    structure_from_data,
    structure_to_data,
)
from lightning_cyclic.runtime.values.trees import (
    LEAF,
    flatten,
    labels,
    map_tensors,
    open_value,
    tensors,
    unflatten,
)

X, Y, Z = torch.arange(6.0).reshape(2, 3), torch.ones(2), torch.tensor(3)


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class Sample:
    x: Any
    y: Any = None
    calls: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.calls += 1
        self.extra = "set after the fields"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    n: int = 3


class Plain:
    def __init__(self, *, x: Any) -> None:
        self.x = x


class Array(np.ndarray):  # type: ignore[type-arg]
    """An object with attributes, and a part that is none."""


class Slotted:
    __slots__ = ("unset", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Keyed(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("a container's own code must not run")


class Stack(list):  # type: ignore[type-arg]
    name = "class"


class Point(tuple):  # type: ignore[type-arg]
    """A tuple with attributes."""


class Needy:
    def __new__(cls, x: Any) -> Needy:
        return super().__new__(cls)

    def __init__(self, x: Any) -> None:
        self.x = x


class Known(Needy):
    pass


class Colour(enum.Enum):
    RED = "red"


class Loud(nn.Parameter):
    pass


def named(container: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(container, name, value)
    return container


def same(a: Any, b: Any) -> bool:
    """Compare two values by type and content; tensors by identity."""
    if type(a) is not type(b):
        return False
    (_, parts), (_, others) = open_value(a), open_value(b)
    if not len(parts) and not len(others):
        return a is b or (not isinstance(a, Tensor) and bool(a == b))
    return flatten(a)[1] == flatten(b)[1] and all(map(same, parts, others))


CONTAINERS = {
    "tuple": (X, None, 3),
    "list": [X, "text", [Y]],
    "empty": ((), [], {}),
    "dict": {"b": X, "a": {1: Y, ("k", 2): Z}},
    "OrderedDict": OrderedDict(b=X, a=Y),
    "defaultdict": defaultdict(list, a=[X]),
    "Counter": Counter("abca"),
    "dict subclass": named(dict.__new__(Keyed), note=X),
    "list subclass": named(Stack([X, Y]), name="mine"),
    "UserDict": UserDict(a=X),
    "namedtuple": Pair(X, Pair(Y)),
    "tuple subclass": named(Point((X, Y)), note=Z),
    "return type": torch.max(X, dim=0),
    "PackedSequence": pack_sequence([Y[:1], X[0], Y], enforce_sorted=False),
    "sorted PackedSequence": pack_sequence([X[0], Y]),
    "dataclass": Sample(X, [Y]),
    "frozen dataclass with slots": Frozen(X),
    "object": Plain(x=Plain(x=[X])),
    "object with slots": Slotted(X),
    "distribution": torch.distributions.Normal(Y, Y),
    "categorical": torch.distributions.Independent(torch.distributions.Categorical(X.exp()), 1),
    "BatchEncoding": BatchEncoding({"input_ids": X, "length": [1, 2]}),
    "BatchFeature": BatchFeature({"pixel_values": X}),
    "ModelOutput": CausalLMOutputWithPast(loss=Z, logits=X, hidden_states=(X, Y)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_comes_back_with_its_type_and_content(name: str) -> None:
    value = CONTAINERS[name]
    leaves, structure = flatten(value)
    back = unflatten(structure, leaves)
    assert back is not value
    assert same(back, value)
    assert LEAF != structure == flatten(back)[1]
    assert len(labels(structure)) == len(structure.children)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_structure_survives_json(name: str) -> None:
    leaves, structure = flatten(CONTAINERS[name])
    back = structure_from_data(json.loads(json.dumps(structure_to_data(structure))))
    assert back == structure
    assert same(unflatten(back, leaves), CONTAINERS[name])


def trees_of(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers() | st.tuples(st.booleans(), st.none())

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        few = st.lists(inner, max_size=3)
        return st.one_of(
            few,
            few.map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
            st.builds(Pair, inner, inner),
            st.builds(Sample, inner, inner),
            st.builds(Frozen, inner),
        )

    return st.recursive(leaves, grow, max_leaves=12)


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.sets(st.integers() | st.text()),
    st.slices(9),
    st.sampled_from(
        [..., torch.Size([2, 3]), torch.bool, torch.device("cuda", 1), range(1, 9, 2)]
    ),
    st.sampled_from(
        [torch.strided, torch.channels_last, Colour.RED, Plain, torch.nn.functional.relu]
    ),
)


@given(trees_of(PLAIN | st.sampled_from([X, Y, Z])))
def test_any_tree_comes_back(value: Any) -> None:
    leaves, structure = flatten(value)
    assert same(unflatten(structure, leaves), value)
    assert structure_from_data(json.loads(json.dumps(structure_to_data(structure)))) == structure
    assert map_tensors(lambda x: x, value) is value
    assert list(map(id, tensors(value))) == [id(x) for x in leaves if isinstance(x, Tensor)]


@given(PLAIN)
def test_a_plain_leaf_survives_json(leaf: Any) -> None:
    assert is_plain(leaf)
    back = leaf_from_data(json.loads(json.dumps(leaf_to_data(leaf))))
    assert type(back) is type(leaf)
    assert repr(back) == repr(leaf) or back == leaf  # nan differs from itself, -0.0 does not


@pytest.mark.parametrize(
    "leaf",
    [X, nn.Linear(1, 1), nn.Parameter(Y), Loud(Y), Colour.RED, Plain, len, torch.float16, {1, 2}]
    + [
        Plain(x=3),
        functools.partial(len, X),
        torch.Size([1]),
        ValueError("x"),
        torch.optim.Adam([X]),
    ]
    + [
        named(np.zeros(2).view(Array), note=X),
        logging.getLogger("a.b"),
        pathlib.PurePosixPath("a"),
        torch.Generator(),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_is_no_container_is_a_leaf(leaf: Any) -> None:
    leaves, structure = flatten(leaf)
    assert structure is LEAF
    assert leaves[0] is leaf is unflatten(structure, leaves)


def test_a_model_output_keeps_both_faces() -> None:
    out = CausalLMOutputWithPast(logits=X, hidden_states=(X, Y))
    back = map_tensors(lambda x: x + 1, out)
    assert len(tensors(out)) == 3  # each value once, although it is item and attribute
    assert list(back) == ["logits", "hidden_states"]
    assert back["logits"] is back.logits is back[0]
    assert torch.equal(back.logits, X + 1)
    assert back.loss is None
    assert "loss" not in back
    assert torch.equal(back.hidden_states[1], Y + 1)


def test_a_cache_of_keys_and_values_works_after_it_was_put_together() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), 0)
    out = BaseModelOutputWithPast(last_hidden_state=X, past_key_values=cache)
    leaves, structure = flatten(out)
    structure = structure_from_data(json.loads(json.dumps(structure_to_data(structure))))
    sent = [x if isinstance(x, Tensor) else leaf_from_data(leaf_to_data(x)) for x in leaves]
    back = unflatten(structure, sent).past_key_values
    keys, _ = back.update(torch.ones(1, 1, 1, 3), torch.zeros(1, 1, 1, 3), 0)
    assert back.get_seq_length() == 3
    assert cache.get_seq_length() == 2
    assert keys.shape == (1, 1, 3, 3)


def test_a_batch_encoding_still_moves_and_reads_its_tensors() -> None:
    back = map_tensors(torch.Tensor.double, BatchEncoding({"input_ids": X, "n": [1, 2]}))
    assert type(back) is BatchEncoding
    assert back.input_ids.dtype == back["input_ids"].dtype == torch.float64
    assert back.to("cpu")["n"] == [1, 2]


def test_types_that_users_register_are_taken_apart_as_they_say() -> None:
    register_pytree_node(
        Known, lambda value: ([value.x], "context"), lambda parts, _: Known(*parts)
    )
    leaves, structure = flatten([Known(X)])
    assert leaves == [X]
    assert unflatten(structure, [Y])[0].x is Y


@pytest.mark.parametrize(
    "function", [flatten, tensors, functools.partial(map_tensors, torch.clone)]
)
def test_a_value_that_contains_itself_is_refused(function: Any) -> None:
    circle = Plain(x=X)
    circle.itself = [circle, circle]
    with pytest.raises(
        StepError, match=r"nested more than 100 deep, or contains itself; allowed:"
    ):
        function(circle)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(StepError, match="a value of type builtins.list"):
        function((endless,))


def test_objects_in_circles_without_a_tensor_are_leaves() -> None:
    circle = Plain(x=3)
    circle.itself = [circle, circle]
    assert flatten(circle) == ([circle], LEAF)
    assert not is_plain(circle)


def test_configurations_are_leaves_although_they_know_their_parents() -> None:
    config = omegaconf.OmegaConf.create({"model": {"width": 3, "layers": [1, 2]}})
    assert flatten((config, X))[1] == flatten((None, X))[1]
    assert flatten(config)[0][0] is config


def test_an_object_that_needs_arguments_is_refused() -> None:
    with pytest.raises(StepError, match=r"test_trees.Needy cannot be put together again"):
        map_tensors(torch.clone, Needy(X))


def test_what_cannot_be_sent_is_refused_with_its_place() -> None:
    for leaf in (X, nn.Linear(1, 1), object(), lambda: 0, {X}, pathlib.Path("a"), iter([])):
        assert not is_plain(leaf)
    with pytest.raises(StepError, match="what a gave is or holds a builtins.object, which can"):
        leaf_to_data(Plain(x={"a": [object()]}), "what a gave")

    class Local(NamedTuple):
        x: Any

    for value in ({"a": [X, Local(X)]}, defaultdict(lambda: 0, a=X)):
        with pytest.raises(StepError, match=r"a batch is or holds .*<locals>.*, which another"):
            structure_to_data(flatten(value)[1], "a batch")


def test_a_type_that_cannot_be_imported_here_is_refused() -> None:
    with pytest.raises(StepError, match="no_such:Type cannot be imported here"):
        structure_from_data(["no_such:Type", [], []])


def test_flattening_the_usual_arguments_costs_microseconds() -> None:
    value = (X, None, {"a": X})
    best_s = min(timeit.repeat(lambda: flatten(value), number=1000, repeat=5)) / 1000
    assert best_s < 20e-6  # about 1.2 us on an idle core
