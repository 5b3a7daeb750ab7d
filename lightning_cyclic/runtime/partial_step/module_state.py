"""What the user's step keeps on the module: lists of outputs, counters, moving means.

A worker runs the step once for each of its stages, and ends it where the stage ends. So

    the last stage    passes all code of the step; what it changes is told to the other workers
    other stages      what their part of the step changes, their next run finds again
    a run again       finds what the first run found, and leaves nothing behind

So it is with buffers that code between modules changes. Other buffers and metrics are no concern
of this file, nor are attributes of modules inside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.partial_step.attributes import (
    ORDERED,
    Attributes,
    Kept,
    differs,
    keep,
    made_of,
    restore,
)
from lightning_cyclic.runtime.plain_copies import ours
from lightning_cyclic.runtime.values.plain import (
    is_plain,
    leaf_from_data,
    leaf_to_data,
    structure_from_data,
    structure_to_data,
)
from lightning_cyclic.runtime.values.trees import flatten, map_tensors, unflatten

_MANY = 1024  # elements of tensors that each step sets anew, and that others are not told
_RULE = (
    "what training_step keeps on the module may be read and changed by the code of one stage "
    "alone; keep it in a buffer (register_buffer), or move the code that uses it together"
)


class Change(NamedTuple):
    """Hold what a run of the step changed.

    Args:
        name: of the attribute.
        key: of what changed in it, where it is a dictionary; else None.
        grew: whether a list has more items, and these are the value; else the value is new.
        value: without a graph.
    """

    name: str
    key: Any
    grew: bool
    value: Any


class Visit(NamedTuple):
    """Hold what the module had when a run began: for hooks, and for the run."""

    shown: Attributes
    found: Attributes
    buffers_shown: list[Tensor]  # copies
    buffers_found: list[Tensor]


class Found(NamedTuple):
    """Hold what a run again is to find."""

    attributes: dict[str, Kept]
    buffers: list[Tensor]


_NOTHING_FOUND = Found({}, [])
_NOT_NOTING: AbstractContextManager[None] = nullcontext()


@final
class ModuleState:
    """Keep the attributes of a module as if the whole step were run for each micro-batch.

    Args:
        module: the user's.
        ignored: names of attributes that are not the user's.
        stages: of this worker.
        num_stages: of the module.
        say: tells the user what happens.
        buffers: names of those that code between modules changes.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: Collection[str],
        stages: Sequence[int],
        num_stages: int,
        say: Callable[[str], None],
        buffers: Collection[str] = (),
    ) -> None:
        self._buffers = sorted(buffers)
        self._buffers_apart: dict[int, list[Tensor]] = {}
        self._buffers_left: list[Tensor] = []  # what hooks found behind the last run
        self._module = module
        self._ignored = frozenset(ignored)
        self._names: tuple[str, ...] = ()  # of the user's, while there are so many attributes
        self._num_attributes = -1
        self._seen: Attributes | None = None  # last, in this step
        self._last = num_stages - 1
        self._say = say
        self._apart: dict[int, dict[str, Any]] = {j: {} for j in stages if j != max(stages)}
        self._changed: set[str] = set()  # by runs on this worker
        self._left: dict[str, Kept] = {}  # of these, behind the last run, before hooks
        self._tells = self._last in stages
        self._looked: set[bool] = set()
        self._read: set[str] = set()  # by first runs that end before the last stage
        self._set: dict[str, set[int]] = {}  # by first runs: attribute -> stages
        self._grown: dict[tuple[int, int], dict[tuple[str, Any], int]] = {}  # by micro-batch
        self._secret: set[str] = set()  # attributes that others are not told

    # ------------------------------------------------------------------ runs

    def begin(self, j: int) -> Visit:
        """Let the module have what runs of stage ``j`` left, before the next one."""
        shown = self._attributes()
        if not (self._changed or self._buffers):  # nothing has ever been kept
            return Visit(shown, shown, [], [])
        kept, buffers = self._apart.get(j), self._buffers_now()
        if kept is None:
            return Visit(shown, shown, buffers, buffers)
        for name, x in self._left.items():  # what a hook has changed, all stages follow
            if name in kept and (name not in shown.kept or differs(x, shown.kept[name].value)):
                del kept[name]
        vars(self._module).update(kept)
        if not all(map(torch.equal, self._buffers_left, buffers)):
            self._buffers_apart.clear()
        found = self._buffers_apart.get(j, buffers)
        self._put_buffers(found)
        return Visit(shown, self._attributes() if kept else shown, buffers, found)

    def begin_anew(self, visit: Visit) -> None:
        """Take back what a run has changed that begins once more."""
        self._put_back(visit.found)
        self._put_buffers(visit.buffers_found)

    def end(self, j: int, visit: Visit, of: tuple[int, int] | None = None) -> Found:
        """Keep what a run changed.

        Args:
            j: its stage.
            visit: what :meth:`begin` returned.
            of: step and micro-batch, where it ended before the last stage: by how much it has let
                lists grow is to be compared with what the last stage does.

        Returns:
            What a run again is to find.
        """
        changed = self._changed_since(visit)
        if of is not None:
            self._grown[of] = {
                (c.name, c.key): len(c.value)
                for name, value in changed.items()
                for c in _changes(name, value, visit.found.kept.get(name))
                if c.grew
            }
        self._changed |= changed.keys()
        if not (self._changed or self._buffers):
            return _NOTHING_FOUND
        kept = self._apart.get(j)
        if kept is None:
            now = dict(zip(self._names, self._values(), strict=True)) if self._changed else {}
            self._left = {n: keep(now[n]) for n in self._changed if n in now}
            self._buffers_left = self._buffers_now() if self._apart else []
        elif changed or kept:
            kept.update({n: self._moved(n, keep(x), visit) for n, x in changed.items()})
            self._put_back(visit.shown)
        if kept is not None:
            self._buffers_apart[j] = self._buffers_now()
            self._put_buffers(visit.buffers_shown)
        before = visit.found.kept
        found = {n: before[n] for n in self._changed if n in before}
        return Found(found, visit.buffers_found)

    def forget(self) -> None:
        """Let go of what attributes were in this step: hooks may want it to be free."""
        self._seen = None

    @contextmanager
    def again(self, found: Found) -> Iterator[None]:
        """Run the body, a run again, with what the first run found; nothing of it stays."""
        if not (found.attributes or found.buffers):
            yield
            return
        shown, buffers = self._attributes(), self._buffers_now()
        vars(self._module).update({n: made_of(x) for n, x in found.attributes.items()})
        self._put_buffers(found.buffers)
        try:
            yield
        finally:
            self._put_back(shown)
            self._put_buffers(buffers)

    def noting(self, *, training: bool, region: Callable[[], int]) -> AbstractContextManager[None]:
        """Note what the first run, which the body makes, looks at and sets.

        Args:
            training: of training, or of evaluation.
            region: returns the stage whose code is under way.
        """
        if training in self._looked:
            return _NOT_NOTING
        self._looked.add(training)
        return self._noting(region)

    @contextmanager
    def _noting(self, region: Callable[[], int]) -> Iterator[None]:
        kind, read, written = type(self._module), self._read, self._set

        def look(module: nn.Module, name: str) -> Any:
            read.add(name)
            return kind.__getattribute__(module, name)

        def put(module: nn.Module, name: str, value: Any) -> None:
            written.setdefault(name, set()).add(region())
            kind.__setattr__(module, name, value)

        names: dict[str, Any] = {
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
            "__setattr__": put,
        }
        if not self._tells:
            names["__getattribute__"] = look
        self._module.__class__ = ours(type(kind.__name__, (kind,), names), kind)
        try:
            yield
        finally:
            self._module.__class__ = kind
            region = _nowhere  # the class lives until garbage is collected; what is run does not

    # ------------------------------------------------------------------ telling others

    def changes(self, visit: Visit, filled: Callable[[Any], Any], what: str) -> list[Change]:
        """Return what others are told of a run of the last stage.

        Args:
            visit: what :meth:`begin` returned.
            filled: gives the tensors for what stands for them.
            what: name of the step, for the user.

        Raises:
            StepError: an attribute that the code of several stages sets.
        """
        found = [
            change
            for name, value in self._changed_since(visit).items()
            if name not in self._secret
            for change in _changes(name, value, visit.found.kept.get(name))
        ]
        for name in {change.name for change in found}:
            if len(self._set.get(name, ())) > 1:
                raise _several(name)
        told = []
        for change in found:
            if not _can_be_told(change):
                self._secret.add(change.name)
                self._say(
                    f"self.{change.name}, which {what} sets, is kept by the worker of the last "
                    "stage alone: it is large, or cannot be sent. A hook that reads it on another "
                    "rank finds what was there before."
                )
                continue
            told.append(change._replace(value=map_tensors(Tensor.detach, filled(change.value))))
            self._fill(change, filled)
        return told

    def adopt(self, t: int, tensors: Sequence[Tensor], facts: Any) -> None:
        """Take over what the last stage changed in step ``t``.

        Args:
            t: the step.
            tensors: as :func:`packed` returned them.
            facts: the same.

        Raises:
            StepError: an attribute that several stages change, or that an earlier one reads.
        """
        given = iter(tensors)
        for i, changes in facts:
            grown = self._grown.pop((t, i), {})
            for name, key, grew, structure, kinds in changes:
                leaves = [_Leaf(x, next(given) if isinstance(x, str) else None) for x in kinds]
                num = len(structure_from_data(structure).children) if grew else None
                if name not in self._changed:
                    self._check_unread(name)
                    made = unflatten(structure_from_data(structure), [x.value for x in leaves])
                    self._take(Change(name, key, grew, made))
                elif grew and grown.get((name, key)) != num:
                    raise _several(name)

    def _check_unread(self, name: str) -> None:
        if name in self._read:
            raise StepError(
                f"self.{name} is read by the code of one stage and changed by that of a later "
                "one, which is a micro-batch behind by then; allowed: both in one stage; "
                f"{_RULE}"
            )

    def _take(self, change: Change) -> None:
        attributes = vars(self._module)
        name, key, grew, value = change
        if key is not None:
            attributes, name = attributes[name], key
        if isinstance(attributes.get(name), deque) and not grew:
            attributes[name].clear()
            grew = True
        if grew:
            attributes[name].extend(value)
        else:
            attributes[name] = value

    def _fill(self, change: Change, filled: Callable[[Any], Any]) -> None:
        """Replace what stands for tensors where the step has kept it."""
        attributes = vars(self._module)
        name, key, grew, value = change
        if key is not None:
            attributes, name = attributes[name], key
        if isinstance(attributes[name], ORDERED) and isinstance(value, list):
            for k, x in enumerate(filled(value), start=-len(value)):
                attributes[name][k] = x
        else:
            attributes[name] = filled(value)

    # ------------------------------------------------------------------ buffers

    def _buffers_now(self) -> list[Tensor]:
        return [self._module.get_buffer(n).detach().clone() for n in self._buffers]

    def _put_buffers(self, values: Sequence[Tensor]) -> None:
        if not self._buffers:  # no context costs nothing
            return
        with torch.no_grad():
            for name, value in zip(self._buffers, values, strict=True):
                if not torch.equal(buffer := self._module.get_buffer(name), value):
                    buffer.copy_(value)  # else graphs that hold it would notice

    # ------------------------------------------------------------------ attributes

    def _values(self) -> tuple[Any, ...]:
        """Return the values of what is the user's, whose names are at hand behind it."""
        attributes = vars(self._module)
        if len(attributes) == self._num_attributes:
            try:
                return tuple(map(attributes.__getitem__, self._names))
            except KeyError:  # one has gone, and another come
                pass
        self._num_attributes = len(attributes)
        self._names = tuple(n for n in attributes if n not in self._ignored)
        return tuple(map(attributes.__getitem__, self._names))

    def _attributes(self) -> Attributes:
        values = self._values()
        if self._seen is None or not self._seen.hold(self._names, values):
            self._seen = Attributes(self._names, values)
        return self._seen

    def _changed_since(self, visit: Visit) -> dict[str, Any]:
        """Return what a run has changed or set."""
        values = self._values()
        return visit.found.changed(self._names, values)

    def _moved(self, name: str, x: Kept, visit: Visit) -> Any:
        """Return what a stage has for its next run, apart from what hooks see."""
        shown = visit.shown.kept.get(name)
        if shown is None or x.value is not shown.value:
            return x.value
        if isinstance(x.value, Tensor):
            raise StepError(
                f"self.{name}, a tensor, is changed in place by training_step, which this worker "
                "runs once for each of its stages; allowed: a new tensor each time, or a buffer; "
                f"use self.register_buffer({name!r}, ...)"
            )
        return made_of(x)

    def _put_back(self, attributes: Attributes) -> None:
        held = vars(self._module)
        self._values()
        for name in set(self._names) - attributes.kept.keys():
            del held[name]
        for name, x in attributes.kept.items():
            if name not in held or differs(x, held[name]):
                restore(x)
                held[name] = x.value


