"""Unread tensors: what lies in a checkpoint's files, until somebody uses its values.

An unread tensor knows shape and dtype. Each operation on it reads the values anew and keeps none,
so that loading a module needs memory for one tensor beside it; and who copies it nowhere, as a
rank does with the stages of others, reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override


@final
class UnreadTensor(Tensor):
    """Stand for a tensor of the host that is read where it is used."""

    _read: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> UnreadTensor:
        """Make one of what is read."""
        made: UnreadTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made._read = read
        return made

    @override
    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"UnreadTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = tree_map_only(UnreadTensor, lambda x: x._read(), (args, kwargs or {}))
        return func(*args, **kwargs)
