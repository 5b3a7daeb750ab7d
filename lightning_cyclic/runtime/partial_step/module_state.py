"""What the user's step keeps on the module: lists of outputs, counters, buffers, metrics.

A worker runs the step once for each of its stages, and ends it where the stage ends. So

    the last stage    passes all code of the step; what it changes is told to the other workers
    other stages      what their part of the step changes, their next run finds again
    a run again       finds what the first run found, and leaves nothing but gradients

The first steps are compared with the plain one, which shows attributes that come out otherwise.
Two things it cannot show stay refused here: what a rank without the last stage has counted by
itself, as one rank with the right value is enough there; and that an earlier stage reads what a
later one changes, as a condition on a counter may come out alike for hundreds of steps: its runs
may not use what the rank was told (hidden.py).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.bits import kept, put, version
from lightning_cyclic.runtime.partial_step.hidden import Hidden
from lightning_cyclic.runtime.snapshot import refill
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.stages.evidence import is_inside
from lightning_cyclic.runtime.values.plain import (
    is_plain,
    leaf_from_data,
    leaf_to_data,
    structure_from_data,
    structure_to_data,
)
from lightning_cyclic.runtime.values.trees import flatten, map_tensors, unflatten

_NOTHING = nullcontext()
_MANY = 1024  # elements of tensors that each step sets anew, and that others are not told
_ORDERED = (list, deque)
_ATOMS = frozenset({type(None), bool, int, float, str})


class Kept(NamedTuple):
    """Hold a value, and what of it may be changed in place."""

    value: Any
    inside: Any  # of a list its items, of a dictionary these again, of a tensor its version


class Change(NamedTuple):
    """Hold what a run of the step changed.

    Args:
        key: of what changed in it, where it is a dictionary; else None.
        grew: whether a list has more items, and these are the value; else the value is new.
    """

    name: str
    key: Any
    grew: bool
    value: Any


class Seen(NamedTuple):
    """Hold what a module has.

    Args:
        of_stage: copies of those that modules of a stage change, where it is run again.
    """

    attributes: dict[str, Kept]
    buffers: list[Tensor]
    of_stage: list[Tensor]


class Visit(NamedTuple):
    """Hold what the module had when a run began: for hooks, and for the run."""

    shown: Seen
    found: Seen


@final
class ModuleState:
    """Keep the attributes of a module as if the whole step were run for each micro-batch."""

    def __init__(
        self, module: nn.Module, cuts: Cuts, ignored: Collection[str], stages: Sequence[int],
        say: Callable[[str], None], buffers: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._module = module
        self._cuts = cuts
        self._ignored = frozenset(ignored)
        self._buffers = sorted(buffers)
        self._say = say
        self._apart: dict[int, dict[str, Any]] = {j: {} for j in stages if j != max(stages)}
        self._buffers_apart: dict[int, list[Tensor]] = {}
        self._changed: set[str] = set()  # by runs on this worker
        self._left = Seen({}, [], [])  # of these, behind the last run, before hooks
        self._told: set[str] = set()  # by the last stage, which this worker does not have
        self._own: dict[tuple[int, int], dict[tuple[str, Any], Any]] = {}  # by micro-batch
        self._secret: set[str] = set()  # attributes that others are not told

    # ------------------------------------------------------------------ runs

    def begin(self, j: int, *, runs_again: bool = False) -> Visit:
        """Let the module have what runs of stage ``j`` left, before the next one."""
        of_stage = self._copies(self._changing(j)) if runs_again else []
        shown, kept = self._seen()._replace(of_stage=of_stage), self._apart.get(j)
        if kept is None or not (self._changed or self._buffers):
            return Visit(shown, shown)
        for name, x in self._left.attributes.items():  # what a hook has changed, all follow
            if name in kept and _differs(x, vars(self._module).get(name)):
                del kept[name]
        if not all(map(torch.equal, self._left.buffers, shown.buffers)):
            self._buffers_apart.clear()
        vars(self._module).update(kept)
        self._put_buffers(self._buffers, self._buffers_apart.get(j, shown.buffers))
        return Visit(shown, self._seen()._replace(of_stage=of_stage))

    def begin_anew(self, visit: Visit) -> None:
        """Take back what a run has changed that begins once more."""
        self._put_back(visit.found)

    def end(self, j: int, visit: Visit, of: tuple[int, int] | None = None) -> Seen:
        """Keep what a run changed.

        Args:
            j: its stage.
            visit: what :meth:`begin` returned.
            of: step and micro-batch, where it ended before the last stage: what it has changed is
                to be what the last stage changes.

        Returns:
            What a run again is to find.
        """
        changed = self._changed_since(visit)
        self._changed |= changed.keys()
        if of is not None and changed:
            self._own[of] = {(c.name, c.key): _comparable(c) for c in _changes(changed, visit)}
        kept, held = self._apart.get(j), vars(self._module)
        if kept is None:
            left = {n: _keep(held[n]) for n in self._changed if n in held}
            self._left = Seen(left, self._copies(self._buffers), [])
        elif changed or kept or self._buffers:
            kept.update({n: _moved(n, _keep(x), visit) for n, x in changed.items()})
            self._buffers_apart[j] = self._copies(self._buffers)
            self._put_back(visit.shown)
        before = visit.found.attributes
        return visit.found._replace(
            attributes={n: before[n] for n in self._changed if n in before}
        )

    @contextmanager
    def again(self, j: int, found: Seen) -> Iterator[None]:
        """Run the body, a run again and its backward, on what the first run found.

        Nothing of it stays but gradients: buffers and metrics of the stage are put back, too.
        """
        shown, names = self._seen(), self._changing(j)
        held = [self._module.get_buffer(n) for n in names]
        metrics = [self._module.get_submodule(p) for p, k in self._cuts.metrics.items() if k == j]
        states = [state_of(m) for m in metrics]
        with kept(held):
            for n, x in found.attributes.items():
                vars(self._module)[n] = _refilled(x, anew=True)
            self._put_buffers(self._buffers, found.buffers)
            if found.of_stage:
                put(held, found.of_stage)
            try:
                yield
            finally:
                self._put_back(shown)
                for name, b in zip(names, held, strict=True):
                    path, _, last = name.rpartition(".")
                    owner = self._module.get_submodule(path)
                    if getattr(owner, last) is not b:  # the step has put another in its place
                        setattr(owner, last, b)
                for m, state in zip(metrics, states, strict=True):
                    m.__dict__.update(state)

    def hiding(self) -> AbstractContextManager[None]:
        """Run the body, a run of the step, which must not use what others tell of.

        Raises:
            StepError: it did.
        """
        return self._hiding() if self._told else _NOTHING

    @contextmanager
    def _hiding(self) -> Iterator[None]:
        held = vars(self._module)
        before = {n: held[n] for n in self._told - self._changed if n in held}
        hidden = {n: Hidden(partial(_read_early, n)) for n in before}
        held.update(hidden)
        for n in [n for n, x in before.items() if x is None]:
            del held[n]  # nothing can stand for None, with which code compares by identity
        try:
            yield
        except AttributeError as error:
            if error.obj is self._module and error.name in before:
                raise _read_early(error.name) from error
            raise
        finally:
            held.update((n, x) for n, x in before.items() if held.get(n, hidden[n]) is hidden[n])

    # ------------------------------------------------------------------ telling others

    def changes(self, visit: Visit, filled: Callable[[Any], Any], what: str) -> list[Change]:
        """Return what others are told of a run of the last stage.

        Args:
            visit: what :meth:`begin` returned.
            filled: gives the tensors for what stands for them.
            what: name of the step, for the user.
        """
        told = []
        for change in _changes(self._changed_since(visit), visit):
            if change.name in self._secret:
                continue
            if not _can_be_told(change):
                self._secret.add(change.name)
                self._say(
                    f"self.{change.name}, which {what} sets, is kept by the worker of the last "
                    "stage alone: it is large, or cannot be sent. A hook that reads it on another "
                    "rank finds what was there before."
                )
                continue
            value = filled(change.value)
            told.append(change._replace(value=map_tensors(Tensor.detach, value)))
            held, name = self._holder(change)
            if isinstance(held[name], list):
                held[name][-len(value) :] = value
            else:
                held[name] = value
        return told

    def adopt(self, t: int, tensors: Sequence[Tensor], facts: Any) -> None:
        """Take over what the last stage changed in step ``t``.

        Args:
            t: the step.
            tensors: as :func:`packed` returned them.
            facts: the same.

        Raises:
            StepError: an attribute that several stages change.
        """
        given = iter(tensors)
        for i, changes in facts:
            own = self._own.pop((t, i), {})
            for change in [_unpacked(data, given) for data in changes]:
                held, name = self._holder(change)
                if change.name in self._changed:
                    if own.get((change.name, change.key)) != _comparable(change):
                        raise _refused(change.name, "changed", "in the code of several stages")
                    continue
                self._told.add(change.name)
                if change.grew:
                    held[name].extend(change.value)
                else:
                    held[name] = change.value

    def _holder(self, change: Change) -> tuple[dict[Any, Any], Any]:
        held = vars(self._module)
        return (held, change.name) if change.key is None else (held[change.name], change.key)

    # ------------------------------------------------------------------ what there is

    def changing_within(self, j: int, path: str) -> list[Tensor]:
        """Return the buffers of a module of a stage that its runs change."""
        if not (names := self._changing(j)):
            return []
        return [self._module.get_buffer(n) for n in names if is_inside(n, {path})]

    def _changing(self, j: int) -> list[str]:
        return [n for n in self._cuts.buffers[j] if n in self._cuts.changed]

    def _copies(self, buffers: Sequence[str]) -> list[Tensor]:
        return [self._module.get_buffer(n).detach().clone() for n in buffers]

    def _mine(self) -> list[tuple[str, Any]]:
        return [(n, x) for n, x in vars(self._module).items() if n not in self._ignored]

    def _seen(self) -> Seen:
        attributes = {n: _keep(x) for n, x in self._mine()}
        return Seen(attributes, self._copies(self._buffers), [])

    def _changed_since(self, visit: Visit) -> dict[str, Any]:
        before = visit.found.attributes
        return {n: x for n, x in self._mine() if n not in before or _differs(before[n], x)}

    def _put_back(self, seen: Seen) -> None:
        held = vars(self._module)
        for name, _ in self._mine():
            if name not in seen.attributes:
                del held[name]
        for name, x in seen.attributes.items():
            if name not in held or _differs(x, held[name]):
                held[name] = _refilled(x)
        self._put_buffers(self._buffers, seen.buffers)

    def _put_buffers(self, names: Sequence[str], values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for name, value in zip(names, values, strict=False):
                if not torch.equal(buffer := self._module.get_buffer(name), value):
                    buffer.copy_(value)  # else graphs that hold it would notice


_REMEMBERED = ("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced")


def state_of(metric: nn.Module) -> dict[str, Any]:
    """Return a copy of a torchmetrics metric's state and of what it knows of its last batch."""
    names = [*metric.__dict__["_defaults"], *_REMEMBERED]
    values = {n: getattr(metric, n) for n in names if hasattr(metric, n)}
    return {
        n: x.detach().clone() if isinstance(x, Tensor)
        else copy.copy(x) if isinstance(x, list | Mapping) else x
        for n, x in values.items()
    }  # fmt: skip


