"""Replays: what the events of a tape gave, given again as ghosts.

Moulds of ghosts are made once for a tape, and serve in every run that passes its region. Ghosts
are fresh in each, as the user's code may keep one beyond a run, or write something on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from lightning_cyclic.runtime.partial_step.ghosts import Ghost, Handle, Mould
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
        self._moulds = [
            [self._mould((region, n, k), out) for k, out in enumerate(e.outs)]
            for n, e in enumerate(self._events)
        ]
        single = map(_gives_one_ghost, self._events)
        self._single = [x[0] if yes else None for x, yes in zip(self._moulds, single, strict=True)]
        self._single.append(None)  # behind the last event
        self._ghosts: dict[Handle, Ghost] = {}  # of the run under way

    def _mould(self, handle: Handle, out: Any) -> Mould | None:
        router = self._router
        return Mould(out, handle, router.device, router) if isinstance(out, TensorSpec) else None

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
        """Return what the next event gave, if it has this name and gave one tensor, made anew."""
        n = self._position
        mould = self._single[n]
        if mould is None or self._names[n] != name:
            return None
        self._position = n + 1
        return self._made_by(mould)

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
        for out, mould in zip(event.outs, self._moulds[self._position - 1], strict=True):
            if mould is not None:
                leaves.append(self._made_by(mould))
            elif isinstance(out, Alias):
                leaves.append(inputs[out.place])
            elif isinstance(out, Plain):
                leaves.append(out.value)
        return unflatten(event.structure, leaves)

    def _made_by(self, mould: Mould) -> Ghost:
        ghost = self._ghosts[mould.handle] = mould.ghost()
        return ghost

    def fill(self, handle: Handle, x: Tensor) -> None:
        ghost = self._ghosts.get(handle)
        if ghost is not None:  # else it is of the batch
            ghost.value = x

    def release(self) -> None:
        """Let go of the ghosts of a run, and of what came for them; who kept one has it."""
        self._ghosts.clear()


def _gives_one_ghost(event: Event) -> bool:
    is_leaf = event.structure.kind is None and not event.mutated
    return is_leaf and tuple(map(type, event.outs)) == (TensorSpec,)
