"""Cut a batch into micro-batches along dim 0, whatever containers it is made of.

    (x of 5 rows, {"name": list of 5, "scale": 0.1})   cut in 2
        (rows 0-2, {"name": items 0-2, "scale": 0.1}), (rows 3-4, {"name": items 3-4, ...})

What is cut, and what goes to every micro-batch whole, all tensors have a say in:

    {"x": [8, 5], "name": list of 8, "mask": [5, 5], "scale": 0.1}     8 samples
         rows        items               whole            plain

A number of samples explains a batch if each tensor has as many rows, lies in a list with one item
per sample, or has no size but 1 and those of later dims of the tensors with rows: a mask [T, T]
beside x [B, T, C]. One that no number explains is refused by name, and so is one that two
explain, as a tuple of 16 sounds of 100 values beside a tuple of 16 words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.values.trees import (
    flatten,
    labels,
    open_value,
    unflatten,
)

_MOST_NAMED = 8


class Mark(NamedTuple):
    """Say what becomes of a value when its batch is cut; equal for batches of one make.

    Args:
        how: "rows" are cut in dim 0, "items" as a list is; "whole" is a tensor and "plain"
            anything else that every micro-batch gets as it is; "open" is a container.
    """

    how: Literal["rows", "items", "whole", "plain", "open"]
    parts: tuple[Mark, ...] = ()


class Reading(NamedTuple):
    """Say how many samples a batch has, and where."""

    size: int
    mark: Mark


def read(batch: Any) -> Reading:
    """Find the one number of samples that explains a batch.

    Raises:
        StepError: for a batch without samples, and one that no number explains, or several.
    """
    found = _readings(batch)
    if not found:
        raise _no_samples(batch) or _unexplained(batch)
    for reading in found:
        if reading.size == 1:  # whatever else it may be: nothing is cut
            return reading
    numbers = [_evidence(batch, reading) for reading in found]
    if len(found) == 1:
        (reading,) = found
        marked = [(x, mark.how) for _, x, mark in _marked(batch, reading.mark)]
        numbers += [_second_axis(marked) or _zipped(batch, reading) or _listed(batch, reading)]
    if len(numbers := [x for x in numbers if x]) > 1:
        raise StepError(
            f"a batch may have {' or '.join(numbers)} samples: {_told(batch)}; {_ALLOWED}"
        )
    return found[0]


def size_of(batch: Any) -> int:
    """Return the number of samples; rows of the first tensor where that is not clear, else 1.

    Raises:
        StepError: for a batch without samples.
    """
    found = _readings(batch)
    if len(found) == 1:
        return found[0].size
    if error := _no_samples(batch):
        raise error
    return next((n for _, x in with_rows(batch) if (n := num_rows(x))), 1)


def has_tensor(batch: Any) -> bool:
    flatten(batch)  # refuses a batch that contains itself
    return any(isinstance(x, Tensor | PackedSequence) for _, x in with_rows(batch))


def names(batch: Any, reading: Reading) -> tuple[list[str], list[str]]:
    """Return what of a batch is cut, and which tensors are copied whole.

    Example:
        >>> import torch
        >>> batch = {"x": torch.ones(8, 5), "name": ["a"] * 8, "mask": torch.ones(5, 5), "k": 3}
        >>> names(batch, read(batch))
        (['x', 'name'], ['mask'])
    """
    named = [(_name(place), mark.how) for place, _, mark in _marked(batch, reading.mark)]
    cut = [name for name, how in named if how in ("rows", "items")]
    return cut, [name for name, how in named if how == "whole"]


def num_rows(value: Any) -> int | None:
    """Return the length along the batch of tensors, packed sequences and arrays, else None."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, list | tuple | dict) or not hasattr(type(value), "shape"):
        return None
    shape = value.shape
    return int(shape[0]) if isinstance(shape, tuple) and shape else None


# ---------------------------------------------------------------------- numbers that explain


