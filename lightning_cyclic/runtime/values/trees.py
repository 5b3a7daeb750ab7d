"""Values as trees: any container taken apart into leaves and a structure, and put back.

    (x, None, {"a": y})   <->   [x, None, y]   and   tuple( leaf, leaf, dict("a": leaf) )

Types are those of ``torch.utils._pytree``, where users and Hugging Face register theirs. Others
are taken apart by their attributes and items: dataclasses, subclasses of dict, list and tuple, and
objects in which a tensor lies (caches, distributions); their constructors do not run. The three
commonest containers go without torch's registry: its own walk takes four times as long.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import struct
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer
from torch.utils._pytree import SUPPORTED_NODES

from lightning_cyclic.errors import StepError

MAX_DEPTH = 100
_WORD_BYTES = struct.calcsize("P")
_COMMON_LEAVES = frozenset({
    Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size
})  # fmt: skip
_LEAF_BASES = (
    Tensor, nn.Module, Optimizer, FunctionCtx, torch.Size, torch.Generator, type, enum.Enum,
    BaseException, functools.partial, types.ModuleType, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType, int, float, complex, str, bytes, bytearray, set, frozenset,
)  # fmt: skip


class Structure(NamedTuple):
    """Be the shape of a value without its leaves; equal by content.

    Args:
        kind: type of the container, None for a leaf.
        context: what else it takes to put the container together, as the keys of a dict.
    """

    kind: type | None
    context: Any
    children: tuple[Structure, ...]


LEAF = Structure(None, (), ())


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Take a value apart.

    Returns:
        The leaves, depth first, and the structure that they had.

    Raises:
        StepError: for a value that contains itself, or is nested more than 100 deep.

    Example:
        >>> leaves, structure = flatten((1, None, {"a": "text"}))
        >>> leaves
        [1, None, 'text']
        >>> unflatten(structure, [1, 2, 3])
        (1, 2, {'a': 3})
    """
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, 0)


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Put a value together.

    Args:
        structure: as :func:`flatten` returned it.
        leaves: as many as the structure has, in its order.

    Raises:
        StepError: for a type whose ``__new__`` needs arguments.
    """
    return _build(structure, iter(leaves))


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a value, depth first; one that occurs twice is returned twice."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace every tensor of a value by what the function returns for it.

    Returns:
        The very value if no tensor changed; else a new one.
    """
    leaves, structure = flatten(value)
    mapped = [function(x) if isinstance(x, Tensor) else x for x in leaves]
    return value if all(map(is_, leaves, mapped)) else unflatten(structure, mapped)


def open_value(value: Any) -> tuple[Structure, Sequence[Any]]:
    """Take only the outermost container apart: its structure, as of leaves, and its children."""
    rule = _rule_for(value)
    if rule is None:
        return LEAF, ()
    children, context = rule.open(value)
    return Structure(type(value), context, (LEAF,) * len(children)), children


def labels(structure: Structure) -> list[str]:
    """Name each child of a container as Python would reach it."""
    kind, keys, children = structure
    if kind in (dict, OrderedDict):
        return [f"[{key!r}]" for key in keys]
    rule = None if kind is None else rule_of(kind)
    if rule is not None and rule.open is _open_object:
        return [f"[{key!r}]" if is_item else f".{key}" for key, is_item in keys]
    named = isinstance(keys, list) and len(keys) == len(children)  # Hugging Face's outputs
    return [f"[{key!r}]" for key in (keys if named else range(len(children)))]


# ---------------------------------------------------------------------- types


class Rule(NamedTuple):
    """Say how a type is taken apart into children and a context, and put back.

    Args:
        open: value -> (children, context).
        close: children, context -> value.
        always: False for what is a container only where a tensor lies within.
    """

    open: Callable[[Any], tuple[Sequence[Any], Any]]
    close: Callable[[list[Any], Any], Any]
    always: bool = True


# names of the parts of an object: (attribute, False), then (key or index, True)
_Names = tuple[tuple[Any, bool], ...]


