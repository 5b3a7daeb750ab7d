"""How each kind of container is taken apart and put back; a type without a rule is a leaf.

Objects that hold tensors (distributions, caches) are containers too, and Hugging Face's outputs
keep both their faces. No constructor of the user's types runs.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import struct
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer

from lightning_cyclic.errors import StepError

_WORD_BYTES = struct.calcsize("P")
ALLOWED = "tensors, numbers, strings, None and containers or objects of these"

# what most leaves are: told apart without a call
COMMON_LEAVES = frozenset({
    Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size
})  # fmt: skip
_LEAF_BASES = (
    Tensor, nn.Module, Optimizer, FunctionCtx, torch.Size, torch.Generator, type, enum.Enum,
    BaseException, functools.partial, types.ModuleType, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType, int, float, complex, str, bytes, bytearray, set, frozenset,
)  # fmt: skip


class Rule(NamedTuple):
    """Say how a type is taken apart into keys and parts, and put back.

    Args:
        open: value -> (keys, parts).
        close: type, keys, parts -> value.
        always: False for what is a container only where a tensor lies within.
    """

    open: Callable[[Any], tuple[tuple[Hashable, ...], Collection[Any]]]
    close: Callable[[type, Any, list[Any]], Any]
    always: bool = True


def rule_for(value: Any) -> Rule | None:
    """Return how to take this value apart, None for a leaf."""
    kind: type = type(value)
    rule = rule_of(kind)
    if rule is None or rule.always or _holds_tensor(value):
        return rule
    return None


@functools.lru_cache(maxsize=4096)
def rule_of(kind: type) -> Rule | None:
    """Return how values of a type are taken apart, None where they are leaves."""
    if issubclass(kind, _LEAF_BASES):
        return None
    if issubclass(kind, tuple):
        made_by_iterable = kind is tuple or hasattr(kind, "n_sequence_fields")  # torch.max's
        return _ITERABLE if made_by_iterable else _TUPLE
    for base, rule in ((list, _LIST), (dict, _DICT)):
        if issubclass(kind, base):
            return rule
    if issubclass(kind, Mapping) and not _has_state(kind):
        return _FROZEN
    if issubclass(kind, UserDict) or dataclasses.is_dataclass(kind):
        return _RECORD
    return _OBJECT if _has_state(kind) else None


def _has_state(kind: type) -> bool:
    """Say whether attributes are all that instances of a type are made of.

    False for types without attributes, and for those with a part that only C code sees, which
    would be lost (arrays, tokenizers' encodings); the rule is that of Python's own pickle.
    """
    num_slots = len(copyreg._slotnames(kind))  # type: ignore[attr-defined]
    num_words = num_slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    hidden = kind.__basicsize__ - object.__basicsize__ - num_words * _WORD_BYTES
    return (kind.__dictoffset__ != 0 or num_slots > 0) and hidden <= 0


def _holds_tensor(value: Any) -> bool:
    """Look for a tensor anywhere within; objects may refer to each other in circles."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, Tensor):
            return True
        kind: type = type(part)
        rule = None if kind in COMMON_LEAVES else rule_of(kind)
        if rule is not None and id(part) not in seen:
            seen.add(id(part))
            stack.extend(rule.open(part)[1])
    return False


def blank(kind: type) -> Any:
    """Make an instance without running its constructor."""
    try:
        return kind.__new__(kind)  # type: ignore[call-overload]
    except TypeError as error:
        raise StepError(
            f"{kind.__module__}.{kind.__qualname__} cannot be put together again ({error}); "
            f"allowed: {ALLOWED}, made by __new__ without arguments; pass the tensors that are "
            "needed, not the object that holds them"
        ) from error


def _set_state(value: Any, names: Sequence[str], slots: Sequence[str], parts: list[Any]) -> None:
    if names:
        vars(value).update(zip(names, parts, strict=False))
    for name, part in zip(slots, parts[len(names) :], strict=True):
        object.__setattr__(value, name, part)  # frozen ones too


def _open_record(value: Any) -> tuple[tuple[Hashable, ...], Collection[Any]]:
    """Return ((names in __dict__, names in __slots__), values)."""
    state = object.__getstate__(value)
    held, slots = state if isinstance(state, tuple) else (state, None)
    held, slots = held or {}, slots or {}
    return (tuple(held), tuple(slots)), [*held.values(), *slots.values()]


def _close_record(kind: type, keys: tuple[Any, ...], parts: list[Any]) -> Any:
    value = blank(kind)
    names, slots = keys
    _set_state(value, names, slots, parts)
    return value


def _open_tuple(value: Any) -> tuple[tuple[Hashable, ...], Collection[Any]]:
    """Return ((names in __dict__), attributes before items): named tuples have none."""
    state = getattr(value, "__dict__", None) or {}
    return tuple(state), (*state.values(), *tuple.__iter__(value))


def _close_tuple(kind: type, keys: tuple[Any, ...], parts: list[Any]) -> Any:
    # not kind's own __new__: named tuples want arguments, PackedSequence's computes
    value: Any = tuple.__new__(kind, parts[len(keys) :])
    _set_state(value, keys, (), parts[: len(keys)])
    return value


def _open_list(value: Any) -> tuple[tuple[Hashable, ...], Collection[Any]]:
    state = getattr(value, "__dict__", None) or {}
    return tuple(state), [*state.values(), *list.__iter__(value)]


def _close_list(kind: type, keys: tuple[Any, ...], parts: list[Any]) -> Any:
    value = blank(kind)
    list.extend(value, parts[len(keys) :])
    _set_state(value, keys, (), parts[: len(keys)])
    return value


def _open_dict(value: Any) -> tuple[tuple[Hashable, ...], Collection[Any]]:
    """Return ((names in __dict__), keys, keys that are not also attributes, factory).

    Hugging Face's outputs hold each value twice, as attribute and as item: it is one child.
    """
    if type(value) is dict:
        return tuple(value), value.values()
    state = getattr(value, "__dict__", None) or {}
    base = _dict_base(type(value))
    own = {k: x for k, x in base.items(value) if k not in state or state[k] is not x}
    factory = value.default_factory if isinstance(value, defaultdict) else None
    keys = (tuple(state), tuple(base.keys(value)), tuple(own), factory)
    return keys, [*state.values(), *own.values()]


def _close_dict(kind: type, keys: tuple[Any, ...], parts: list[Any]) -> Any:
    names, order, own, factory = keys
    value, base = blank(kind), _dict_base(kind)
    items = dict(zip(names, parts, strict=False))
    items |= zip(own, parts[len(names) :], strict=True)
    for key in order:
        base.__setitem__(value, key, items[key])
    _set_state(value, names, (), parts[: len(names)])
    if factory is not None:
        value.default_factory = factory
    return value


def _dict_base(kind: type) -> type[dict[Any, Any]]:
    return OrderedDict if issubclass(kind, OrderedDict) else dict


def close(kind: type, keys: tuple[Hashable, ...], parts: list[Any]) -> Any:
    """Put a container together."""
    if kind is tuple:
        return tuple(parts)
    if kind is list:
        return parts
    if kind is dict:
        return dict(zip(keys, parts, strict=True))
    rule = rule_of(kind)
    assert rule is not None, f"{kind} is a leaf"
    return rule.close(kind, keys, parts)


_ITERABLE = Rule(lambda value: ((), value), lambda kind, keys, parts: kind(parts))
_TUPLE = Rule(_open_tuple, _close_tuple)
_LIST = Rule(_open_list, _close_list)
_DICT = Rule(_open_dict, _close_dict)
_RECORD = Rule(_open_record, _close_record)
_OBJECT = Rule(_open_record, _close_record, always=False)
_FROZEN = Rule(  # mappings without attributes: types.MappingProxyType
    lambda value: (tuple(value), list(value.values())),
    lambda kind, keys, parts: kind(dict(zip(keys, parts, strict=True))),
)


def labels_of(kind: type, keys: tuple[Hashable, ...], num_children: int) -> list[str]:
    """Name each child as Python would reach it."""
    rule = rule_of(kind)
    if kind is dict or rule is _FROZEN:
        return [f"[{key!r}]" for key in keys]
    names: Any = keys
    items: Any = range(num_children - len(keys))
    if rule is _DICT:
        names, _, items, _ = keys
    elif rule in (_RECORD, _OBJECT):
        names, items = (*keys[0], *keys[1]), ()  # type: ignore[misc]
    return [*(f".{name}" for name in names), *(f"[{item!r}]" for item in items)]