def _mark_of(value: Any, size: int, *, outermost: bool = True) -> Mark:
    """Say what becomes of a value if there are so many samples; a batch is no list of them."""
    rows = num_rows(value)
    if rows is not None:
        return Mark("rows" if rows == size else "whole")
    if not outermost and is_per_sample(value, size):
        return Mark("items")
    structure, children = open_value(value)
    if structure.kind is None:
        return Mark("plain")
    return Mark("open", tuple(_mark_of(child, size, outermost=False) for child in children))


def is_per_sample(items: Any, size: int) -> bool:
    """Say whether a list holds one item per sample, rather than batched values.

    Samples of varying length may happen to have as many rows as the batch, so that one batched
    item is no proof: a list of things of one kind, not all batched, is per sample, and so is one
    of dicts with the same keys (the boxes and labels of each image).
    """
    if type(items) not in (list, tuple) or len(items) != size:
        return False
    batched = [_is_batched(item, size) for item in items]
    if not any(batched) or _are_records(items):
        return True
    return not all(batched) and len({_kind(item) for item in items}) == 1


def _is_batched(value: Any, size: int) -> bool:
    if num_rows(value) is not None:
        return num_rows(value) == size
    if type(value) in (list, tuple) and len(value) == size:
        return True
    return any(_is_batched(child, size) for child in open_value(value)[1])


def _are_records(items: Any) -> bool:
    """Say whether a list holds dicts with the same keys, and tensors in them."""
    return (
        len(items) > 1
        and all(isinstance(item, Mapping) for item in items)
        and len({tuple(item) for item in items}) == 1
        and bool(with_rows(items[0]))
    )


def _readings(batch: Any) -> list[Reading]:
    """Return every number of samples that explains a batch, with what it makes of it."""
    flatten(batch)  # refuses a batch that contains itself
    sizes = dict.fromkeys([n for _, x in with_rows(batch) if (n := num_rows(x))])
    lengths = dict.fromkeys(n for n in _lengths(batch) if n > 1) if sizes else {}
    found, decided = [], []
    for size in sizes | lengths:
        reading = Reading(size, _mark_of(batch, size))
        marked = [(x, mark.how) for _, x, mark in _marked(batch, reading.mark)]
        items = [x for x, how in marked if how == "items"]
        has_rows = any(how == "rows" for _, how in marked)
        if not _explains(marked) or not (has_rows or _is_zip(items)):
            continue
        found.append(reading)
        if not has_rows and any(map(_are_records, items)):
            decided.append(reading)
    return decided or found


def _explains(marked: Sequence[tuple[Any, str]]) -> bool:
    """Say whether all tensors that are copied whole have sizes of later dims of those cut."""
    later = {1}.union(*(x.shape[1:] for x, how in marked if how == "rows" and _has_dims(x)))
    wholes = [x for x, how in marked if how == "whole"]
    return all(_has_dims(x) and later.issuperset(x.shape) for x in wholes)


def _is_zip(lists: list[Any]) -> bool:
    """Say whether lists are those of zip(*samples), beside which no tensor has rows.

    Batches of several loaders may lie in lists, too: one must hold what no loader collates.
    """
    return len(lists) > 1 and any(
        _are_records(items) or not any(map(with_rows, items)) for items in lists
    )


def _second_axis(marked: Sequence[tuple[Any, str]]) -> str:
    """Return what dim 1 says where the batch may just as well lie along it.

    A tensor of T, B and F values beside one of B is cut right if its first dim is time. A square
    mask [T, T] says nothing.
    """
    if any(how == "items" or isinstance(x, PackedSequence) for x, how in marked):
        return ""
    cut = [x.shape for x, how in marked if how == "rows"]
    seconds = {shape[1] if len(shape) > 1 else None for shape in cut}
    for x, how in marked:
        is_square = how == "whole" and x.ndim > 1 and x.shape[0] == x.shape[1]
        if how == "whole" and not is_square and x.shape[0] > 1 and seconds == {x.shape[0]}:
            return f"{x.shape[0]} (dim 1)"
    return ""