def _changes(name: str, value: Any, before: Kept | None) -> list[Change]:
    """Return how a value became what it is."""
    if before is None or before.value is not value or not isinstance(value, (*ORDERED, dict)):
        return [Change(name, None, False, value)]
    if isinstance(value, ORDERED):
        items, num = list(value), len(before.inside)
        grew = len(items) > num and all(map(_is, before.inside[-1:], items[num - 1 : num]))
        whole = items if isinstance(value, deque) else value  # whoever has one refills it
        return [Change(name, None, grew, items[num:] if grew else whole)]
    if before.inside.keys() - value.keys():
        return [Change(name, None, False, value)]
    return [
        Change(name, key, change.grew, change.value)
        for key, x in value.items()
        if key not in before.inside or differs(before.inside[key], x)
        for change in _changes(name, x, before.inside.get(key))[:1]
    ]


def _several(name: str) -> StepError:
    return StepError(
        f"self.{name} is changed by training_step in the code of several stages; allowed: one of "
        f"them; {_RULE}"
    )


# ---------------------------------------------------------------------- on the wire

_NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.int64), "int": (int, torch.int64), "float": (float, torch.float64),
}  # fmt: skip


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
        number = _NUMBERS.get(type(x).__name__)
        if isinstance(x, Tensor):
            tensors.append(x)
            kinds.append("")
        elif number is not None and type(x) is number[0] and _fits(x):
            tensors.append(torch.tensor(x, dtype=number[1]))
            kinds.append(type(x).__name__)
        else:
            kinds.append([leaf_to_data(x, f"self.{change.name}")])
    return [change.name, change.key, change.grew, structure_to_data(structure), kinds]


def _fits(x: Any) -> bool:
    return not isinstance(x, int) or abs(x) < 1 << 62


class _Leaf(NamedTuple):
    kind: Any
    tensor: Tensor | None

    @property
    def value(self) -> Any:
        if self.tensor is None:
            return leaf_from_data(self.kind[0])
        number = _NUMBERS.get(self.kind)
        return self.tensor if number is None else number[0](self.tensor.item())


def _nowhere() -> int:
    raise AssertionError("nothing is run")


def _is(a: Any, b: Any) -> bool:
    return a is b


def _can_be_told(change: Change) -> bool:
    leaves = flatten(change.value)[0]
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    is_small = change.grew or sum(x.numel() for x in tensors) <= _MANY
    return is_small and all(isinstance(x, Tensor) or is_plain(x) for x in leaves)