@functools.lru_cache(maxsize=4096)
def rule_of(kind: type) -> Rule | None:
    """Return how values of a type are taken apart, None where they are leaves."""
    if issubclass(kind, _LEAF_BASES):
        return None
    is_named = issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")
    node = SUPPORTED_NODES.get(namedtuple if is_named else kind)  # type: ignore[arg-type]
    if node is not None:
        return Rule(node.flatten_fn, node.unflatten_fn)
    has_items = issubclass(kind, (list, dict, tuple))
    if not has_items and not _has_state(kind):
        return None
    always = has_items or issubclass(kind, UserDict) or dataclasses.is_dataclass(kind)
    return Rule(_open_object, functools.partial(_close_object, kind), always)


def _rule_for(value: Any) -> Rule | None:
    kind: type = type(value)
    rule = None if kind in _COMMON_LEAVES else rule_of(kind)
    return rule if rule is None or rule.always or _holds_tensor(value) else None


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
        rule = rule_of(kind)
        if rule is not None and id(part) not in seen:
            seen.add(id(part))
            stack.extend(rule.open(part)[0])
    return False


def _open_object(value: Any) -> tuple[Sequence[Any], _Names]:
    state = object.__getstate__(value)
    held, slots = state if isinstance(state, tuple) else (state, None)
    parts = {(name, False): x for name, x in ((held or {}) | (slots or {})).items()}
    if isinstance(value, dict):
        parts |= {(key, True): x for key, x in dict.items(value)}
        if isinstance(value, defaultdict):
            parts["default_factory", False] = value.default_factory
    elif isinstance(value, (list, tuple)):
        base: Any = list if isinstance(value, list) else tuple
        parts |= {(k, True): x for k, x in enumerate(base.__iter__(value))}
    return list(parts.values()), tuple(parts)


def _close_object(kind: type, parts: list[Any], names: _Names) -> Any:
    items = [x for x, (_, is_item) in zip(parts, names, strict=True) if is_item]
    try:
        value: Any = tuple.__new__(kind, items) if issubclass(kind, tuple) else kind.__new__(kind)
    except TypeError as error:
        raise StepError(
            f"{kind.__module__}.{kind.__qualname__} cannot be put together again ({error}); "
            "allowed: containers and objects made by __new__ without arguments, and types "
            "registered by torch.utils._pytree.register_pytree_node(...); pass the tensors that "
            "are needed, not the object that holds them"
        ) from error
    if isinstance(value, list):
        list.extend(value, items)
    for (name, is_item), part in zip(names, parts, strict=True):
        if not is_item:
            object.__setattr__(value, name, part)  # frozen ones too
        elif isinstance(value, dict):
            base = OrderedDict if isinstance(value, OrderedDict) else dict
            base.__setitem__(value, name, part)
    return value


# ---------------------------------------------------------------------- walks


def _flatten(value: Any, leaves: list[Any], depth: int) -> Structure:
    kind = type(value)
    if kind in _COMMON_LEAVES:
        leaves.append(value)
        return LEAF
    parts: Iterable[Any]
    context: Any = None
    if kind is tuple or kind is list:
        parts = value
    elif kind is dict:
        context, parts = tuple(value), value.values()
    else:
        rule = _rule_for(value)
        if rule is None:
            leaves.append(value)
            return LEAF
        parts, context = rule.open(value)
    if depth > MAX_DEPTH:
        raise StepError(
            f"a value of type {kind.__module__}.{kind.__qualname__} is nested more than "
            f"{MAX_DEPTH} deep, or contains itself; allowed: containers and objects that end "
            "somewhere; pass the tensors that are needed, not the object that holds them"
        )
    children = []
    for part in parts:  # the commonest leaves cost no call
        if type(part) in _COMMON_LEAVES:
            leaves.append(part)
            children.append(LEAF)
        else:
            children.append(_flatten(part, leaves, depth + 1))
    return Structure(kind, context, tuple(children))


def _build(structure: Structure, leaves: Iterator[Any]) -> Any:
    kind, context, children = structure
    if kind is None:
        return next(leaves)
    parts = [next(leaves) if child[0] is None else _build(child, leaves) for child in children]
    if kind is tuple:
        return tuple(parts)
    if kind is list:
        return parts
    if kind is dict:
        return dict(zip(context, parts, strict=True))
    rule = rule_of(kind)
    assert rule is not None, f"{kind} is a leaf"
    return rule.close(parts, context)
