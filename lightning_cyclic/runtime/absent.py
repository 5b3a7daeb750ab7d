"""Absent tensors: what another worker has, until somebody reads it.

An absent parameter or buffer keeps its place in the module, its shape and dtype, and one element
of memory. Code that asks for more than these, a hook or a callback between steps, makes its
*home* fetch what is absent first, and then finds what it would find on a single device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.runtime.partial_step.ghosts import Ghost, tensors_in
from lightning_cyclic.runtime.torch_functions import (
    callers,
    is_move,
    module_of,
    moves_nothing,
    reads_metadata,
)

_HOME = "_cyclic_home"  # on an absent tensor: (its home, its name, what it was)
_NOWHERE = (None, "", None)
_ASKS_NOTHING = frozenset(
    {"__set__", "__delete__", "data_ptr", "untyped_storage"}
    | {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
)
_MANAGES_GRADIENTS = (
    "torch.", "lightning_cyclic.", "lightning.fabric.", "lightning_fabric.",
    *(f"{host}.{part}." for host in ("lightning.pytorch", "pytorch_lightning")
      for part in ("plugins", "strategies")),
)  # fmt: skip
_GRAD: Any = Tensor.grad
_MODULE = "torch.nn.modules.module"


class Home(Protocol):
    """Be who knows where absent tensors are."""

    def read(self, names: Sequence[str]) -> None:
        """Make absent tensors present, whose values one operation reads; or refuse."""

    def read_gradient(self, name: str) -> None:
        """Refuse that a gradient is read, unless an optimizer only looks whether there is one."""


class _Absent(Tensor):
    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is _GRAD:  # optimizers ask each parameter for it
            if func.__name__ == "__get__":
                _read_gradient(args[0], callers())
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if Ghost in types:
            return NotImplemented  # a step is run one stage at a time: ghosts know how
        kwargs = kwargs or {}
        if moves_nothing(func, args, kwargs):
            return args[0]
        if is_move(func) and module_of(next(callers())) == _MODULE:
            return _moved(func, args[0], args[1:], kwargs)
        if _is_taken(func, args):
            return args[0]
        if not (reads_metadata(func) or func.__name__ in _ASKS_NOTHING):
            make_present(*tensors_in(args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @override
    def __deepcopy__(self, memo: Any) -> Any:
        with _as_it_was(self):
            return self.__deepcopy__(memo)

    @override
    def __reduce_ex__(self, proto: Any) -> Any:
        with _as_it_was(self):
            return self.__reduce_ex__(proto)


@final
class AbsentParameter(_Absent, nn.Parameter):
    """Stand for a parameter that another worker has."""


@final
class AbsentBuffer(_Absent):
    """Stand for a buffer that another worker's steps change."""


def leave(x: Tensor, name: str, home: Home) -> None:
    """Let a tensor be absent: the object itself, as optimizers and hooks hold it, too.

    It takes another class, as torch's lazy parameters do when they get their values.
    """
    home_and_kind = (home, name, getattr(x, _HOME, (None, "", type(x)))[2])
    x.__class__ = AbsentParameter if isinstance(x, nn.Parameter) else AbsentBuffer
    setattr(x, _HOME, home_and_kind)


def come_back(x: Tensor) -> None:
    """Let it be what it was; its values are for others to give."""
    if isinstance(x, _Absent):
        kind: Any = getattr(x, _HOME)[2]
        x.__class__ = kind
        delattr(x, _HOME)


@contextmanager
def _as_it_was(x: Tensor) -> Iterator[None]:
    """Run the body, which copies a tensor, with its values and without its home."""
    home, name, _ = getattr(x, _HOME)
    home.read([name])
    is_hidden = home_of(x) is not None  # a home that had nothing to fetch: values are here
    come_back(x)
    try:
        yield
    finally:
        if is_hidden:
            leave(x, name, home)


def is_absent(x: Tensor) -> bool:
    """Say whether a tensor has no values here."""
    return isinstance(x, _Absent)


def make_present(*tensors: Tensor) -> None:
    """Let absent tensors have their values, or have their home refuse it."""
    by_home: dict[int, tuple[Home, list[str]]] = {}
    for x in tensors:
        home, name, _ = getattr(x, _HOME, _NOWHERE)
        if home is not None:
            by_home.setdefault(id(home), (home, []))[1].append(name)
    for home, names in by_home.values():
        home.read(names)


def home_of(x: Tensor) -> Home | None:
    """Return who is told where an absent tensor is read; None for others."""
    home: Home | None = getattr(x, _HOME, _NOWHERE)[0]
    return home


def num_bytes_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def without_memory(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor of the same shape whose elements share one place.

    Args:
        x: has the shape.
        like: has the device and dtype. [the same]
    """
    like = x if like is None else like
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(x.shape)


def _is_taken(func: Any, args: Any) -> bool:
    """Say whether the home of a tensor has taken the values that are copied into it."""
    if func is not Tensor.copy_:
        return False
    home, name, _ = getattr(args[0], _HOME, _NOWHERE)
    accept = getattr(home, "accept", None)
    return accept is not None and bool(accept(name, args[1]))


def _moved(func: Any, x: Tensor, args: Any, kwargs: Any) -> Tensor:
    """Return what a module moves in place of an absent tensor, which has no values to be moved."""
    with torch._C.DisableTorchFunctionSubclass():
        like = func(torch.empty([0] * x.dim(), dtype=x.dtype, device=x.device), *args, **kwargs)
        is_there = (like.device, like.dtype) == (x.device, x.dtype)
        if is_there or x.untyped_storage().nbytes() >= num_bytes_of(x):  # its values are here
            return x if is_there else func(x, *args, **kwargs)
        return without_memory(x, like)


def _read_gradient(x: Tensor, asking: Iterator[FrameType]) -> None:
    """Refuse to say that there is no gradient; but optimizers ask each parameter for one."""
    home, name, _ = getattr(x, _HOME, _NOWHERE)
    if home is not None and not _is_for_update(asking):
        home.read_gradient(name)


def _is_for_update(asking: Iterator[FrameType]) -> bool:
    asks = next((f for f in asking if not f.f_code.co_name.startswith("<")), None)
    if asks is None:
        return False
    is_step = isinstance(asks.f_locals.get("self"), Optimizer)
    return is_step or module_of(asks).startswith(_MANAGES_GRADIENTS)
