"""What workers tell each other of values beside tensors: JSON, types by their names.

Nothing is pickled, so that only what is installed on a host can run there. Messages repeat what is
said beside their tensors only where it changes.
"""

from __future__ import annotations

import base64
import enum
import functools
import importlib
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.values.trees import (
    LEAF,
    MAX_DEPTH,
    Structure,
    flatten,
    rule_of,
    unflatten,
)

_AS_THEY_ARE = frozenset({type(None), bool, int, float, str})
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)
_OWN_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")  # not only attributes count
_MADE: dict[type, Callable[[Any], list[Any]]] = {  # of what it is made again
    complex: lambda x: [x.real, x.imag],
    bytes: lambda x: [list(x)],
    torch.Size: lambda x: [list(x)],
    torch.device: lambda x: [str(x)],
    set: lambda x: [sorted(x, key=repr)],
    frozenset: lambda x: [sorted(x, key=repr)],
    slice: lambda x: [x.start, x.stop, x.step],
    range: lambda x: [x.start, x.stop, x.step],
}


def structure_to_data(structure: Structure, where: str = "value") -> Any:
    """Turn a structure into JSON: null for a leaf, else type, context and children.

    Raises:
        StepError: for a type or key that another process cannot find by name.
    """
    kind, context, children = structure
    if kind is None:
        return None
    told = [structure_to_data(child, where) for child in children]
    return [_name(kind, where), leaf_to_data(context, f"a key of {where}"), told]


def structure_from_data(data: Any) -> Structure:
    """Make the structure that :func:`structure_to_data` turned into JSON.

    Raises:
        StepError: for a type that cannot be imported here.
    """
    if data is None:
        return LEAF
    kind, context, children = data
    return Structure(
        _resolve(kind), leaf_from_data(context), tuple(map(structure_from_data, children))
    )


def leaf_to_data(leaf: Any, where: str = "value") -> Any:
    """Turn a leaf that is no tensor into JSON.

    Args:
        leaf: what JSON knows, a size, dtype, device, slice, set, enum member and the like, a class
            or function that can be imported by name, or an object or container of such.
        where: the leaf's place, for the error.

    Returns:
        The leaf itself where JSON knows it, else {how it is made: of what}.

    Raises:
        StepError: for anything else, with its type and place.
    """
    return leaf if type(leaf) in _AS_THEY_ARE else _to_data(leaf, where, 0)


def leaf_from_data(data: Any) -> Any:
    """Make the leaf that :func:`leaf_to_data` turned into JSON.

    Raises:
        StepError: for a class or function that cannot be imported here.
    """
    if not isinstance(data, dict):
        return data
    if "name" in data:
        return _resolve(data["name"])
    if "open" in data:
        kind, context, parts = data["open"]
        structure = Structure(_resolve(kind), leaf_from_data(context), (LEAF,) * len(parts))
        return unflatten(structure, map(leaf_from_data, parts))
    kind, held = data.get("make") or data["state"]
    kind = _resolve(kind)
    if "make" in data:
        assert kind in _MADE or issubclass(kind, enum.Enum), kind
        return kind(*map(leaf_from_data, held))
    assert _has_bytes(kind), kind
    leaf = kind.__new__(kind)
    leaf.__setstate__(base64.b64decode(held))
    return leaf


def is_plain(leaf: Any) -> bool:
    """Say whether :func:`leaf_to_data` takes this leaf; tensors are not plain."""
    try:
        leaf_to_data(leaf)
    except StepError:
        return False
    return True


def encode(value: Any, where: str) -> tuple[list[Tensor], Any]:
    """Turn a value into tensors and JSON.

    Raises:
        StepError: for what cannot be sent, and where it sits.
    """
    leaves, structure = flatten(value)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    others = [None if isinstance(x, Tensor) else [leaf_to_data(x, where)] for x in leaves]
    return tensors, [structure_to_data(structure, where), others]


def decode(tensors: Sequence[Tensor], facts: Any) -> Any:
    """Make the value that :func:`encode` turned into tensors and JSON."""
    structure, others = facts
    given = iter(tensors)
    leaves = [next(given) if x is None else leaf_from_data(x[0]) for x in others]
    return unflatten(structure_from_data(structure), leaves)


def _to_data(leaf: Any, where: str, depth: int) -> Any:
    kind: type = type(leaf)
    if kind in _AS_THEY_ARE:
        return leaf
    if kind in _MADE or isinstance(leaf, enum.Enum):
        held = [leaf.value] if isinstance(leaf, enum.Enum) else _MADE[kind](leaf)
        return {"make": [_name(kind, where), [_to_data(x, where, depth + 1) for x in held]]}
    if isinstance(leaf, _BY_NAME):
        return {"name": _name(leaf, where)}
    if isinstance(leaf, _OF_TORCH) or leaf is ...:
        module = "builtins:Ellipsis" if leaf is ... else f"torch:{str(leaf).split('.')[-1]}"
        return {"name": module}
    if _has_bytes(kind):
        state = base64.b64encode(leaf.__getstate__()).decode()
        return {"state": [_name(kind, where), state]}
    rule = rule_of(kind)
    is_simple = all(getattr(kind, x) is getattr(object, x) for x in _OWN_PICKLING)
    if rule is None or depth > MAX_DEPTH or not (rule.always or is_simple):
        raise _refused(leaf, where)
    parts, context = rule.open(leaf)
    told = [_to_data(x, where, depth + 1) for x in parts]
    return {"open": [_name(kind, where), _to_data(context, where, depth + 1), told]}


def _has_bytes(kind: type) -> bool:
    """Say whether a type is one of the tokenizers library's, which BatchEncoding holds."""
    return kind.__module__ == "tokenizers" and hasattr(kind, "__setstate__")


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


def _name(thing: Any, where: str) -> str:
    """Name a class or function as "module:qualname", by which another process finds it."""
    for name in (f"{thing.__module__}:{thing.__qualname__}", f"torch:{thing.__name__}"):
        try:
            if _resolve(name) is thing:
                return name
        except StepError:
            pass
    raise StepError(
        f"{where} is or holds {thing.__module__}:{thing.__qualname__}, which another worker "
        "cannot import by this name; allowed: classes and functions at the top level of a module; "
        "define it there"
    )


def _refused(leaf: Any, where: str) -> StepError:
    kind = type(leaf)
    return StepError(
        f"{where} is or holds a {kind.__module__}.{kind.__qualname__}, which cannot be sent to "
        "another worker; allowed: tensors, numbers, strings, None and containers or objects of "
        "these; convert it, or keep it out of the batch and of what one module hands to the next"
    )


class TensorSpec(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    requires_grad: bool

    @classmethod
    def of(cls, x: Tensor) -> Self:
        return cls(x.size(), x.stride(), x.dtype, x.is_cpu, x.requires_grad)

    def describes(self, x: Tensor) -> bool:
        return self == (x.size(), x.stride(), x.dtype, x.is_cpu, x.requires_grad)


def spec_to_data(spec: TensorSpec) -> list[Any]:
    dtype = str(spec.dtype).removeprefix("torch.")
    return [list(spec.size), list(spec.stride), dtype, spec.on_host, spec.requires_grad]


def spec_from_data(data: Sequence[Any]) -> TensorSpec:
    size, stride, dtype, on_host, requires_grad = data
    return TensorSpec(
        torch.Size(size), tuple(stride), getattr(torch, dtype), on_host, requires_grad
    )
