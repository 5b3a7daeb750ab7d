"""Replays: what the events of a tape gave, given again as ghosts.

Ghosts are made once for a tape, and serve in every run that passes its region. One that the
user's code has kept beyond a run, or has written something on, is left to it, with its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any, final
from weakref import getweakrefcount

from torch import Tensor

from lightning_cyclic.runtime.partial_step.ghosts import NUM_ATTRIBUTES, Ghost, Handle
from lightning_cyclic.runtime.partial_step.tape import (
    DRAWS,
    DRAWS_PLAINLY,
    Alias,
    Event,
    Plain,
    Tape,
)
from lightning_cyclic.runtime.values.plain import TensorSpec
from lightning_cyclic.runtime.values.trees import unflatten

if TYPE_CHECKING:
    from lightning_cyclic.runtime.partial_step.call_router import CallRouter

_sample = [object()]
_ALONE = getrefcount(_sample[0])  # what is counted of an object that one list alone holds


def _count_here() -> int:
    x = _sample[0]
    return getrefcount(x)


_ALONE_BUT_HERE = _count_here()  # and a function that has just taken it from there


@final
class Replay:
    """Pretend that a region of the user's step is run, event by event."""

    def __init__(self, region: int, tape: Tape, router: CallRouter) -> None:
        self.tape = tape
        self.needs_watch = True  # until it has been seen that ghosts alone see every event
        self.draws_plainly = tape[-1:] == (DRAWS_PLAINLY,)
        tape = tape[:-1] if self.draws_plainly else tape
        draws = tape[-1:] == (DRAWS,)
        self._events = tape[:-1] if draws else tape
        self._watch_always = draws or any(e.mutated for e in self._events)
        self._all_seen = False
        self._region = region
        self._router = router
        self._position = 0
        self._names = [*(None if e.is_read else e.name for e in self._events), None]
        self._ghosts: list[list[Ghost | None]] = [[None] * len(e.outs) for e in self._events]
        single = map(_gives_one_ghost, self._events)
        self._single = [g if yes else [None] for g, yes in zip(self._ghosts, single, strict=True)]
        self._single.append([None])  # behind the last event
        self._filled: list[tuple[int, int]] = []

    def begin(self) -> None:
        self._position, self._all_seen = 0, not self._watch_always

    def note_unseen(self) -> None:
        """Note that an event would not have been seen if nobody had watched torch functions."""
        self._all_seen = False

    def end(self) -> bool:
        if self._all_seen:
            self.needs_watch = False
        return self._position == len(self._events)

    @property
    def expected(self) -> Event | None:
        is_over = self._position == len(self._events)
        return None if is_over else self._events[self._position]

    def ghost(self, name: str) -> Ghost | None:
        """Return what the next event gave, if it has this name and a ghost is at hand for it."""
        n = self._position
        ghost = self._single[n][0]
        if (
            ghost is not None
            and self._names[n] == name
            and getrefcount(ghost) == _ALONE_BUT_HERE
            and len(ghost.__dict__) == NUM_ATTRIBUTES  # is_as_made, without a call
            and not getweakrefcount(ghost)
        ):
            self._position = n + 1
            return ghost
        return None

    def next(self, name: str) -> Event | None:
        if self._names[self._position] != name:
            return None
        self._position += 1
        return self._events[self._position - 1]

    def place(self, k: int) -> Handle:
        """Return the handle of a leaf of the event that was the last."""
        return self._region, self._position - 1, k

    def value(self, inputs: Sequence[Tensor]) -> Any:
        """Return what the last event gave, for what it was given."""
        event = self._events[self._position - 1]
        leaves: list[Any] = []
        for k, out in enumerate(event.outs):
            if isinstance(out, Alias):
                leaves.append(inputs[out.place])
            else:
                leaves.append(out.value if isinstance(out, Plain) else self._ghost(k, out))
        return unflatten(event.structure, leaves)

    def _ghost(self, k: int, spec: TensorSpec) -> Ghost:
        """Return the ghost of a leaf: the one that was made before, if nobody else has it."""
        ghosts = self._ghosts[self._position - 1]
        if getrefcount(ghosts[k]) == _ALONE:
            ghost = ghosts[k]
            if ghost is not None and ghost.is_as_made and not getweakrefcount(ghost):
                return ghost
        made = ghosts[k] = Ghost(spec, self.place(k), self._router.device, self._router)
        return made

    def fill(self, handle: Handle, x: Tensor) -> None:
        _, n, k = handle
        if k >= 0 and (ghost := self._ghosts[n][k]) is not None:  # else it is of the batch
            ghost.value = x
            self._filled.append((n, k))

    def release(self) -> None:
        """Let go of what came, behind the run; but for ghosts that somebody else has."""
        for n, k in self._filled:
            ghosts = self._ghosts[n]
            if getrefcount(ghosts[k]) == _ALONE:
                ghosts[k].value = None  # type: ignore[union-attr]
            else:
                ghosts[k] = None
        self._filled.clear()


def _gives_one_ghost(event: Event) -> bool:
    is_leaf = event.structure.kind is None and not event.mutated
    return is_leaf and tuple(map(type, event.outs)) == (TensorSpec,)
