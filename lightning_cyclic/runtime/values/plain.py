"""Structures and plain leaves as JSON, types by name: what workers tell each other of values."""

from __future__ import annotations

import base64
import enum
import functools
import importlib
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.values.containers import ALLOWED, blank, labels_of, rule_of
from lightning_cyclic.runtime.values.trees import LEAF, Structure, flatten, places, unflatten


def to_json(structure: Structure) -> Any:
    """Turn a structure into JSON: null for a leaf, else [type, keys, children].

    Raises:
        StepError: for a type or key that another process cannot find by name, and where it sits.
    """
    return _structure_to_json(structure, "value")


def from_json(data: Any) -> Structure:
    """Make the structure that :func:`to_json` turned into JSON.

    Raises:
        StepError: for a type that cannot be imported here.
    """
    if data is None:
        return LEAF
    kind, keys, children = data
    named = tuple(decode_leaf(key) for key in keys)
    return Structure(_resolve(kind), named, tuple(from_json(child) for child in children))


def is_plain(leaf: Any) -> bool:
    """Say whether :func:`encode_leaf` takes this leaf; tensors are not plain."""
    if type(leaf) in _AS_THEY_ARE:
        return True
    try:
        encode_leaf(leaf)
    except StepError:
        return False
    return True


def encode_leaf(leaf: Any, where: str = "value") -> Any:
    """Turn a plain leaf into JSON.

    Args:
        leaf: None, a bool, number, string, bytes, size, dtype, device, layout, slice, range,
            ellipsis, enum member, set of these, a class or function that can be imported by
            name, or an object that holds only such.
        where: the leaf's place, for the error; see :func:`places`.

    Returns:
        The leaf itself where JSON knows it, else {what it is: what it holds}.

    Raises:
        StepError: for anything else, with its type and place.

    Example:
        >>> encode_leaf(float("nan")), encode_leaf(torch.float16)
        ({'float': 'nan'}, {'torch': 'float16'})
    """
    try:
        return _encode(leaf, where)
    except RecursionError:
        raise _not_plain(leaf, where) from None


def decode_leaf(data: Any) -> Any:
    """Make the leaf that :func:`encode_leaf` turned into JSON.

    Raises:
        StepError: for a class or function that cannot be imported here.
    """
    if not isinstance(data, dict):
        return data
    ((what, held),) = data.items()
    return _DECODERS[what](held)


def encode(value: Any, where: str) -> tuple[list[Tensor], Any]:
    """Turn a value into tensors and JSON.

    Raises:
        StepError: for what cannot be sent, and where it sits.
    """
    leaves, structure = flatten(value)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    others = [None if isinstance(x, Tensor) else [encode_leaf(x, where)] for x in leaves]
    return tensors, [to_json(structure), others]


def decode(tensors: Sequence[Tensor], facts: Any) -> Any:
    """Make the value that :func:`encode` turned into tensors and JSON."""
    structure, others = facts
    given = iter(tensors)
    leaves = [next(given) if x is None else decode_leaf(x[0]) for x in others]
    return unflatten(from_json(structure), leaves)


@functools.lru_cache(maxsize=4096)
def _resolve(name: str) -> Any:
    module, _, qualname = name.partition(":")
    try:
        return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise StepError(
            f"{name} cannot be imported here ({error}); allowed: types that every worker can "
            "import; start all workers with the same code and the same packages"
        ) from error


_AS_THEY_ARE = frozenset({type(None), bool, int, str})
_OWN_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")  # not only attributes count
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    float: ("float", repr),
    complex: ("complex", repr),
    bytes: ("bytes", lambda leaf: base64.b64encode(leaf).decode()),
    torch.Size: ("size", list),
    torch.device: ("device", str),
    types.EllipsisType: ("ellipsis", lambda leaf: None),
    **dict.fromkeys(
        (torch.dtype, torch.layout, torch.memory_format),
        ("torch", lambda leaf: str(leaf).removeprefix("torch.")),
    ),
}
_SEQUENCES: dict[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("tuple", list),
    set: ("set", lambda leaf: sorted(leaf, key=repr)),
    frozenset: ("frozenset", lambda leaf: sorted(leaf, key=repr)),
    slice: ("slice", lambda leaf: [leaf.start, leaf.stop, leaf.step]),
    range: ("range", lambda leaf: [leaf.start, leaf.stop, leaf.step]),
}