# ---------------------------------------------------------------------- values


def _keep(value: Any) -> Kept:
    if type(value) in _ATOMS:  # which most are, in every run
        return Kept(value, None)
    if isinstance(value, _ORDERED):
        return Kept(value, list(value))
    if isinstance(value, set):
        return Kept(value, set(value))
    if isinstance(value, dict):
        return Kept(value, {k: _keep(x) for k, x in value.items()})
    return Kept(value, version(value))


def _refilled(x: Kept, *, anew: bool = False) -> Any:
    """Let a container have again what it had, or make one of its type; a tensor stays changed."""
    if not isinstance(x.value, (*_ORDERED, set, dict)):
        return x.value
    made, items = copy.copy(x.value) if anew else x.value, x.inside  # of its length and default
    if isinstance(made, dict):
        items = {k: _refilled(y, anew=anew) for k, y in items.items()}
    refill(made, items)
    return made


def _differs(x: Kept, value: Any) -> bool:
    """Say whether a value is another than it was; of lists, by their ends."""
    if x.value is not value or x.inside is None:
        return x.value is not value
    if isinstance(value, set):
        return len(value) != len(x.inside)
    if isinstance(value, _ORDERED):
        same = len(value) == len(x.inside)
        return not (same and (not value or x.inside[-1] is value[-1]))
    if isinstance(value, dict):
        return x.inside.keys() != value.keys() or any(
            _differs(y, value[k]) for k, y in x.inside.items()
        )
    return bool(x.inside != version(value))


