"""The tape: what happened in a region of a step, for those who only pretend to run it.

An *event* is one call of a unit (a module with parameters), or of a torch function on a tensor
that depends on one. The worker that runs a region for real writes down each event's name and what
it gave back; other workers read it in place of computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from lightning_cyclic.runtime.values.plain import (
    leaf_from_data,
    leaf_to_data,
    structure_from_data,
    structure_to_data,
)
from lightning_cyclic.runtime.values.specs import TensorSpec, spec_from_data, spec_to_data
from lightning_cyclic.runtime.values.trees import LEAF, Structure, flatten


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
        structure: of what was given back.
        outs: its leaves.
        mutated: inputs known to every worker that the event changed in place, by their place.
        is_read: whether a value went to Python.
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
    """Return plain data that JSON can hold."""
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
    """Make a tape from what :func:`tape_to_data` returned."""
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
