"""What a module had at one time: its attributes, and what of them may be changed in place."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple, final

from torch import Tensor

ORDERED = (list, deque)
_ITERABLES = frozenset({list, deque, set})
_DICTS = frozenset({dict, OrderedDict, defaultdict})
_version_of = attrgetter("_version")


class Kept(NamedTuple):
    """Hold a value, and what of it may be changed in place."""

    value: Any
    inside: Any  # of a list its items, of a dictionary these again, of a tensor its version


def keep(value: Any) -> Kept:
    """Return what a value is now."""
    if isinstance(value, ORDERED):
        return Kept(value, list(value))
    if isinstance(value, set):
        return Kept(value, set(value))
    if isinstance(value, dict):
        return Kept(value, {k: keep(x) for k, x in value.items()})
    if isinstance(value, Tensor) and not value.is_inference():
        return Kept(value, value._version)
    return Kept(value, None)


def made_of(x: Kept) -> Any:
    """Return a value of its own with what another held."""
    if isinstance(x.value, (*ORDERED, set)):
        made: Any = copy.copy(x.value)  # of its type and its largest length
        made.clear()
        (made.update if isinstance(made, set) else made.extend)(x.inside)
        return made
    if isinstance(x.value, dict):
        made = x.value.copy()  # of its type
        made.clear()
        made.update({k: made_of(y) for k, y in x.inside.items()})
        return made
    return x.value


def restore(x: Kept) -> None:
    """Undo changes in place; a tensor keeps them."""
    if isinstance(x.value, (*ORDERED, set)):
        x.value.clear()
        (x.value.update if isinstance(x.value, set) else x.value.extend)(x.inside)
    elif isinstance(x.value, dict):
        for y in x.inside.values():
            restore(y)
        x.value.clear()
        x.value.update({k: y.value for k, y in x.inside.items()})


def differs(x: Kept, value: Any) -> bool:
    """Say whether a value is another than it was."""
    if x.value is not value:
        return True
    if x.inside is None:
        return False
    if isinstance(value, set):
        return len(value) != len(x.inside)
    if isinstance(value, ORDERED):
        items = x.inside
        return len(items) != len(value) or (bool(items) and items[-1] is not value[-1])
    if isinstance(value, dict):
        return x.inside.keys() != value.keys() or any(
            differs(y, value[k]) for k, y in x.inside.items()
        )
    return bool(x.inside != value._version)


@final
class Attributes:
    """Hold attributes as they were.

    Args:
        names: of all that are looked at.
        values: of these.
    """

    def __init__(self, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
        self.kept = dict(zip(names, map(keep, values), strict=True))
        self._names = names
        self._values = values
        self._tensors: list[Tensor] = []
        self._live: list[Collection[Any]] = []  # containers, and views of dictionaries
        self._can_hold = self._list_inside(self.kept.values())
        self._versions = list(map(_version_of, self._tensors))
        self._sizes = list(map(len, self._live))
        self._items = list(chain.from_iterable(self._live))

    def hold(self, names: tuple[str, ...], values: tuple[Any, ...]) -> bool:
        """Say whether a module with these has, to the last item, what it had.

        Most runs leave all attributes alone; to see that costs much less than to keep them again.
        """
        return (
            self._can_hold
            and names == self._names
            and all(map(is_, values, self._values))
            and (not self._live or self._containers_hold())
            and (not self._tensors or list(map(_version_of, self._tensors)) == self._versions)
        )

    def _containers_hold(self) -> bool:
        if list(map(len, self._live)) != self._sizes:
            return False
        return all(map(is_, chain.from_iterable(self._live), self._items))

    def changed(self, names: tuple[str, ...], values: tuple[Any, ...]) -> dict[str, Any]:
        """Return which of these have come, or are others than they were."""
        if self.hold(names, values):
            return {}
        kept = self.kept
        pairs = zip(names, values, strict=True)
        return {n: x for n, x in pairs if n not in kept or differs(kept[n], x)}

    def _list_inside(self, kept: Collection[Kept]) -> bool:
        """List what may be changed in place; say whether it is all of kinds that hide nothing."""
        for value, inside in kept:
            if isinstance(value, Tensor):
                self._tensors += [value] if inside is not None else []
            elif type(value) in _DICTS:
                self._live += value.keys(), value.values()
                if not self._list_inside(inside.values()):
                    return False
            elif type(value) in _ITERABLES:
                self._live.append(value)
            elif inside is not None:  # of a class of the user's
                return False
        return True
