"""What came of steps, on its way from the worker of the last stage to all that are told.

conclude   there: what of the outcomes is told, made once for all
tell       everywhere, in the program's turn: take up what it teaches, and what the code of
           the last stage left on the module
take       whoever shows losses and logs fetches them
"""

from __future__ import annotations

from typing import final

from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.partial_step.config import Summarise
from lightning_cyclic.runtime.partial_step.module_state import ModuleState, packed
from lightning_cyclic.runtime.partial_step.packets import Lesson
from lightning_cyclic.runtime.partial_step.stage_step import StageStep


@final
class Conclusions:
    """Keep what is told of steps, by step; evaluations count downward from -1."""

    def __init__(self, step: StageStep, state: ModuleState) -> None:
        self.came: dict[int, Message] = {}  # from the worker of the last stage
        self._step = step
        self._state = state
        self._summarise: dict[int, Summarise] = {}
        self._made: dict[int, Message] = {}
        self._told: list[tuple[int, Message]] = []

    def expect(self, t: int, summarise: Summarise) -> None:
        """Take how the outcomes of a step become what is told of it."""
        self._summarise[t] = summarise

    def conclude(self, t: int) -> Message:
        if t not in self._made:
            outcomes = self._step.take_outcomes(t)
            summary = self._summarise[t](list(outcomes.values()))
            learnt = {f: lesson.to_data() for f, lesson in self._step.learnt.items()}
            tensors, changes = packed({i: x.changes for i, x in outcomes.items()})
            facts = [summary.facts, learnt, changes, len(summary.tensors)]
            self._made[t] = Message([*summary.tensors, *tensors], facts)
        return self._made[t]

    def tell(self, t: int) -> None:
        came = self.came.pop(t, None)
        summary = came or self.conclude(t)
        facts, lessons, changes, num = summary.facts
        if came is None:
            self._step.adopt(self._step.learnt)
        else:
            self._step.adopt({f: Lesson.from_data(data) for f, data in lessons.items()})
            self._state.adopt(t, summary.tensors[num:], changes)
        self._told.append((t, Message(summary.tensors[:num], facts)))

    def take(self) -> list[tuple[int, Message]]:
        """Return the steps that were told of since the last call, with what was told."""
        taken, self._told = self._told, []
        return taken

    def take_last(self) -> Message:
        return self._told.pop()[1]

    def forget(self, t: int) -> None:
        """Forget what is over with a step: it, and those before it, or those of evaluation."""
        self._summarise = {k: f for k, f in self._summarise.items() if k > t}
        self._made = {k: told for k, told in self._made.items() if k > t}
