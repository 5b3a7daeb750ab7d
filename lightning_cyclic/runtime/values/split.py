"""Cut a batch into micro-batches along dim 0, whatever containers it is made of.

    (x of 5 rows, {"name": list of 5, "scale": 0.1})   cut in 2
        (rows 0-2, {"name": items 0-2, "scale": 0.1}), (rows 3-4, {"name": items 3-4, ...})

What has as many rows as the batch is cut, everything else goes to every micro-batch whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.values.trees import (
    close_value,
    flatten,
    open_value,
)

_LONGEST_REPR = 40
_SHOWN = frozenset({
    type(None), bool, int, complex, torch.Size, torch.dtype, torch.device, type(...)
})  # fmt: skip


class MicroBatch(NamedTuple):
    """Be a part of a batch.

    Args:
        batch: of the type of the whole batch.
        size: number of its samples.
    """

    batch: Any
    size: int


def split(batch: Any, num_micro: int) -> list[MicroBatch]:
    """Cut a batch into micro-batches whose sizes differ by one at most, larger ones first.

    Args:
        batch: any containers of tensors; the first tensor with a dim tells the number of samples
            (Lightning's rule). Cut are tensors with as many rows, packed sequences of as many
            sequences, and lists and tuples with one item per sample. A list of tensors that all
            have as many rows is a container of them. Everything else is replicated.
        num_micro: number of micro-batches, at least 1.

    Returns:
        ``num_micro`` micro-batches, fewer (of one sample each) where there are fewer samples.
        Dense tensors are views. For ``num_micro=1`` the batch is the very object that was given.

    Raises:
        StepError: for a batch without samples, without a tensor that tells how many, or with a
            tensor that torch cannot cut (nested ones).

    Example:
        >>> import torch
        >>> [part.batch.tolist() for part in split(torch.arange(5), 2)]
        [[0, 1, 2], [3, 4]]
    """
    assert num_micro >= 1, num_micro
    spine, size = _spine(batch)
    if num_micro == 1:
        return [MicroBatch(batch, size)]
    if not spine:
        raise StepError(
            f"a batch of type {_type_name(type(batch))} holds no tensor with a dim, so that it "
            f"cannot be cut into {num_micro} micro-batches; allowed: batches with a tensor whose "
            "dim 0 is the batch; return one from the collate function, or use num_micro=1"
        )
    base, larger = divmod(size, min(size, num_micro))
    sizes = [base + (i < larger) for i in range(min(size, num_micro))]
    cutter = _Cutter(size, sizes, frozenset(map(id, spine)))
    return list(map(MicroBatch, cutter.cut(batch), sizes))


def can_be_cut(batch: Any) -> bool:
    """Say whether there is a tensor that tells how many samples there are."""
    return bool(_spine(batch)[0])


def size_of(batch: Any) -> int:
    """Return the number of samples: dim 0 of the first tensor that has one, 1 without any.

    Raises:
        StepError: for a batch without samples.
    """
    return _spine(batch)[1]


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
    spine = _descend(batch)
    size = _num_rows(spine[-1]) if spine else None
    return _text(batch, _Cutter(size or 0, (), frozenset(map(id, spine))))


def family(batch: Any) -> str:
    """Describe a batch without its sizes."""
    leaves, structure = flatten(batch)
    kinds = [f"{x.dtype}{x.dim()}" if isinstance(x, Tensor) else type(x).__name__ for x in leaves]
    return f"{structure.kind} {len(leaves)} {' '.join(kinds)}"


class _Cutter:
    """Cut every part of one batch at the same samples."""

    def __init__(self, size: int, sizes: Sequence[int], spine: frozenset[int]) -> None:
        self._size = size
        self._ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self._spine = spine  # ids of the containers of the first tensor: it is a whole batch
        self._num_micro = len(sizes)

    def cut(self, value: Any) -> list[Any]:
        """Return one part per micro-batch."""
        num_rows = _num_rows(value)
        if num_rows == self._size:
            if isinstance(value, PackedSequence):
                return self._cut_packed(value)
            if isinstance(value, Tensor):
                return self._cut_tensor(value)
            return self._slices(value)  # arrays
        if self.is_per_sample(value):
            return self._slices(value)
        structure, children = open_value(value)
        if structure.kind is None or num_rows is not None:
            return [value] * self._num_micro
        parts = [self.cut(child) for child in children]
        return [
            close_value(structure, [part[i] for part in parts]) for i in range(self._num_micro)
        ]

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
            f"the batch holds {_leaf_text(x)} of layout {x.layout}, which cannot be cut into "
            "micro-batches; allowed: dense tensors, and sparse ones by coordinates; convert it in "
            "the collate function, or use num_micro=1"
        )

    def _cut_packed(self, packed: PackedSequence) -> list[Any]:
        """Pack the sequences of each part anew, in their order before sorting."""
        padded, lengths = pad_packed_sequence(packed, batch_first=True)
        is_sorted = packed.sorted_indices is None
        return [
            pack_padded_sequence(rows, part, batch_first=True, enforce_sorted=is_sorted)
            for rows, part in zip(self._slices(padded), self._slices(lengths), strict=True)
        ]

    def is_per_sample(self, items: Any) -> bool:
        """Say whether a list holds one item per sample, rather than batched values.

        Samples of varying length may happen to have as many rows as the batch, so that one
        batched item is no proof: a list of things of one type, not all batched, is per sample.
        """
        if (
            type(items) not in (list, tuple)
            or len(items) != self._size
            or id(items) in self._spine
        ):
            return False
        batched = [self._is_batched(item) for item in items]
        if not all(batched) and any(batched):
            return len(set(map(type, items))) == 1
        return not any(batched)

    def _is_batched(self, value: Any) -> bool:
        if _num_rows(value) is not None:
            return _num_rows(value) == self._size
        if type(value) in (list, tuple) and len(value) == self._size:
            return True
        return any(map(self._is_batched, open_value(value)[1]))


def _spine(batch: Any) -> tuple[list[Any], int]:
    """Return the values from the batch down to the first tensor with a dim, and its rows."""
    flatten(batch)  # refuses a batch that contains itself
    spine = _descend(batch)
    size = _num_rows(spine[-1]) if spine else 1
    assert size is not None, "a tensor with a dim has rows"
    if size == 0:
        raise StepError(
            f"the batch holds no samples: its first tensor is {_leaf_text(spine[-1])}; allowed: "
            "at least one sample; use drop_last=True, or leave empty batches out of the data"
        )
    return spine, size


def _descend(value: Any) -> list[Any]:
    if isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.dim() > 0):
        return [value]
    for child in open_value(value)[1]:
        if found := _descend(child):
            return [value, *found]
    return []


def _num_rows(value: Any) -> int | None:
    """Return the length along the batch of tensors, packed sequences and arrays, else None."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, list | tuple | dict) or not hasattr(type(value), "shape"):
        return None
    shape = value.shape
    return int(shape[0]) if isinstance(shape, tuple) and shape else None


def _text(value: Any, cutter: _Cutter) -> str:
    structure, children = open_value(value)
    if structure.kind is None:
        return _leaf_text(value)
    kind = _type_name(structure.kind)
    if cutter.is_per_sample(value) and all(open_value(x)[0].kind is None for x in children):
        held = {_leaf_text(x) if isinstance(x, Tensor) else _type_name(type(x)) for x in children}
        return f"{kind} of {len(children)} of {' | '.join(sorted(held))}"
    keys = f"[{', '.join(map(_key_text, structure.keys))}]" if structure.keys else ""
    return f"{kind}{keys}({', '.join(_text(child, cutter) for child in children)})"


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, PackedSequence):
        return f"a PackedSequence of {_num_rows(leaf)}"
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    text = repr(leaf) if type(leaf) in _SHOWN else str(leaf) if isinstance(leaf, Enum) else ""
    return text if 0 < len(text) <= _LONGEST_REPR else _type_name(type(leaf))


def _key_text(key: Any) -> str:
    if type(key) is tuple:
        return f"({', '.join(map(_key_text, key))})"
    if isinstance(key, type):
        return _type_name(key)
    return repr(key) if type(key) in _SHOWN or type(key) is str else _type_name(type(key))


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
