"""What the units of a stage keep for their backward, as seen in one forward.

Modules within modules are all looked at, so that it can be chosen behind it which of them are the
units: blocks, or what blocks are made of. What a module keeps between those inside is never run
again once it is opened, so that it is worth to open only those that keep little there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_cyclic.planner.rematerialisation import Unit
from lightning_cyclic.runtime.bits import version
from lightning_cyclic.runtime.partial_step.segments import Surroundings, is_plain, is_seen
from lightning_cyclic.runtime.torch_functions import saving_hooks
from lightning_cyclic.runtime.values.trees import flatten, tensors

_Sizes = dict[int, int]  # storage, by where it lies -> bytes


@dataclass(slots=True, eq=False)
class _Seen:
    """Hold one call of a module, and what it kept.

    Args:
        saved: what autograd saved in it.
        given: tensors that have gradients, and how often each was changed before.
        made: what it returned.
        can_run_again: as far as the call shows.
    """

    path: str
    parent: _Seen | None
    given: list[tuple[Tensor, int]]
    can_run_again: bool
    saved: _Sizes = field(default_factory=dict)
    made: list[tuple[Tensor, int]] = field(default_factory=list)
    inside: list[_Seen] = field(default_factory=list)


class Chain(NamedTuple):
    """Hold the units of a stage.

    Args:
        paths: of the units.
        opened: paths of modules that are made of units.
        aside_bytes: what the code between units keeps.
    """

    paths: tuple[str, ...]
    opened: frozenset[str]
    units: tuple[Unit, ...]
    aside_bytes: int


@final
class Observation:
    """Look at the calls of modules in one forward, whose graph is not used.

    Args:
        still: tensors that are there anyway: parameters and buffers.
        forward_s: seconds of a call, by path.
        cannot: paths of modules that must not be run again by themselves.
    """

    def __init__(
        self, still: Iterable[Tensor], forward_s: Mapping[str, float], cannot: Collection[str]
    ) -> None:
        self._still = {_storage(x) for x in still}
        self._forward_s = forward_s
        self._cannot = cannot
        self._top: list[_Seen] = []
        self._open: list[_Seen] = []
        self._all: _Sizes = {}
        self._held: list[Tensor] = []  # so that no storage lies where another one was
        self._around = Surroundings.now()
        self._hooks: Any = None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Let autograd save nothing in the body, and note what it would."""
        with saved_tensors_hooks(self._note, _unused):
            self._hooks = saving_hooks()
            yield

    def _note(self, x: Tensor) -> None:
        place = _storage(x)
        if isinstance(x, nn.Parameter) or place in self._still:
            return
        self._held.append(x.detach())
        size = _size(x)
        self._all[place] = size
        for seen in self._open:
            seen.saved[place] = size

    def call(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call of a module."""
        if not is_seen(self._hooks):
            return original(*args, **kwargs)
        leaves, structure = flatten((args, kwargs))
        parent = self._open[-1] if self._open else None
        can = is_plain(leaves, structure) and path not in self._cannot
        can &= Surroundings.now().attention == self._around.attention  # which no run again sets
        given = [(x, version(x)) for x in leaves if isinstance(x, Tensor)]
        seen = _Seen(path, parent, given, can)
        (self._top if parent is None else parent.inside).append(seen)
        self._open.append(seen)
        try:
            result = original(*args, **kwargs)
        finally:
            self._open.pop()
        seen.made = [(x, version(x)) for x in tensors(result)]
        return result

    # ------------------------------------------------------------------ what follows

    def chains(self, most_units: int) -> list[Chain]:
        """Return the chains that the stage can be taken for, the coarsest first."""
        for seen in self._every(self._top):
            seen.can_run_again &= all(version(x) == before for x, before in seen.given)
        found = {
            frozenset(x.path for x in self._every(self._top) if x.inside and _loose(x) <= most)
            for most in _MOST_LOOSE
        }
        chains = [self._chain(opened) for opened in sorted(found, key=len)]
        return [c for n, c in enumerate(chains) if n == 0 or len(c.units) <= most_units]

    def forget(self) -> None:
        """Let go of all tensors."""
        self._top, self._open, self._held = [], [], []

    def _every(self, calls: Iterable[_Seen]) -> Iterator[_Seen]:
        for seen in calls:
            yield seen
            yield from self._every(seen.inside)

    def _chain(self, opened: frozenset[str]) -> Chain:
        units = list(_units(self._top, opened))
        within: set[int] = set()
        for unit in units:
            within |= unit.saved.keys() | _places(unit.given) | _places(unit.made)
        return Chain(
            tuple(unit.path for unit in units),
            opened & {x.path for x in self._every(self._top)},
            tuple(self._unit(units, k) for k in range(len(units))),
            sum(size for place, size in self._all.items() if place not in within),
        )

    def _unit(self, units: list[_Seen], k: int) -> Unit:
        seen, behind = units[k], units[k + 1] if k + 1 < len(units) else None
        made = _sizes(seen.made, self._still)
        crossing = made if behind is None else _sizes(behind.given, self._still)
        given = _places(seen.given)
        kept = {p: n for p, n in seen.saved.items() if p not in given} | crossing
        return Unit(
            forward_s=self._forward_s.get(seen.path, 1.0),
            kept_bytes=sum(kept.values()),
            output_bytes=sum(crossing.values()),
            is_joined=k > 0 and _is_joined(units[k - 1], seen),
            must_keep=not seen.can_run_again,
        )


_MOST_LOOSE = (0.03, 0.1, 0.3)
"""Parts of what a module keeps that may be kept between those inside, for it to be opened."""


def _loose(seen: _Seen) -> float:
    """Return which part of what a module keeps would be kept though all inside ran again."""
    inside: set[int] = set()
    for x in seen.inside:
        inside |= x.saved.keys() - _places(x.given)
    loose = sum(size for place, size in seen.saved.items() if place not in inside)
    loose -= sum(n for p, n in seen.saved.items() if p in _places(seen.given))
    made = _places(seen.made)
    for before, behind in zip(seen.inside, seen.inside[1:], strict=False):
        if not _is_joined(before, behind):
            loose += sum(n for p, n in _sizes(behind.given, set()).items() if p not in made)
    return loose / max(1, sum(seen.saved.values()))


def _units(calls: Iterable[_Seen], opened: Collection[str]) -> Iterator[_Seen]:
    for seen in calls:
        if seen.path in opened:
            yield from _units(seen.inside, opened)
        else:
            yield seen


def _is_joined(before: _Seen, behind: _Seen) -> bool:
    made = {id(x): v for x, v in before.made}
    given = [(x, v) for x, v in behind.given if x.requires_grad and not _is_parameter(x)]
    return all(made.get(id(x)) == v for x, v in given)


def _is_parameter(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter)


def _sizes(found: Iterable[tuple[Tensor, int]], still: Collection[int]) -> _Sizes:
    """Return the storages of tensors that have gradients."""
    given = (x for x, _ in found if x.requires_grad and not _is_parameter(x))
    return {_storage(x): _size(x) for x in given if _storage(x) not in still}


def _places(found: Iterable[tuple[Tensor, int]]) -> set[int]:
    return {_storage(x) for x, _ in found}


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


def _size(x: Tensor) -> int:
    """Return the bytes of a tensor's storage; sparse ones have parts, which are tensors."""
    return x.untyped_storage().nbytes() if x.layout == torch.strided else 0


def _unused(_: Any) -> Tensor:
    raise AssertionError("a graph whose stage is run again was used")
