"""The ledger: every tensor that a survey meets, who made it, from what, and who uses it.

Tensors are known by identity, without being kept alive or marked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor

from lightning_cyclic.runtime import torch_functions
from lightning_cyclic.runtime.stages.evidence import Change, Edit, Read, Storage, Use, Value
from lightning_cyclic.runtime.torch_functions import (
    PACKAGE,
    READS_VALUE,
    TORCH,
    callers,
    is_in_place,
)

_LIMITS_NORM = frozenset({"embedding", "embedding_bag"})  # of rows, in place, if they are told
_SEE = (TORCH, str(Path(__file__).parent), torch_functions.__file__)  # what a survey sees it with


@dataclass(slots=True)
class _Entry:
    """Hold a tensor's record while it grows."""

    storage: int
    num_bytes: int
    derived: bool
    made: Use | None
    home: int | None  # the innermost unit call within which it was made
    units: frozenset[int]
    uses: list[Use] = field(default_factory=list)


@dataclass(slots=True)
class _Moves:
    """Hold what has changed a buffer in place."""

    is_known: bool = False
    derived: bool = False
    units: set[int] = field(default_factory=set)


@final
class Ledger:
    def __init__(self) -> None:
        self._reads: list[Read] = []
        self.changes: list[Change] = []
        self.edits: list[Edit] = []
        self.writes: list[tuple[int, Use, bool]] = []  # parameter, where, whether to itself
        self._entries: list[_Entry] = []
        self._storages: list[Storage] = []
        self._state: dict[int, _Moves] = {}  # storages of buffers -> what has changed them
        self._of_parameters: dict[int, tuple[Tensor, int]] = {}  # storage -> it and its number
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def number(self, x: Tensor) -> int:
        """Return a tensor's number; one that was never met was given to the step."""
        known = self.known(x)
        return self._enter(x) if known is None else known

    def known(self, x: Tensor) -> int | None:
        """Return a tensor's number if it was met before."""
        entry = self._numbers.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def parameter(self, x: Tensor) -> int:
        """Enter a parameter: what is computed from it is derived."""
        number = self._enter(x, derived=True)
        self._of_parameters[self._entries[number].storage] = x, number
        return number

    def buffer(self, x: Tensor, *, derived: bool) -> int:
        """Enter a buffer, which is derived if earlier steps have changed it by derived values."""
        number = self._enter(x, derived=derived) if self.known(x) is None else self.number(x)
        self._state.setdefault(self._entries[number].storage, _Moves())
        return number

    def moved_by(self, number: int) -> tuple[bool, frozenset[int]]:
        """Return by what a buffer was changed, or made: whether that is derived, and its units.

        Kernels that change what they are given need not say so: then nobody knows.
        """
        entry = self._entries[number]
        moves = self._state.get(entry.storage)
        if moves is None:
            return entry.derived, entry.units
        return moves.derived or not moves.is_known, frozenset(moves.units)

    def unseen(self, x: Tensor, use: Use, unit: int) -> int:
        """Enter what a unit returns and no torch function made: a kernel unseen by Python did."""
        return self._enter(x, derived=True, made=use, home=unit, units=frozenset({unit}))

    def given(self, x: Tensor) -> Tensor | None:
        """Return what was there before the step: a tensor, or the parameter that it is a view of.

        None for what the step has made itself.
        """
        entry = self._entries[self.number(x)]
        if entry.storage in self._of_parameters:
            return self._of_parameters[entry.storage][0]
        return x if entry.made is None else None

    def uses(self, number: int) -> list[Use]:
        return self._entries[number].uses

    def made(self, number: int) -> Use | None:
        """Return where a tensor was made; None for what was given to the step."""
        return self._entries[number].made

    def num_bytes(self, number: int) -> int:
        return self._entries[number].num_bytes

    def note(
        self,
        name: str,
        use: Use,
        unit: int | None,
        tensors: tuple[list[Tensor], list[Tensor], list[Tensor]],
    ) -> None:
        """Note what a torch function did.

        Args:
            name: of the function.
            use: where it ran.
            unit: number of the innermost unit call within which it ran.
            tensors: what it was given, what it changed of that, what it returned.
        """
        inputs, changed, outputs = tensors
        numbers = [self.number(x) for x in inputs]
        for k in numbers:
            self._entries[k].uses.append(use)
        derived = any(map(self.is_derived, numbers))
        units = frozenset[int]().union(*(self._entries[k].units for k in numbers))
        if name in READS_VALUE:
            self._reads += [Read(k, use, name) for k in numbers]
        units = units if unit is None else units | {unit}
        for x in changed:
            self._change(self.number(x), use, unit, derived)
            if (moves := self._state.get(self._entries[self.number(x)].storage)) is not None:
                moves.is_known, moves.derived = True, moves.derived or derived
                moves.units |= units
        for x in outputs:
            if self.known(x) is None:
                self._enter(x, derived=derived, made=use, home=unit, units=units, among=inputs)

    def is_derived(self, k: int) -> bool:
        """Say whether a tensor depends on parameters, when all is done that is noted so far."""
        entry = self._entries[k]
        return entry.derived or self._storages[entry.storage].derived_from is not None

    def values(self) -> tuple[Value, ...]:
        return tuple(
            Value(
                storage=e.storage,
                num_bytes=e.num_bytes,
                derived=e.derived,
                made=e.made,
                units=e.units | self._units_of_state(e.storage),
                uses=tuple(e.uses),
            )
            for e in self._entries
        )

    def reads(self) -> tuple[Read, ...]:
        """Return what Python read of values that depend on parameters or were made in units."""
        values = self.values()
        return tuple(r for r in self._reads if self.is_derived(r.value) or values[r.value].units)

    def storages(self) -> tuple[Storage, ...]:
        return tuple(self._storages)

    def _units_of_state(self, storage: int) -> frozenset[int]:
        moves = self._state.get(storage)
        return frozenset() if moves is None else frozenset(moves.units)

    def _change(self, k: int, use: Use, unit: int | None, by_derived: bool) -> None:
        storage = self._entries[k].storage
        if storage not in self._state:
            self.edits.append(Edit(storage, use))
        if storage in self._of_parameters:
            _, parameter = self._of_parameters[storage]
            self.writes.append((parameter, use, k == parameter))
        if self.is_derived(k):
            return
        if storage not in self._state and (by_derived or unit != self._entries[k].home):
            self.changes.append(Change(storage, use, by_derived))
        if by_derived:
            self._storages[storage] = self._storages[storage]._replace(derived_from=use.tick)

    def _enter(
        self,
        x: Tensor,
        *,
        derived: bool = False,
        made: Use | None = None,
        home: int | None = None,
        units: frozenset[int] = frozenset(),
        among: Iterable[Tensor] = (),
    ) -> int:
        storage = self._storage(x, among)
        self._entries.append(_Entry(storage, num_bytes(x), derived, made, home, units))
        self._numbers[id(x)] = (weakref.ref(x), len(self._entries) - 1)
        return len(self._entries) - 1

    def _storage(self, x: Tensor, among: Iterable[Tensor]) -> int:
        mine = storage_of(x)
        for y in among:
            if mine is not None and mine == storage_of(y):
                return self._entries[self.number(y)].storage
        self._storages.append(Storage(num_bytes(x), None))
        return len(self._storages) - 1


def arguments(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arguments(item)
    elif isinstance(value, dict):
        yield from arguments(list(value.values()))
    elif isinstance(value, slice):
        yield from arguments((value.start, value.stop, value.step))


def about_to_change(name: str, args: Any, kwargs: Any) -> Iterator[Tensor]:
    if name in _LIMITS_NORM and kwargs.get("max_norm") is not None:
        yield from arguments(args)
    if args and (is_in_place(name) or kwargs.get("inplace") is True):
        yield from arguments(args[0])
    yield from arguments(kwargs.get("out"))


def is_the_users() -> bool:
    """Say whether code outside this package calls a torch function: not what lends weights."""
    for frame in callers():
        if not frame.f_code.co_filename.startswith(_SEE):
            return not frame.f_code.co_filename.startswith(PACKAGE)
    return True


def num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def storage_of(x: Tensor) -> int | None:
    """Return what a tensor shares with its views and nothing else; None if there is no such."""
    try:
        return int(x.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without one
        return None
