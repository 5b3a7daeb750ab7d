"""The watch: torch functions outside units are shown to the run that is under way."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from torch._C import (
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import TorchFunctionMode

from lightning_cyclic.runtime.partial_step.ghosts import reads_metadata
from lightning_cyclic.runtime.randomness import is_random

if TYPE_CHECKING:
    from lightning_cyclic.runtime.partial_step.call_router import CallRouter

_READS_VALUE = frozenset(
    {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"}
    | {"__complex__", "equal", "allclose", "is_nonzero", "__contains__"}
)


@final
class Watch(TorchFunctionMode):
    def __init__(self, router: CallRouter) -> None:
        super().__init__()
        self._router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self._router.looking
        if run is None:
            return func(*args, **(kwargs or {}))
        return run.function(func, types, args, kwargs or {})

    def insert(self, depth: int) -> None:
        """Begin to watch, beneath the modes that the user's code has entered meanwhile."""
        if _len_torch_function_stack() == depth:  # most often none are above
            _push_on_torch_function_stack(self)
            return
        above = [_pop_torch_function_stack() for _ in range(depth, _len_torch_function_stack())]
        for mode in (self, *reversed(above)):
            _push_on_torch_function_stack(mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    name: str
    is_metadata: bool
    is_random: bool
    reads_value: bool
    changes_first: bool  # of its arguments, in place


@functools.lru_cache(maxsize=4096)
def known(func: Any) -> Known:
    name: str = func.__name__
    in_place = name in ("__setitem__", "__set__") or (
        name.endswith("_") and not name.endswith("__")
    )
    if name == "__get__":
        name = f"{func.__self__.__name__}.get"
    return Known(
        name=name,
        is_metadata=reads_metadata(func),
        is_random=is_random(func),
        reads_value=name in _READS_VALUE,
        changes_first=in_place,
    )
