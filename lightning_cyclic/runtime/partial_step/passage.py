"""The passage of micro-batches through a stage: what comes, what goes on, and what is habit.

How micro-batches of a kind passed a stage is taken for how the next ones will. What is known ahead
need not be waited for, nor written down again: the regions before a stage can be replayed before
the packet has come, and the stage's own events be compared with the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_cyclic.runtime.bits import version
from lightning_cyclic.runtime.partial_step.call_router import CallRouter
from lightning_cyclic.runtime.partial_step.ghosts import Handle
from lightning_cyclic.runtime.partial_step.packets import Lesson, Packet
from lightning_cyclic.runtime.partial_step.replay import Replay
from lightning_cyclic.runtime.partial_step.run import Run
from lightning_cyclic.runtime.partial_step.sharing import Sharing, groups_of
from lightning_cyclic.runtime.partial_step.tape import Delivery, Tape, names

_ANCHOR = torch.zeros((), requires_grad=True)  # lets autograd note what is made of it


@final
class Entry:
    """Hand out received tensors, and keep the gradients that come back for them.

    What is handed out is no leaf, so that it may be changed in place, and its gradients are added
    in the order in which one graph over all stages would add them.
    """

    def __init__(
        self, tensors: Mapping[Handle, Tensor], with_grad: frozenset[Handle], *, copied: bool
    ) -> None:
        self.handles = [h for h in tensors if h in with_grad]
        self.grads: dict[Handle, Tensor] = {}
        self.values = {h: _copy(x) if copied else _alias(x) for h, x in tensors.items()}
        if self.handles and torch.is_grad_enabled():
            made = _begin(_ANCHOR, self, [self.values[h] for h in self.handles])
            self.values.update(zip(self.handles, made, strict=True))
        self._given = () if copied else tuple(tensors.values())
        self._versions = list(map(version, self.values.values()))

    def pass_changes_on(self) -> None:
        """Let graphs that hold the received tensors, of a stage on this worker, see changes.

        Their backward then raises, as it does where one graph holds all stages.
        """
        if not self._given:
            return
        now = list(map(version, self.values.values()))
        if now != self._versions:
            for x, after, before in zip(self._given, now, self._versions, strict=True):
                if after != before:
                    increment_version(x)
        self._given = ()

    def keep(self, grads: tuple[Tensor | None, ...]) -> None:
        self.grads = {h: g for h, g in zip(self.handles, grads, strict=True) if g is not None}


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: Entry, tensors: list[Tensor]) -> Any:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.entry.keep(grads)
        return None, None, None


# what apply() does beside this is for functorch, and for functions that need no ctx in forward
_begin: Any = super(torch.autograd.Function, _Begin).apply


def _copy(x: Tensor) -> Tensor:
    """Copy a tensor, gaps in its memory included: kernels add in another order without."""
    made = x.clone()
    if made.stride() == x.stride() or 0 in x.stride():
        return made
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _alias(x: Tensor) -> Tensor:
    """Return another tensor over the same memory, which is no view in autograd's eyes."""
    if type(x) is Tensor and not x.is_inference():
        return x.data
    with torch.inference_mode(mode=False):  # changes in place are counted there too
        made = torch.empty(0, dtype=x.dtype, device=x.device)
        return made.set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride())


_MOST_HABITS = 256  # kinds times stages: inputs of many sizes must not fill the memory


