"""Ghosts: stand-ins for tensors that another worker computes.

A ghost knows shape, strides, dtype and device, so that the code between modules can run on it. It
has no values until its stage begins and the real tensor has come; from then on every torch
function that is given the ghost gets the real tensor in its place.
"""

from __future__ import annotations

from functools import partial
from itertools import compress
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.torch_functions import reads_metadata, user_line
from lightning_cyclic.runtime.values.plain import TensorSpec

Handle = tuple[int, int, int]
"""Where a tensor was made: region, event in the region, leaf of the event's output."""


class Router(Protocol):
    """Know who looks at what is called, if anybody does."""

    @property
    def looking(self) -> Any: ...


@final
class Ghost(Tensor):
    """Stand for a tensor of another stage; a :class:`Mould` makes it."""

    handle: Handle
    value: Tensor | None = None
    spec: TensorSpec
    router: Router | None
    _device: torch.device

    # what is asked for most does not take the long way through torch

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.spec.size if self.value is None else self.value.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.spec.dtype if self.value is None else self.value.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device if self.value is None else self.value.device

    def size(self, dim: Any = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        region, event, leaf = self.handle
        filled = self.value is not None
        return f"Ghost(of stage {region}, event {event}, leaf {leaf}, filled={filled})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Put real tensors in the place of filled ghosts; called where nobody watches."""
        ghost = args[0] if args and type(args[0]) is Ghost else _first_ghost(args, kwargs)
        run: Any = None if ghost is None or ghost.router is None else ghost.router.looking
        if run is not None and run.is_unwatched:
            return run.pretend(func, args, kwargs or {})
        if reads_metadata(func) and not _is_filled(args[0]):
            return ask(func, args, kwargs or {})
        return func(*real(args), **real(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: the operation did not pass through Python, where ghosts are replaced.

        Raises:
            StepError: always.
        """
        raise StepError(
            f"operation {func} was given a tensor of an earlier stage in a way that cannot be "
            f"followed ({user_line()}); allowed: torch functions and modules; let the stage "
            "begin elsewhere: stages=[...]"
        )


@final
class Mould:
    """Make ghosts of one tensor: a fresh one for each run, as the user's code may keep one.

    Args:
        spec: of the tensor.
        handle: where it was made.
        device: the run's.
        router: whose run is asked about functions of a ghost that nobody watches, if it replays.
    """

    def __init__(
        self,
        spec: TensorSpec,
        handle: Handle,
        device: torch.device,
        router: Router | None = None,
    ) -> None:
        at = torch.device("cpu") if spec.on_host else device
        self.handle = handle
        self._attributes = {"handle": handle, "spec": spec, "router": router, "_device": at}
        more: dict[str, Any] = {
            "dtype": spec.dtype, "device": at, "requires_grad": spec.requires_grad,
        }  # fmt: skip
        make = Tensor._make_wrapper_subclass
        self._make = partial(make, Ghost, spec.size, spec.stride, **more)

    def ghost(self) -> Ghost:
        made: Ghost = self._make()
        made.__dict__.update(self._attributes)
        return made


def ask(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that reads metadata on a ghost itself.

    A ghost answers as the tensor does in the one graph of all stages: if it has a gradient, it is
    no leaf there, but the output of some function.
    """
    with torch._C.DisableTorchFunctionSubclass():
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if name in _OF_THE_GRAPH and args[0].requires_grad:
            return _OF_THE_GRAPH[name]
        return func(*args, **kwargs)


@final
class _SomeFunction:
    """Stand for the function whose output a ghost is."""

    def __repr__(self) -> str:
        return "<a function of an earlier stage>"


_OF_THE_GRAPH = {"is_leaf": False, "grad_fn": _SomeFunction()}


def real(value: Any) -> Any:
    """Replace ghosts in plain containers by the tensors that they stand for.

    Returns:
        The same object where it holds no ghost.

    Raises:
        StepError: a ghost has no value.
    """
    kind = type(value)
    if kind is Ghost:
        return value.value if value.value is not None else _refuse(value)
    if kind is tuple or kind is list:
        made = [real(x) for x in value]
        return value if _same(made, value) else kind(made)
    if kind is dict:
        new = {k: real(x) for k, x in value.items()}
        return value if _same(list(new.values()), list(value.values())) else new
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        made = [real(x) for x in value]
        return value if _same(made, value) else tuple.__new__(kind, made)
    if kind is slice:
        made = [real(value.start), real(value.stop), real(value.step)]
        return slice(*made)
    return value


def _first_ghost(args: Any, kwargs: Any) -> Ghost | None:
    return next((x for x in tensors_in(args, kwargs) if type(x) is Ghost), None)


def _same(made: Any, given: Any) -> bool:
    return all(a is b for a, b in zip(made, given, strict=True))


def _is_filled(x: Any) -> bool:
    return type(x) is not Ghost or x.value is not None


def _refuse(ghost: Ghost) -> Any:
    raise StepError(
        f"a tensor of stage {ghost.handle[0]} is used at {user_line()}, but earlier steps did "
        "not use it there, so it was not sent; allowed: the same use of earlier stages' tensors "
        "in every step with equal inputs; let a stage begin behind that line, "
        "stages=[...]"
    )


_TENSORS: frozenset[type] = frozenset({Tensor, nn.Parameter, Ghost})
_NO_CONTAINERS: frozenset[type] = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, torch.layout}
)


@final
class _MayHold(dict[type, bool]):
    """Say of kinds of values whether tensors may be in them; known ones cost no Python."""

    def __missing__(self, kind: type) -> bool:
        return kind not in _NO_CONTAINERS


_KNOWN = dict.fromkeys(_NO_CONTAINERS, False) | dict.fromkeys(_TENSORS, True)
_may_hold = _MayHold(_KNOWN).__getitem__


def tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    """List the tensors among arguments, also those in plain containers."""
    parts = (*args, *kwargs.values()) if kwargs else args
    found = list(compress(parts, map(_may_hold, map(type, parts))))
    if _TENSORS.issuperset(map(type, found)):  # almost always
        return found
    tensors: list[Tensor] = []
    _collect(found, tensors)
    return tensors


def _collect(parts: Any, found: list[Tensor]) -> None:
    for x in compress(parts, map(_may_hold, map(type, parts))):
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, tuple | list):
            _collect(x, found)
        elif isinstance(x, dict):
            _collect(x.values(), found)
        elif type(x) is slice:
            _collect((x.start, x.stop, x.step), found)
