"""Plain copies: whoever pickles or copies a user's module finds nothing of ours on the copy.

While a fit is under way, modules have hooks of ours, and calls that lead to us. Copies of these
would act on the training that is under way, or could not be made at all.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar, final
from weakref import WeakValueDictionary

import torch
from torch import nn
from typing_extensions import override

from lightning_cyclic.runtime.absent import is_absent

_MARK = "_cyclic_mark"  # on what is ours: (what a copy has in its place, whether it is followed)
_METHODS = ("__deepcopy__", "__reduce_ex__")  # for which copies ask the instance
_T = TypeVar("_T")
_Clones = WeakValueDictionary[int, nn.Parameter]


def ours(thing: _T, instead: Any = None, is_followed: Callable[[], bool] | None = None) -> _T:
    """Mark a hook or a method that is put on a module, so that copies leave it out.

    Args:
        thing: that is put there.
        instead: what a copy has in its place. [nothing]
        is_followed: says whether a step that is under way follows what code reads. [none does]

    Returns:
        The same.
    """
    setattr(thing, _MARK, (instead, is_followed))
    return thing


@contextmanager
def plain_copies(module: nn.Module) -> Iterator[None]:
    """Let copies of a module, and of those inside, be plain, while the body runs."""
    found = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]
    clones = _Clones()
    for m in found:
        vars(m).update(_methods(m, clones))
    try:
        yield
    finally:
        for m in found:
            for name in _METHODS:
                vars(m).pop(name, None)


def _methods(m: nn.Module, clones: _Clones) -> dict[str, Any]:
    kind: Any = type(m)

    def deepcopy(memo: Any) -> Any:
        with _taken_off(m), torch._C.DisableTorchFunction():  # no event of a step
            return copy.deepcopy(m, memo)

    def reduce_ex(proto: Any) -> Any:
        return _plain(kind.__reduce_ex__(m, proto), m, clones)

    return dict(zip(_METHODS, map(ours, (deepcopy, reduce_ex)), strict=True))


@contextmanager
def _taken_off(m: nn.Module) -> Iterator[None]:
    own = vars(m)
    plain = _without_ours(own)
    changed = {k: x for k, x in own.items() if plain.get(k, _MARK) is not x}
    for k in changed:
        del own[k]
    own.update((k, plain[k]) for k in changed if k in plain)
    try:
        yield
    finally:
        own.update(changed)


def _plain(reduced: Any, m: nn.Module, clones: _Clones) -> Any:
    """Return what a module is reduced to without what is ours."""
    if type(reduced) is tuple:
        return tuple(_plain(x, m, clones) for x in reduced)
    if type(reduced) is not dict or "_parameters" not in reduced:
        return reduced
    return _State(_without_ours(reduced), m, clones)


@final
class _State(dict[str, Any]):
    """Be the state of a module: this one for copy.copy, and for pickles one of its own."""

    def __init__(self, state: Mapping[str, Any], m: nn.Module, clones: _Clones) -> None:
        super().__init__(state)
        self._module = m
        self._clones = clones

    @override
    def __reduce_ex__(self, proto: Any) -> Any:
        plain = dict(self)
        if _is_followed(self._module):
            with torch._C.DisableTorchFunction():
                return pickle.loads, (pickle.dumps(copy.deepcopy(plain)),)
        parameters = plain["_parameters"].items()
        plain["_parameters"] = {n: _apart(p, self._clones) for n, p in parameters}
        return dict, (plain,)


def _without_ours(state: Mapping[str, Any]) -> dict[str, Any]:
    hooks = {k: x for k, x in state.items() if "_hooks" in k and isinstance(x, dict)}
    gone = {number for x in hooks.values() for number, hook in x.items() if _is_ours(hook)}
    plain = {k: _instead_of(x) if _is_ours(x) else x for k, x in state.items()}
    for k, x in hooks.items():
        if not gone.isdisjoint(x):
            plain[k] = type(x)((number, hook) for number, hook in x.items() if number not in gone)
    return {k: x for k, x in plain.items() if x is not None or state[k] is None}


def _apart(p: Any, clones: _Clones) -> Any:
    """Return a parameter, or a copy where its memory holds others, too, which pickles take along.

    Tied parameters have one copy, which lives as long as the pickle that is being made.
    """
    if p is None or not (type(p) is nn.Parameter or is_absent(p)):
        return p
    if p.untyped_storage().nbytes() == p.nbytes:
        return p
    clone = clones.get(id(p))
    if clone is None:
        clone = clones[id(p)] = copy.deepcopy(p)  # of what is absent, when it has come
        vars(clone).update((k, x) for k, x in vars(p).items() if not k.startswith("_cyclic"))
    return clone


def _is_ours(thing: Any) -> bool:
    return isinstance(thing, FunctionType) and _MARK in vars(thing)


def _instead_of(thing: Any) -> Any:
    return vars(thing)[_MARK][0]


def _is_followed(m: nn.Module) -> bool:
    """Say whether a step is under way that takes what pickling reads for its own events."""
    marks = (vars(x)[_MARK] for x in vars(m).values() if _is_ours(x))
    return any(is_followed is not None and is_followed() for _, is_followed in marks)