def _zipped(batch: Any, reading: Reading) -> str:
    """Return the length of the tuples in a tuple of them, as zip(*samples) makes one.

    All their tensors may have as many rows, as channels of images, or values of sounds.
    """
    if type(batch) is not tuple or reading.mark.how != "open" or len(batch) < 2:
        return ""
    lengths = {len(x) if type(x) is tuple else 0 for x in batch}
    if len(lengths) > 1 or lengths & {0, 1} or any(m.how != "open" for m in reading.mark.parts):
        return ""
    alike = all(len({_kind(item, exactly=True) for item in items}) == 1 for items in batch)
    return f"{lengths.pop()} (items of tuples)" if alike else ""


def _listed(batch: Any, reading: Reading) -> str:
    """Return the length of a list of samples that nothing has collated.

    Each has a part that is no batch of anything: a number, a text, a tensor without dims.
    """
    parts = reading.mark.parts
    if type(batch) not in (list, tuple) or len(batch) < 2 or len(set(parts)) > 1:
        return ""
    are_samples = all(type(x) is tuple or isinstance(x, Mapping) for x in batch)
    return f"{len(batch)} (its items)" if are_samples and Mark("plain") in parts[0].parts else ""


# ---------------------------------------------------------------------- parts of a batch


def with_rows(value: Any) -> list[tuple[str, Any]]:
    marked = _marked(value, _mark_of(value, -1))  # no list has -1 items
    return [(place, x) for place, x, mark in marked if mark.how == "whole"]


def _marked(value: Any, mark: Mark, place: str = "") -> Iterator[tuple[str, Any, Mark]]:
    if mark.how != "open":
        yield place, value, mark
        return
    structure, children = open_value(value)
    for label, child, part in zip(labels(structure), children, mark.parts, strict=True):
        yield from _marked(child, part, place + label)


def _lengths(value: Any) -> Iterator[int]:
    """Yield those of the outermost lists and tuples within a batch."""
    if num_rows(value) is None:
        for child in open_value(value)[1]:
            if type(child) in (list, tuple):
                yield len(child)
            else:
                yield from _lengths(child)


def _kind(item: Any, *, exactly: bool = False) -> Any:
    if not _has_dims(item):
        return type(item)
    return (item.dtype, tuple(item.shape)) if exactly else (item.dtype, item.ndim)


def _has_dims(x: Any) -> bool:
    return num_rows(x) is not None and not isinstance(x, PackedSequence) and hasattr(x, "ndim")


def _name(place: str) -> str:
    """Name a place as its user does: batch["x"] is x."""
    is_key = place.startswith("['") and place.endswith("']") and place.count("[") == 1
    return place[2:-2] if is_key else f"batch{place}"


# ---------------------------------------------------------------------- refusals

_ALLOWED = (
    "allowed: tensors whose dim 0 is the batch, lists with one item per sample beside them, and "
    "tensors of the sizes of later dims, as a mask [T, T] beside x [B, T, C], which are copied "
    "whole; say how it is cut in the module's or datamodule's split_batch(batch, "
    "num_microbatches), or use num_microbatches=1"
)


def _no_samples(batch: Any) -> StepError | None:
    found = with_rows(batch)
    if not found or any(num_rows(x) for _, x in found):
        return None
    return StepError(
        f"the batch holds no samples: its first tensor is {text_of(found[0][1])}; allowed: at "
        "least one sample; use drop_last=True, or leave empty batches out of the data"
    )


def _unexplained(batch: Any) -> StepError:
    shapes = [x.shape for _, x in with_rows(batch) if _has_dims(x)]
    seconds = {shape[1] for shape in shapes if len(shape) > 1}
    hint = ""
    if len(seconds) == 1 and sum(len(shape) > 1 for shape in shapes) > 1:
        hint = f"; dim 1 is {seconds.pop()} in all, so that it may be the batch"
    return StepError(
        f"the tensors of a batch do not agree about its number of samples: {_told(batch)}{hint}; "
        f"{_ALLOWED}"
    )


