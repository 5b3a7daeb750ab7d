"""Values as trees: any container taken apart into leaves and a structure, and put back.

    (x, None, {"a": y})   <->   [x, None, y]   and   tuple( leaf, leaf, dict("a": leaf) )

Own code rather than ``torch.utils._pytree``, as batches and outputs need more than that knows:
see :mod:`~lightning_cyclic.runtime.values.containers`. Structures travel between workers as
JSON: :mod:`~lightning_cyclic.runtime.values.plain`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.values.containers import (
    COMMON_LEAVES,
    close,
    labels_of,
    rule_for,
)

_MAX_DEPTH = 100


class Structure(NamedTuple):
    """Be the shape of a value without its leaves; equal and hashable by content.

    Args:
        kind: type of the container, None for a leaf.
        keys: what names the children: keys of a dict, names of an object's attributes.
        children: one structure per child.
    """

    kind: type | None
    keys: tuple[Hashable, ...]
    children: tuple[Structure, ...]


LEAF = Structure(None, (), ())


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Take a value apart.

    Args:
        value: any value. Tuples, lists, mappings, named tuples and dataclass instances are taken
            apart, other objects where they hold a tensor; everything else is a leaf.

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


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Put a value together.

    Args:
        structure: as :func:`flatten` returned it.
        leaves: as many as the structure has, in its order.

    Returns:
        A new value; no constructor of the user's types has run.

    Raises:
        StepError: for a type whose ``__new__`` needs arguments.
    """
    rest = iter(leaves)
    value = _build(structure, rest)
    assert next(rest, rest) is rest, "more leaves than the structure has"
    return value


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a value, depth first; one that occurs twice is returned twice."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace every tensor of a value by what the function returns for it.

    Returns:
        The value with its tensors replaced; containers in which no tensor changed are the same
        objects as before.

    Raises:
        StepError: as :func:`flatten`.
    """
    return _map(function, value, 0)


def open_value(value: Any) -> tuple[Structure, Sequence[Any]]:
    """Take only the outermost container apart.

    Returns:
        Its structure, as if all children were leaves, and the children; ``LEAF`` for a leaf.
    """
    rule = rule_for(value)
    if rule is None:
        return LEAF, ()
    keys, parts = rule.open(value)
    return Structure(type(value), keys, (LEAF,) * len(parts)), tuple(parts)


def close_value(structure: Structure, children: list[Any]) -> Any:
    """Put together what :func:`open_value` took apart, with these children."""
    assert structure.kind is not None, "a leaf has no children"
    return close(structure.kind, structure.keys, children)


def places(structure: Structure, root: str = "value") -> list[str]:
    """Say where each leaf sits.

    Example:
        >>> places(flatten((1, {"a": [2, 3]}))[1])
        ['value[0]', "value[1]['a'][0]", "value[1]['a'][1]"]
    """
    if structure.kind is None:
        return [root]
    labels = labels_of(structure.kind, structure.keys, len(structure.children))
    parts = zip(labels, structure.children, strict=True)
    return [place for label, child in parts for place in places(child, root + label)]


def _flatten(value: Any, leaves: list[Any], depth: int) -> Structure:
    kind = type(value)
    if kind in COMMON_LEAVES:
        leaves.append(value)
        return LEAF
    keys: tuple[Hashable, ...] = ()
    parts: Collection[Any]
    if kind is tuple or kind is list:
        parts = value
    elif kind is dict:
        keys, parts = tuple(value), value.values()
    else:
        rule = rule_for(value)
        if rule is None:
            leaves.append(value)
            return LEAF
        keys, parts = rule.open(value)
    if depth > _MAX_DEPTH:
        raise _too_deep(kind)
    children = []
    for part in parts:  # the commonest leaves cost no call
        if type(part) in COMMON_LEAVES:
            leaves.append(part)
            children.append(LEAF)
        else:
            children.append(_flatten(part, leaves, depth + 1))
    return Structure(kind, keys, tuple(children))


def _build(structure: Structure, leaves: Iterator[Any]) -> Any:
    kind, keys, children = structure
    if kind is None:
        return next(leaves)
    parts = [next(leaves) if child is LEAF else _build(child, leaves) for child in children]
    return close(kind, keys, parts)


def _map(function: Callable[[Tensor], Any], value: Any, depth: int) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        return function(value)
    if kind in COMMON_LEAVES:
        return value
    rule = rule_for(value)
    if rule is None:
        return value
    if depth > _MAX_DEPTH:
        raise _too_deep(kind)
    keys, parts = rule.open(value)
    mapped = [_map(function, part, depth + 1) for part in parts]
    if all(map(_is, mapped, parts)):
        return value
    return close(kind, keys, mapped)


def _is(a: Any, b: Any) -> bool:
    return a is b


def _too_deep(kind: type) -> StepError:
    return StepError(
        f"a value of type {kind.__module__}.{kind.__qualname__} is nested more than {_MAX_DEPTH} "
        "deep, or contains itself; allowed: containers and objects that end somewhere; pass the "
        "tensors that are needed, not the object that holds them"
    )