def _moved(name: str, x: Kept, visit: Visit) -> Any:
    """Return what a stage has for its next run, apart from what hooks see."""
    shown = visit.shown.attributes.get(name)
    if shown is None or x.value is not shown.value:
        return x.value
    if isinstance(x.value, Tensor):
        raise StepError(
            f"self.{name}, a tensor, is changed in place by training_step, which this worker "
            "runs once for each of its stages; allowed: a new tensor each time, or a buffer; "
            f"use self.register_buffer({name!r}, ...)"
        )
    return _refilled(x, anew=True)


def _changes(changed: Mapping[str, Any], visit: Visit) -> list[Change]:
    before = visit.found.attributes
    return [c for name, x in changed.items() for c in _change(name, None, x, before.get(name))]


def _change(name: str, key: Any, value: Any, before: Kept | None) -> list[Change]:
    if before is None or before.value is not value:
        return [Change(name, key, False, value)]
    if type(value) is list:
        num = len(before.inside)
        grew = len(value) > num and (not num or before.inside[-1] is value[num - 1])
        return [Change(name, key, grew, value[num:] if grew else value)]
    if key is not None or not isinstance(value, dict) or before.inside.keys() - value.keys():
        return [Change(name, key, False, value)]
    pairs = ((k, x, before.inside.get(k)) for k, x in value.items())
    return [c for k, x, y in pairs if y is None or _differs(y, x) for c in _change(name, k, x, y)]