@final
class Habit:
    """Hold how a kind of micro-batch passed one stage."""

    def __init__(self, j: int, tapes: tuple[Tape, ...], replays: tuple[Replay, ...]) -> None:
        self.tapes = tapes
        self.replays = replays
        self.wanted: frozenset[Handle] | None = None  # by the lesson that was asked for last
        self.path: tuple[str, ...] | None = None
        self._j = j
        self._own: Tape | None = None
        self._own_path: tuple[str, ...] = ()
        self._behind: tuple[Tape, ...] = ()
        self._asked: Lesson | None = None
        self._holds = False

    def fits(self, tapes: tuple[Tape, ...]) -> bool:
        return tapes is self.tapes or tapes == self.tapes

    def holds(self, lesson: Lesson) -> bool:
        """Say whether a lesson is of this way to the stage; if so, take from it what is wanted."""
        if lesson is not self._asked:
            self._asked, j = lesson, self._j
            self._holds = tuple(map(names, self.tapes)) == lesson.paths[:j]
            self.wanted = lesson.wanted(j)
            self.path = lesson.paths[j] if j < len(lesson.paths) else None
        return self._holds

    def likely(self, path: tuple[str, ...] | None) -> Tape:
        own = self._own or ()
        return own if path is None or self._own_path == path else ()

    def tapes_behind(self, own: Tape) -> tuple[Tape, ...]:
        """Return the tapes with that of the stage: the same object for equal ones."""
        if own != self._own:
            self._own, self._own_path, self._behind = own, names(own), (*self.tapes, own)
        return self._behind


@final
class Habits:
    """Keep the habits of few kinds."""

    def __init__(self, router: CallRouter) -> None:
        self._router = router
        self._habits: dict[tuple[str, int], Habit] = {}

    def get(self, kind: str, j: int) -> Habit | None:
        return self._habits.get((kind, j))

    def begin(self, kind: str, j: int, tapes: tuple[Tape, ...]) -> Habit:
        """Begin another habit, with other tapes; replays of the same ones are kept."""
        before = (self.get(kind, k) for k in (j - 1, j))
        made = {id(r.tape): r for habit in before if habit is not None for r in habit.replays}
        replays = tuple(
            made.get(id(tape)) or Replay(region, tape, self._router)
            for region, tape in enumerate(tapes)
        )
        if len(self._habits) >= _MOST_HABITS:
            del self._habits[next(iter(self._habits))]
        habit = self._habits[kind, j] = Habit(j, tapes, replays)
        return habit


@final
class Passage:
    """Take the packet of a forward when its run needs it, and make that of the next stage.

    Args:
        copied: hand out copies of what came, since it is needed again.
    """

    def __init__(
        self, take_packet: Callable[[], Packet], lesson: Lesson | None, *, copied: bool
    ) -> None:
        self.habit: Habit
        self.entry: Entry
        self.lesson = lesson  # None where it does not hold
        self.copied = copied
        self._given_lesson = lesson
        self._take_packet = take_packet
        self._packet: Packet | None = None

    @property
    def packet(self) -> Packet:
        """Return what crossed; wait for it if it has not come."""
        if self._packet is None:
            self._packet = self._take_packet()
        return self._packet

    def deliver(self, habit: Habit) -> Delivery | None:
        """Give a run what crossed, when its stage begins; nothing if the habit was another."""
        packet = self.packet
        if not habit.fits(packet.tapes):
            return None
        if self.lesson is not None and (packet.learning or not habit.holds(self.lesson)):
            self.lesson = None
        self.habit = habit
        self.entry = entry = Entry(packet.tensors, packet.with_grad, copied=self.copied)
        wanted, path = (None, None) if self.lesson is None else (habit.wanted, habit.path)
        sharing = Sharing.of(packet.shared, packet.stale)
        return Delivery(entry.values, wanted, path, habit.likely(path), sharing)

    def packet_behind(self, run: Run) -> Packet:
        packet, captured, stale = self.packet, run.record.captured, run.sharing.stale
        handles = sorted(captured)
        learning = self.lesson is None or run.record.has_strayed
        return Packet(
            tensors={h: captured[h].detach() for h in handles},
            with_grad=frozenset([h for h in handles if captured[h].requires_grad]),
            tapes=self.habit.tapes_behind(tuple(run.record.tape)),
            used=self.used(run) if learning else {},
            learning=learning,
            shared=groups_of(captured, self.entry.values, packet.shared),
            stale={h: stale[h] for h in handles if h in stale} if stale else {},
        )

    def used(self, run: Run) -> dict[Handle, int]:
        """Return the last stage that used each handle so far."""
        used = self.packet.used | dict.fromkeys(run.used, run.target)
        if self._given_lesson is None or self.packet.learning:
            return used
        known = self._given_lesson.last_use.items()  # stages before were not asked what they used
        return {h: last for h, last in known if h[0] < run.target} | used
