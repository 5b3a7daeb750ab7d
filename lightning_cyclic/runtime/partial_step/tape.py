"""The tape: what happened in a region of a step, for those who only pretend to run it.

An *event* is one call of a unit (a module with parameters), or of a torch function on a tensor
that depends on one. The worker that runs a region for real writes down each event's name and what
it gave back (the *record*); other workers read it in place of computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple, final
from weakref import ref

from torch import Tensor

from lightning_cyclic.runtime.partial_step.ghosts import Handle
from lightning_cyclic.runtime.partial_step.sharing import Sharing
from lightning_cyclic.runtime.values.plain import (
    TensorSpec,
    leaf_from_data,
    leaf_to_data,
    spec_from_data,
    spec_to_data,
    structure_from_data,
    structure_to_data,
)
from lightning_cyclic.runtime.values.trees import LEAF, Structure, flatten, tensors


class Alias(NamedTuple):
    """Stand for an output that is one of the inputs, by its place among their tensors."""

    place: int


class Plain(NamedTuple):
    """Hold an output that is no tensor."""

    value: Any


Out = TensorSpec | Alias | Plain


class Event(NamedTuple):
    """Hold one event.

    Args:
        name: path of a unit with "()", or name of a torch function.
        mutated: inputs known to every worker that the event changed in place, by their place.
    """

    name: str
    structure: Structure
    outs: tuple[Out, ...]
    mutated: tuple[int, ...] = ()
    is_read: bool = False


Tape = tuple[Event, ...]  # of one region
DRAWS = Event("(draws)", LEAF, ())
"""The last event of a region whose code between units draws what depends on nothing but keys."""
DRAWS_PLAINLY = Event("(draws plainly)", LEAF, ())
"""Behind it, if Python's or numpy's own generators have drawn in the region; not of its path."""


def describe(
    name: str, result: Any, inputs: Sequence[Tensor], mutated: tuple[int, ...]
) -> tuple[Event, list[Any]]:
    """Describe what a call gave back.

    Returns:
        The event, and the leaves of the result.
    """
    leaves, structure = flatten(result)
    outs = tuple(_out(leaf, inputs) for leaf in leaves)
    return Event(name, structure, outs, mutated), leaves


def is_again(event: Event, name: str, result: Any, inputs: Sequence[Tensor]) -> bool:
    """Say whether a call that changed no input was an event that is known to give a new tensor.

    It costs much less than to describe the call; events that give anything else are not known.
    """
    if type(result) is not Tensor or event.name != name or len(event.outs) != 1:
        return False
    if (
        event.mutated
        or event.structure is not LEAF
        or type(spec := event.outs[0]) is not TensorSpec
    ):
        return False
    return True not in map(is_, inputs, repeat(result)) and spec.describes(result)


def _out(leaf: Any, inputs: Sequence[Tensor]) -> Out:
    if not isinstance(leaf, Tensor):
        return Plain(leaf)
    for index, x in enumerate(inputs):
        if x is leaf:
            return Alias(index)
    return TensorSpec.of(leaf)


def names(tape: Tape) -> tuple[str, ...]:
    """Return the names of the events: the path that the code took."""
    return tuple(event.name for event in tape if event.name != DRAWS_PLAINLY.name)


# ---------------------------------------------------------------------- as data


def tape_to_data(tape: Tape) -> list[Any]:
    return [
        [
            e.name,
            structure_to_data(e.structure),
            [_out_to_data(out) for out in e.outs],
            list(e.mutated),
            e.is_read,
        ]
        for e in tape
    ]


def tape_from_data(data: Sequence[Any]) -> Tape:
    return tuple(
        Event(
            name,
            structure_from_data(structure),
            tuple(map(_out_from_data, outs)),
            tuple(mutated),
            is_read,
        )
        for name, structure, outs, mutated, is_read in data
    )


def _out_to_data(out: Out) -> list[Any]:
    if isinstance(out, TensorSpec):
        return ["t", *spec_to_data(out)]
    if isinstance(out, Alias):
        return ["a", out.place]
    return ["p", leaf_to_data(out.value)]


def _out_from_data(data: Sequence[Any]) -> Out:
    kind, *rest = data
    if kind == "t":
        return spec_from_data(rest)
    return Alias(rest[0]) if kind == "a" else Plain(leaf_from_data(rest[0]))


MARK = "_cyclic_made"  # on a tensor: (number of the run, handle)
OWNED = 0  # in place of a number: a buffer of one stage, which others may not look at
_UNNAMED: Handle = (-1, -1, -1)  # of tensors of the last stage, which nobody asks for


class Delivery(NamedTuple):
    """Hold what a run needs from the begin of its stage on.

    Args:
        wanted: handles of what later stages need; None while that is being learnt: everything
            that is alive when the stage ends.
        path: names of the stage's events for which that holds; None for any.
        tape: what the stage's events are likely to be: on that path, if there is one.
        sharing: looks after tensors that came and shared memory.
    """

    came: Mapping[Handle, Tensor]
    wanted: frozenset[Handle] | None
    path: tuple[str, ...] | None
    tape: Tape
    sharing: Sharing


@final
class Record:
    """Write down the events of a stage; for the last, which nobody is told of, mark tensors."""

    def __init__(self, number: int, region: int, *, is_last: bool) -> None:
        self.tape: list[Event] = []
        self.captured: dict[Handle, Tensor] = {}
        self.has_strayed = False
        self._number = number
        self._region = region
        self._is_last = is_last
        self._wanted: frozenset[Handle] | None = None
        self._path: tuple[str, ...] | None = None
        self._likely: Tape = ()
        self._made: list[tuple[Handle, ref[Tensor]]] = []

    def expect(self, delivery: Delivery) -> None:
        _, self._wanted, self._path, self._likely, _ = delivery

    def write(
        self, name: str, result: Any, inputs: Sequence[Tensor], mutated: Sequence[int]
    ) -> Any:
        """Write down a call, and return its result."""
        if self._is_last:
            for x in (result,) if isinstance(result, Tensor) else tensors(result):
                setattr(x, MARK, (self._number, _UNNAMED))
            return result
        n = len(self.tape)
        if n < len(self._likely) and not mutated:
            event = self._likely[n]
            if is_again(event, name, result, inputs):
                self.tape.append(event)
                self._note((self._region, n, 0), result)
                return result
        event, leaves = describe(name, result, inputs, tuple(mutated))
        _check_plain(event)
        self.tape.append(event)
        for k, (out, leaf) in enumerate(zip(event.outs, leaves, strict=True)):
            if type(out) is TensorSpec:
                self._note((self._region, n, k), leaf)
        for k in mutated:
            self._note((self._region, n, -1 - k), inputs[k])
        return result

    def write_read(self, name: str) -> None:
        if not self._is_last:
            self.tape.append(Event(name, LEAF, (), (), True))

    @property
    def likely_draws_plainly(self) -> bool:
        """Say whether the region's last run has drawn from Python's or numpy's own generators."""
        return self._likely[-1:] == (DRAWS_PLAINLY,)

    def end(self, came: Mapping[Handle, Tensor], *, draws: bool, draws_plainly: bool) -> bool:
        """Capture what later stages need, while the frames of the user's code still hold it.

        Args:
            came: what entered the stage.
            draws: whether its code between units draws what depends on nothing but keys.
            draws_plainly: whether anything in it draws from Python's or numpy's own generators.

        Returns:
            Whether that is known, and nothing else was captured.
        """
        if draws:
            self.tape.append(DRAWS)
        if draws_plainly:
            self.tape.append(DRAWS_PLAINLY)
        tape = tuple(self.tape)
        if self._path is not None and (not self._likely or tape != self._likely):
            self.has_strayed = names(tape) != self._path
        wanted = None if self.has_strayed else self._wanted
        if wanted is None:
            alive = ((handle, reference()) for handle, reference in self._made)
            self.captured = {handle: x for handle, x in alive if x is not None}
            for x in self.captured.values():
                x._fix_weakref()  # type: ignore[attr-defined] # as TensorWeakRef, dearer to make
        self.captured |= {h: x for h, x in came.items() if wanted is None or h in wanted}
        return wanted is not None

    def _note(self, handle: Handle, x: Tensor) -> None:
        setattr(x, MARK, (self._number, handle))
        self._made.append((handle, ref(x)))
        if self._wanted is not None and handle in self._wanted:
            self.captured[handle] = x


def _check_plain(event: Event) -> None:
    """Refuse outputs that the workers of later stages cannot be told of."""
    for out in event.outs:
        if isinstance(out, Plain):
            leaf_to_data(out.value, f"what {event.name} returned")
