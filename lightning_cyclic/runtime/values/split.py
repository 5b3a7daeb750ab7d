"""Cut a batch into micro-batches along dim 0, whatever containers it is made of.

    (x of 5 rows, {"name": list of 5, "scale": 0.1})   cut in 2
        (rows 0-2, {"name": items 0-2, "scale": 0.1}), (rows 3-4, {"name": items 3-4, ...})

What is cut, and what goes to every micro-batch whole: :mod:`reading`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.values.reading import (
    Mark,
    Reading,
    has_tensor,
    is_per_sample,
    num_rows,
    read,
    size_of,
    text_of,
    with_rows,
)
from lightning_cyclic.runtime.values.trees import (
    flatten,
    labels,
    open_value,
    unflatten,
)

_LONGEST_REPR = 40
_SHOWN = frozenset({
    type(None), bool, int, complex, torch.Size, torch.dtype, torch.device, type(...)
})  # fmt: skip


class MicroBatch(NamedTuple):
    """Be a part of a batch.

    Args:
        batch: of the type of the whole batch.
    """

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
