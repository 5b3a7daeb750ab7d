"""Unseen changes: tensors are changed in place, and autograd does not count it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


def unseen(tensors: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return a context whose changes of tensors in place go unnoticed by graphs that hold them."""
    held = tuple(tensors)
    try:
        return _unsafe_preserve_version_counter(held)
    except AttributeError:  # torch 2.6 takes one tensor at a time
        each = ExitStack()
        for x in held:
            each.enter_context(_unsafe_preserve_version_counter(x))
        return each
