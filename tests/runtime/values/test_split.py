"""Batches of every make, cut into micro-batches."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate
from transformers import BatchEncoding, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.values.plain import leaf_from_data, leaf_to_data
from lightning_cyclic.runtime.values.split import (
    MicroBatch,
    names,
    read,
    signature,
    size_of,
    split,
)
from lightning_cyclic.runtime.values.trees import flatten, map_tensors, unflatten


class Pair(NamedTuple):
    x: Any
    y: Any


class Image(NamedTuple):
    x: Any
    shape: tuple[int, int]


@dataclasses.dataclass
class Batch:
    x: Any
    names: Any


def rows(size: int, *shape: int) -> Tensor:
    return torch.arange(size * torch.Size(shape).numel()).reshape(size, *shape)


def parts_of(batch: Any, num_microbatches: int) -> list[Any]:
    return [part.batch for part in split(batch, num_microbatches)]


@given(size=st.integers(1, 40), num_microbatches=st.integers(1, 12))
def test_sizes_are_those_of_tensor_split(size: int, num_microbatches: int) -> None:
    x = rows(size, 2)
    parts = split((x, x[:, 0]), num_microbatches)
    assert len(parts) == min(size, num_microbatches)
    expected = x.tensor_split(len(parts))
    for part, want in zip(parts, expected, strict=True):
        assert torch.equal(part.batch[0], want)
        assert torch.equal(part.batch[1], want[:, 0])
        assert part.size == len(want)


@given(
    size=st.integers(1, 12),
    num_microbatches=st.integers(2, 5),
    wrap=st.lists(st.sampled_from([dict, list, tuple, Pair, Batch, OrderedDict]), max_size=4),
)
def test_a_batch_of_any_make_is_cut_at_the_same_samples(
    size: int, num_microbatches: int, wrap: list[Any]
) -> None:
    batch: Any = rows(size, 3)
    names = [f"name {k}" for k in range(size)]
    for kind in wrap:
        if kind in (Pair, Batch):
            batch = kind(batch, names)
        else:
            batch = (
                kind({"a": batch, "n": names}) if issubclass(kind, dict) else kind([batch, names])
            )
    parts = split(batch, num_microbatches)
    start = 0
    for part in parts:
        leaves, _ = flatten(part.batch)
        x, texts = leaves[0], leaves[1:]
        assert type(part.batch) is type(batch)
        assert torch.equal(x, rows(size, 3)[start : start + part.size])
        assert texts == names[start : start + part.size] * len(wrap)
        start += part.size
    assert start == size == size_of(batch)


def test_parts_are_views() -> None:
    x = rows(4, 2)
    parts = parts_of({"x": x}, 2)
    assert [part["x"].data_ptr() for part in parts] == [x.data_ptr(), x[2:].data_ptr()]


def test_one_micro_batch_is_the_batch_itself() -> None:
    batch = {"x": rows(4)}
    ((part, size),) = split(batch, 1)
    assert part is batch
    assert size == 4
    text = ["no tensor", {"at": "all"}]
    assert split(text, 1) == [MicroBatch(text, 1)]
    assert split(text, 1)[0].batch is text


def test_what_has_other_sizes_goes_everywhere() -> None:
    mask, temperature, note = torch.ones(3, 3), torch.tensor(0.5), object()
    batch = {"x": rows(4, 3), "mask": mask, "t": temperature, "k": 7, "s": "text", "note": note}
    for part in parts_of(batch, 2):
        assert part["mask"] is mask
        assert part["t"] is temperature
        assert part["note"] is note
        assert (part["k"], part["s"]) == (7, "text")


@pytest.mark.parametrize(
    "items",
    [
        ["a", "b", "c", "d"],
        (1, 2.5, 3, True),
        [None, "b", None, "d"],
        [{"k": "a"}, {"k": "b"}, {}, {"k": "d"}],
        [torch.zeros(7), torch.zeros(4), torch.zeros(3), torch.zeros(9)],  # one as long as B
        [torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(0, 4), torch.zeros(3, 4)],
        [{"boxes": torch.zeros(4, 2)}, {"boxes": torch.zeros(1, 2)}] * 2,
        [["a"], ["b", "c"], [], ["d"]],
    ],
    ids=str,
)
def test_lists_with_one_item_per_sample_are_sliced(items: Any) -> None:
    first, second = parts_of((rows(4), items), 2)
    assert type(first[1]) is type(items)
    assert list(map(id, first[1] + second[1])) == list(map(id, items))
    assert len(first[1]) == 2


@pytest.mark.parametrize(
    "items",
    [
        [rows(4), rows(4, 2), rows(4), rows(4)],
        (rows(4), "train", None, 3),
        [[1, 2, 3, 4], rows(4), rows(4), rows(4)],
        [list("abcd"), list("efgh"), list("ijkl"), list("mnop")],
        [{"a": rows(4)}, {"b": rows(4, 9), "mask": torch.ones(9)}, {"c": rows(4)}, {"d": rows(4)}],
    ],
    ids=["tensors", "mixed", "list and tensors", "lists", "dicts"],
)
def test_a_list_of_batched_values_is_a_container(items: Any) -> None:
    for part in parts_of({"x": rows(4), "items": items}, 2):
        assert len(part["items"]) == 4
        assert {len(x) for x in part["items"] if isinstance(x, list)} <= {2}
        assert {len(x) for x in flatten(part["items"])[0] if isinstance(x, Tensor)} <= {2, 9}


def test_the_outermost_list_is_a_container_even_where_its_length_is_the_batch() -> None:
    mask, names = torch.ones(3, 3), ["a", "b"]
    first, second = parts_of((rows(2, 3), mask), 2)
    assert (first[0].tolist(), first[1] is mask) == ([[0, 1, 2]], True)
    first, second = parts_of([names, {"x": rows(2, 3)}], 2)
    assert (second[0], second[1]["x"].tolist()) == (["b"], [[3, 4, 5]])


def test_what_the_default_collate_function_makes_is_cut_into_the_same_samples() -> None:
    samples = [(torch.full((2,), k), {"label": k, "name": f"n{k}"}) for k in range(5)]
    parts = parts_of(default_collate(samples), 2)
    for part, chosen in zip(parts, [samples[:3], samples[3:]], strict=True):
        alone = default_collate(chosen)
        assert torch.equal(part[0], alone[0])
        assert torch.equal(part[1]["label"], alone[1]["label"])
        assert part[1]["name"] == alone[1]["name"]


def test_arrays_are_cut_too() -> None:
    parts = parts_of((rows(4), np.arange(8).reshape(4, 2)), 2)
    assert [part[1].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_sparse_tensors_are_cut_and_nested_ones_refused() -> None:
    dense = torch.eye(4)
    parts = parts_of({"x": dense, "y": dense.to_sparse()}, 3)
    assert all(torch.equal(part["y"].to_dense(), part["x"]) for part in parts)
    nested = torch.nested.nested_tensor([dense[0], dense[1, :2]], layout=torch.jagged)
    with pytest.raises(StepError, match="of layout torch.jagged, which cannot be cut"):
        split({"x": dense[:2], "y": nested}, 2)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    num_microbatches=st.integers(1, 5),
    width=st.sampled_from([(), (3,)]),
    dtype=st.sampled_from([torch.float32, torch.int64]),
    in_order=st.booleans(),
)
def test_packed_sequences_are_cut_by_sequence(
    lengths: list[int], num_microbatches: int, width: Any, dtype: torch.dtype, in_order: bool
) -> None:
    lengths = sorted(lengths, reverse=True) if in_order else lengths
    sequences = [(100 * k + rows(n, *width)).to(dtype) for k, n in enumerate(lengths)]
    packed = pack_sequence(sequences, enforce_sorted=in_order)
    parts = split((packed, rows(len(lengths))), num_microbatches)
    assert size_of(packed) == len(lengths)
    for part in parts:
        cut, chosen = part.batch
        alone = pack_sequence([sequences[k] for k in chosen], enforce_sorted=in_order)
        assert type(cut) is PackedSequence
        for a, b in zip(cut, alone, strict=True):
            assert (a is None and b is None) or (torch.equal(a, b) and a.dtype == b.dtype)


def test_a_packed_sequence_of_another_number_of_sequences_is_refused() -> None:
    packed = pack_sequence([rows(3), rows(1)])  # of as many elements as there are samples
    with pytest.raises(
        StepError, match=r"batch\[0\] int64\[4\], batch\[1\] a PackedSequence of 2"
    ):
        split((rows(4), packed), 2)


# ---------------------------------------------------------------------- what tensors say together


def ragged(*sizes: int) -> list[Tensor]:
    return [rows(size, 3) for size in sizes]


def targets(*sizes: int) -> list[Any]:
    return [{"boxes": rows(size, 4), "labels": rows(size)} for size in sizes]


@pytest.mark.parametrize(
    ("batch", "size", "cut", "whole"),
    [
        ((ragged(5, 8, 9, 8), rows(4)), 4, ["batch[0]", "batch[1]"], []),
        ((rows(4), ragged(5, 8, 9, 8)), 4, ["batch[0]", "batch[1]"], []),
        ({"mask": rows(5, 5), "x": rows(8, 5, 3)}, 8, ["x"], ["mask"]),
        ({"x": rows(8, 5), "y": rows(8), "place": rows(5)}, 8, ["x", "y"], ["place"]),
        ({"x": rows(1, 5), "mask": rows(5, 5)}, 1, ["x"], ["mask"]),
        ({"x": rows(8, 5), "t": rows(1)}, 8, ["x"], ["t"]),
        ((tuple(ragged(4, 5, 6)), ("a", "b", "c")), 3, ["batch[0]", "batch[1]"], []),
        (
            (tuple([rows(3, 6, 6)] * 4), tuple(targets(1, 2, 0, 5))),
            4,
            ["batch[0]", "batch[1]"],
            [],
        ),
        (
            (tuple([rows(3, 6, 6)] * 4), tuple(targets(3, 3, 3, 3))),
            4,
            ["batch[0]", "batch[1]"],
            [],
        ),
        ((rows(2, 3, 6, 6), targets(2, 2)), 2, ["batch[0]", "batch[1]"], []),
        ({"x": rows(8, 3), "size": (224, 224)}, 8, ["x"], []),
    ],
    ids=str,
)
def test_all_tensors_tell_the_number_of_samples(
    batch: Any, size: int, cut: list[str], whole: list[str]
) -> None:
    reading = read(batch)
    assert (reading.size, *names(batch, reading)) == (size, cut, whole)


@pytest.mark.parametrize(
    "batch",
    [
        [[rows(2, 3), rows(2, 3)], rows(2)],  # two views of two samples
        {"left": [rows(8, 3), rows(8, 3)], "right": [rows(8, 3), rows(8, 3)]},
        [{"x": rows(8, 3)}, {"x": rows(8, 3)}],  # of two loaders
    ],
    ids=["views", "pairs of views", "loaders"],
)
def test_lists_of_batched_tensors_are_cut_inside(batch: Any) -> None:
    first, second = parts_of(batch, 2)
    sizes = [[len(x) for x in flatten(part)[0]] for part in (first, second)]
    assert sizes == [[len(x) // 2 for x in flatten(batch)[0]]] * 2


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"boxes": rows(2, 4), "img": rows(8, 8)}, r"boxes int64\[2, 4\], img int64\[8, 8\]"),
        ({"boxes": rows(0, 4), "img": rows(8, 8)}, r"boxes int64\[0, 4\], img"),
        ({"x": rows(8, 5, 3), "target": rows(31), "lens": rows(8)}, r"do not agree .* target"),
        ((rows(12, 8), rows(9, 8)), "dim 1 is 8 in all, so that it may be the batch"),
        ((rows(12, 8, 4), rows(8)), r"12 \(rows of batch\[0\]\) or 8 \(dim 1\) samples"),
        (ragged(4, 5, 6), "do not agree"),
        (
            (tuple([rows(9)] * 3), ("a", "b", "c")),
            r"9 \(rows of .*\) or 3 \(items of batch\[0\]\)",
        ),
        ((tuple([rows(9)] * 3), tuple([rows(1)[0]] * 3)), r"9 \(.*\) or 3 \("),
        ((tuple([rows(9)] * 3), tuple([rows(9)] * 3)), r"9 \(.*\) or 3 \(items of tuples\)"),
        ([(rows(3, 6, 6), 1)] * 8, r"3 \(.*\) or 8 \(its items\)"),
        ([{"x": rows(3, 6), "y": rows(1)[0]}] * 8, r"3 \(.*\) or 8 \(its items\)"),
        ({"few": [rows(8, 3), rows(8)], "many": [rows(24, 3), rows(24)]}, "do not agree"),
    ],
    ids=str,
)
def test_what_tensors_do_not_say_together_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(StepError, match=f"{said}.*; allowed: .* split_batch"):
        split(batch, 2)
    assert split(batch, 1)[0].batch is batch


def test_hugging_face_batches_keep_their_type() -> None:
    batch = BatchEncoding({"input_ids": rows(4, 5), "labels": rows(4), "text": list("abcd")})
    first, second = parts_of(batch, 2)
    assert type(first) is BatchEncoding
    assert torch.equal(second.input_ids, rows(4, 5)[2:])
    assert second["text"] == ["c", "d"]
    out = parts_of(CausalLMOutputWithPast(logits=rows(4, 5), hidden_states=(rows(4), rows(4))), 2)
    assert torch.equal(out[1]["logits"], rows(4, 5)[2:])
    assert out[1].logits is out[1]["logits"]
    assert out[1].loss is None
    assert len(out[1].hidden_states) == 2


def test_what_a_tokenizer_made_keeps_the_encodings_of_its_samples() -> None:
    words = tokenizers.models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="?", pad_token="?"
    )
    batch = tokenizer(["a", "b", "c"], return_tensors="pt")
    first, second = parts_of(batch, 2)
    assert [first.tokens(0), first.tokens(1), second.tokens(0)] == [["a"], ["b"], ["?"]]
    leaves, structure = flatten(second)
    sent = [x if isinstance(x, Tensor) else leaf_from_data(leaf_to_data(x)) for x in leaves]
    assert unflatten(structure, sent).word_ids(0) == second.word_ids(0) == [0]


def test_a_key_named_shape_is_no_shape() -> None:
    first, _ = parts_of(BatchEncoding({"x": rows(4), "shape": (9, 9)}), 2)
    assert (len(first["x"]), first["shape"]) == (2, (9, 9))
    first, _ = parts_of(Image(rows(4), (4, 3)), 2)
    assert (len(first.x), first.shape) == (2, (4, 3))


def test_micro_batches_do_not_share_containers() -> None:
    first, second = parts_of({"x": rows(4), "log": {"k": 1}}, 2)
    first["log"]["k"] = 2
    assert second["log"] == {"k": 1}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_an_empty_batch_is_refused(num_microbatches: int) -> None:
    with pytest.raises(StepError, match=r"no samples: its first tensor is int64\[0, 3\]; allowed"):
        split({"x": rows(0, 3)}, num_microbatches)


def test_a_batch_without_a_tensor_is_refused() -> None:
    for batch in (["a", "b"], {"t": torch.tensor(1.0)}, None):
        with pytest.raises(StepError, match=f"{type(batch).__name__} holds no tensor with a dim"):
            split(batch, 2)
        assert size_of(batch) == 1


def test_a_batch_that_contains_itself_is_refused() -> None:
    batch: list[Any] = [rows(4)]
    batch.append(batch)
    with pytest.raises(StepError, match="contains itself"):
        split(batch, 2)


def test_signatures_tell_structure_shapes_dtypes_and_numbers() -> None:
    batch = (rows(4, 2), {"a": torch.zeros(3).half(), "b": [1, True, None]}, "some text", 0.3)
    assert signature(batch) == (
        "tuple(int64[4, 2], dict['a', 'b'](float16[3], list(1, True, None)), str, float)"
    )
    assert signature((rows(4, 2) + 1, batch[1], "other text", 0.4)) == signature(batch)
    for other in (rows(3, 2), rows(4, 2).float(), [rows(4, 2)], {"x": rows(4, 2)}, None):
        assert signature((other, *batch[1:])) != signature(batch)


def test_signatures_tell_only_the_types_of_what_differs_from_sample_to_sample() -> None:
    batch = {"x": rows(3), "length": [4, 9, None], "size": (224, 224), "k": [{"n": 1}, {"n": 2}]}
    assert signature(batch) == (
        "dict['x', 'length', 'size', 'k']"
        "(int64[3], list of 3 of NoneType | int, tuple(224, 224), "
        "list(dict['n'](1), dict['n'](2)))"
    )
    assert signature({"x": rows(3), "length": [1, None, 3]}) == signature(
        {"x": rows(3), "length": [7, 8, None]}
    )


def test_signatures_hold_no_addresses() -> None:
    class Thing:
        pass

    name = "test_split.test_signatures_hold_no_addresses.<locals>.Thing"
    assert signature((Thing(), b"bytes", 10**60)).endswith(f"{name}, bytes, int)")
    assert signature(map_tensors(torch.clone, [rows(2)])) == signature([rows(2)])


def test_signatures_are_alike_on_every_process() -> None:
    code = (
        "import torch; from lightning_cyclic.runtime.values.split import signature;"
        "print(signature(({'b', 'a', 'c'}, {'x': torch.zeros(2), frozenset('xyz'): 3})))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert "float32[2]" in texts.pop()