def _comparable(change: Change) -> Any:
    """Return what of a change workers can compare that have both made it: no tensors."""
    if change.grew:
        return len(change.value)
    return change.value if isinstance(change.value, bool | int | float | str) else None


def _can_be_told(change: Change) -> bool:
    leaves = flatten(change.value)[0]
    size = sum(x.numel() for x in leaves if isinstance(x, Tensor))
    is_small = change.grew or size <= _MANY
    return is_small and all(isinstance(x, Tensor) or is_plain(x) for x in leaves)


def _read_early(name: str) -> StepError:
    return _refused(
        name, "read", "in the code of one stage, and changed in that of a later one, which is a "
        "micro-batch behind by then",
    )  # fmt: skip


def _refused(name: str, how: str, where: str) -> StepError:
    return StepError(
        f"self.{name} is {how} by training_step {where}; allowed: all in one stage; keep it in a "
        "buffer (register_buffer), or move the code that uses it together"
    )


# ---------------------------------------------------------------------- on the wire

_NUMBERS = {
    "bool": (bool, torch.int64),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}


def packed(told: Mapping[int, Sequence[Change]]) -> tuple[list[Tensor], Any]:
    """Return changes, by micro-batch, as tensors and JSON.

    Numbers are tensors, too: messages that differ in these alone have one form.
    """
    tensors: list[Tensor] = []
    return tensors, [[i, [_packed(c, tensors) for c in changes]] for i, changes in told.items()]


def _packed(change: Change, tensors: list[Tensor]) -> list[Any]:
    leaves, structure = flatten(change.value)
    kinds: list[Any] = []
    for x in leaves:
        kind = type(x).__name__
        is_number = type(x) in (bool, float) or (type(x) is int and abs(x) < 1 << 62)
        if isinstance(x, Tensor) or is_number:
            tensors.append(torch.tensor(x, dtype=_NUMBERS[kind][1]) if is_number else x)
            kinds.append(kind if is_number else "")
        else:
            kinds.append([leaf_to_data(x, f"self.{change.name}")])
    told = structure_to_data(structure, f"self.{change.name}")
    return [change.name, leaf_to_data(change.key), change.grew, told, kinds]


def _unpacked(data: Any, given: Iterator[Tensor]) -> Change:
    name, key, grew, structure, kinds = data
    leaves = [
        leaf_from_data(kind[0]) if isinstance(kind, list)
        else _NUMBERS[kind][0](next(given).item()) if kind else next(given)
        for kind in kinds
    ]  # fmt: skip
    value = unflatten(structure_from_data(structure), leaves)
    return Change(name, leaf_from_data(key), grew, value)