def _encode(leaf: Any, where: str) -> Any:
    kind: type = type(leaf)
    if kind in _AS_THEY_ARE or (kind is float and math.isfinite(leaf)):
        return leaf
    held: Any
    if kind in _ENCODERS:
        what, encode = _ENCODERS[kind]
        held = encode(leaf)
    elif kind in _SEQUENCES:
        what, parts = _SEQUENCES[kind]
        held = [_encode(part, where) for part in parts(leaf)]
    elif isinstance(leaf, enum.Enum):
        what, held = "enum", [_name(kind, where), _encode(leaf.value, where)]
    elif isinstance(leaf, _NAMED):
        what, held = "name", _name(leaf, where)
    elif _is_pickled_by_bytes(kind):
        state = base64.b64encode(leaf.__getstate__()).decode()
        what, held = "state", [_name(kind, where), state]
    else:
        what, held = "object", _encode_object(leaf, where)
    return {what: held}


def _is_pickled_by_bytes(kind: type) -> bool:
    """Say whether a type is one of the tokenizers library's, which BatchEncoding holds."""
    return kind.__module__ == "tokenizers" and hasattr(kind, "__setstate__")


def _encode_object(leaf: Any, where: str) -> Any:
    """Encode an object without a tensor, which :func:`flatten` takes for a leaf."""
    kind: type = type(leaf)
    rule = rule_of(kind)
    if rule is None or any(getattr(kind, x) is not getattr(object, x) for x in _OWN_PICKLING):
        raise _not_plain(leaf, where)
    keys, parts = rule.open(leaf)
    leaves, inner = flatten(list(parts))
    structure = Structure(kind, keys, inner.children)
    whole = zip(leaves, places(structure, where), strict=True)
    encoded = [_encode(part, place) for part, place in whole]
    return [_structure_to_json(structure, where), encoded]


def _decode_state(held: Any) -> Any:
    kind, state = held
    leaf = blank(_resolve(kind))
    leaf.__setstate__(base64.b64decode(state))
    return leaf


def _decode_object(held: Any) -> Any:
    structure, leaves = held
    return unflatten(from_json(structure), [decode_leaf(leaf) for leaf in leaves])


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": complex,
    "bytes": base64.b64decode,
    "size": torch.Size,
    "device": torch.device,
    "ellipsis": lambda held: ...,
    "torch": lambda held: getattr(torch, held),
    "tuple": lambda held: tuple(map(decode_leaf, held)),
    "set": lambda held: set(map(decode_leaf, held)),
    "frozenset": lambda held: frozenset(map(decode_leaf, held)),
    "slice": lambda held: slice(*map(decode_leaf, held)),
    "range": lambda held: range(*held),
    "enum": lambda held: _resolve(held[0])(decode_leaf(held[1])),
    "name": _resolve,
    "state": _decode_state,
    "object": _decode_object,
}


def _structure_to_json(structure: Structure, where: str) -> Any:
    kind, keys, children = structure
    if kind is None:
        return None
    labels = labels_of(kind, keys, len(children))
    parts = zip(children, labels, strict=True)
    inner = [_structure_to_json(child, where + label) for child, label in parts]
    return [_name(kind, where), [_encode(key, f"a key of {where}") for key in keys], inner]


def _name(thing: Any, where: str) -> str:
    """Name a class or function as "module:qualname", by which another process finds it."""
    name = f"{thing.__module__}:{thing.__qualname__}"
    try:
        found = _resolve(name)
    except StepError:
        found = None
    if found is not thing:
        raise StepError(
            f"{where} is or holds {name}, which another worker cannot import by this name; "
            "allowed: classes and functions at the top level of a module; define it there"
        )
    return name


def _not_plain(leaf: Any, where: str) -> StepError:
    kind = type(leaf)
    return StepError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent to another "
        f"worker; allowed: {ALLOWED}; convert it, or keep it out of the batch and of what one "
        "module hands to the next"
    )