def _evidence(batch: Any, reading: Reading) -> str:
    marked = ((place, mark.how) for place, _, mark in _marked(batch, reading.mark))
    place, how = next((place, how) for place, how in marked if how in ("rows", "items"))
    return f"{reading.size} ({how} of {_name(place)})"


def _told(batch: Any) -> str:
    found = [f"{_name(place)} {text_of(x)}" for place, x in with_rows(batch)]
    more = [f"and {len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []
    told, kind = ", ".join([*found[:_MOST_NAMED], *more]), type(batch)
    plain = kind in (list, tuple, dict)
    return told if plain else f"{told} in a {kind.__module__}.{kind.__qualname__}"


def text_of(x: Any) -> str:
    if isinstance(x, PackedSequence):
        return f"a PackedSequence of {num_rows(x)}"
    return f"{str(getattr(x, 'dtype', type(x).__name__)).removeprefix('torch.')}{list(x.shape)}"


_LONGEST_REPR = 40
_SHOWN = frozenset({
    type(None), bool, int, complex, torch.Size, torch.dtype, torch.device, type(...)
})  # fmt: skip


class MicroBatch(NamedTuple):
    """Be a part of a batch."""

    batch: Any
    size: int


def split(batch: Any, num_microbatches: int, reading: Reading | None = None) -> list[MicroBatch]:
    """Cut a batch into micro-batches whose sizes differ by one at most, larger ones first.

    Args:
        batch: any containers of tensors that agree about the number of samples. Cut are tensors
            with as many rows, packed sequences of as many sequences, and lists and tuples with one
            item per sample. A list of tensors that all have as many rows is a container of them.
            Everything else is replicated.
        num_microbatches: number of micro-batches, at least 1.
        reading: of the batch. [as :func:`read` finds it]

    Returns:
        ``num_microbatches`` micro-batches, fewer (of one sample each) where there are fewer
        samples. Dense tensors are views. For ``num_microbatches=1`` the batch is the very object
        that was given.

    Raises:
        StepError: for a batch without samples, without a tensor that tells how many, with tensors
            that do not agree, or with one that torch cannot cut (nested ones).

    Example:
        >>> import torch
        >>> [part.batch.tolist() for part in split(torch.arange(5), 2)]
        [[0, 1, 2], [3, 4]]
    """
    assert num_microbatches >= 1, num_microbatches
    if num_microbatches == 1:
        return [MicroBatch(batch, size_of(batch))]
    size, mark = reading or read_to_cut(batch, num_microbatches)
    base, larger = divmod(size, min(size, num_microbatches))
    sizes = [base + (i < larger) for i in range(min(size, num_microbatches))]
    return list(map(MicroBatch, _Cutter(size, sizes).cut(batch, mark), sizes))


def read_to_cut(batch: Any, num_microbatches: int) -> Reading:
    """Find how a batch is cut into several micro-batches.

    Raises:
        StepError: as :func:`split`.
    """
    if not has_tensor(batch):
        raise StepError(
            f"a batch of type {_type_name(type(batch))} holds no tensor with a dim, so that it "
            f"cannot be cut into {num_microbatches} micro-batches; allowed: batches with a "
            "tensor whose "
            "dim 0 is the batch; return one from the collate function, or use num_microbatches=1"
        )
    return read(batch)


def signature(batch: Any) -> str:
    """Describe what two batches of the same kind have in common, alike on every process.

    Containers, shapes and dtypes of tensors, and short plain values. Of what differs from batch
    to batch only the type: text, floats (mixup's share, say), and numbers in a list with one
    item per sample.

    Example:
        >>> import torch
        >>> signature({"x": torch.zeros(2, 3), "name": "ann", "k": 4})
        "dict['x', 'name', 'k'](float32[2, 3], str, 4)"
    """
    flatten(batch)  # refuses a batch that contains itself
    found = with_rows(batch)
    return _text(batch, num_rows(found[0][1]) or 0 if found else 0, outermost=True)


def refuse_iterators(batch: Any) -> None:
    """Refuse an iterator in the place of a batch.

    Raises:
        StepError: with what to do.
    """
    if isinstance(batch, Iterator):
        raise StepError(
            f"a batch is an iterator ({type(batch).__name__}), from which every stage would take "
            "for itself; allowed: batches of tensors; use list(...) where the batch is made"
        )


def family(batch: Any) -> str:
    """Describe a batch without its sizes."""
    leaves, structure = flatten(batch)
    kinds = [f"{x.dtype}{x.dim()}" if isinstance(x, Tensor) else type(x).__name__ for x in leaves]
    return f"{structure.kind} {len(leaves)} {' '.join(kinds)}"


class _Cutter:
    """Cut every part of one batch at the same samples."""

    def __init__(self, size: int, sizes: Sequence[int]) -> None:
        self._size = size
        self._ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]

    def cut(self, value: Any, mark: Mark) -> list[Any]:
        if mark.how == "rows":
            if isinstance(value, PackedSequence):
                return self._cut_packed(value)
            if isinstance(value, Tensor):
                return self._cut_tensor(value)
        if mark.how in ("rows", "items"):
            return self._slices(value)
        if mark.how != "open":
            return [value] * len(self._ends)
        structure, children = open_value(value)
        parts = list(map(self.cut, children, mark.parts))
        return [unflatten(structure, [part[i] for part in parts]) for i in range(len(self._ends))]

    def _slices(self, rows: Any) -> list[Any]:
        starts = [0, *self._ends[:-1]]
        return [rows[a:b] for a, b in zip(starts, self._ends, strict=True)]

    def _cut_tensor(self, x: Tensor) -> list[Any]:
        if x.layout is torch.strided:
            return list(x.tensor_split(self._ends[:-1]))
        if x.layout is torch.sparse_coo:
            rows = torch.arange(self._size, device=x.device)
            return [x.index_select(0, part) for part in self._slices(rows)]
        raise StepError(
            f"the batch holds {text_of(x)} of layout {x.layout}, which cannot be cut into "
            "micro-batches; allowed: dense tensors, and sparse ones by coordinates; convert it in "
            "the collate function, or use num_microbatches=1"
        )

    def _cut_packed(self, packed: PackedSequence) -> list[Any]:
        """Pack the sequences of each part anew, in their order before sorting."""
        padded, lengths = pad_packed_sequence(packed, batch_first=True)
        is_sorted = packed.sorted_indices is None
        return [
            pack_padded_sequence(rows, part, batch_first=True, enforce_sorted=is_sorted)
            for rows, part in zip(self._slices(padded), self._slices(lengths), strict=True)
        ]


def _text(value: Any, size: int, *, outermost: bool = False) -> str:
    structure, children = open_value(value)
    kind = _type_name(type(value))
    if structure.kind is None or isinstance(value, PackedSequence):
        return _leaf_text(value)
    is_list = not outermost and is_per_sample(value, size)
    if is_list and all(open_value(x)[0].kind is None for x in children):
        held = {_leaf_text(x) if isinstance(x, Tensor) else _type_name(type(x)) for x in children}
        return f"{kind} of {len(children)} of {' | '.join(sorted(held))}"
    keys = ", ".join(label.strip(".[]") for label in labels(structure))
    is_shown = type(value) not in (list, tuple) and not set("<{") & set(keys)  # addresses, sets
    named = f"[{keys}]" if is_shown else ""
    return f"{kind}{named}({', '.join(_text(child, size) for child in children)})"


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, Tensor | PackedSequence):
        return text_of(leaf)
    text = repr(leaf) if type(leaf) in _SHOWN else str(leaf) if isinstance(leaf, Enum) else ""
    return text if 0 < len(text) <= _LONGEST_REPR else _type_name(type(leaf))


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
