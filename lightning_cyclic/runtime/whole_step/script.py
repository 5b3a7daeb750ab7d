"""The script of one worker: one steady step of its program, read stage by stage.

A program is a finite list of actions; training goes on until the data end. Every step of a
replicated program is the same but for the numbers, so the engine executes the second-to-last step
of a short program over and over, with versions counted from its own step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload

_STEADY_STEP = 3  # every kind of message flows, and the drain of a six-step program is ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class StageScript:
    """Hold what a worker does around F(i,j) and B(i,j) of one stage; None: nothing of the kind.

    Args:
        lag: step minus the version that F and B read: 0 fresh, 1 delayed.
        owned: whether this worker updates the stage.
        parameters_from, parameters_to: neighbours of the stage's parameters (P).
        total_from, total_to: where the total of a step comes from (owner) or goes to (T).
        sum_from, sum_to: neighbours of the partial sums (S).
        buffers_from, buffers_to: neighbours of the relayed buffers (R).
        actions: the action of each kind and payload, as one steady step has it.
    """

    lag: int
    owned: bool
    parameters_from: int | None
    parameters_to: int | None
    total_from: int | None
    total_to: int | None
    sum_from: int | None
    sum_to: int | None
    buffers_from: int | None
    buffers_to: int | None
    actions: dict[tuple[Kind, Payload | None], Action]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Hold the stages of one worker's step and how many slots a step has."""

    worker: int
    stages: tuple[StageScript, ...]
    slots_per_step: int

    @property
    def owned(self) -> tuple[int, ...]:
        """Return the stages that this worker updates."""
        return tuple(j for j, stage in enumerate(self.stages) if stage.owned)

    def action(
        self, kind: Kind, payload: Payload | None, *, t: int, j: int, v: int | None
    ) -> Action:
        """Return the action of step ``t`` as the program has it, with peer and slot."""
        steady = self.stages[j].actions[kind, payload]
        slot = steady.s + (t - _STEADY_STEP) * self.slots_per_step
        return replace(steady, t=t, v=v, s=slot)


def make_script(plan: Plan, worker: int) -> Script:
    """Read one steady step of a worker out of the plan's program."""
    program = replace(plan, num_steps=6).programs[worker]
    first = {a.t: a.s for a in program if a.kind is Kind.F and a.j == 0}
    period = first[_STEADY_STEP] - first[_STEADY_STEP - 1]
    window = [a for a in program if a.t == _STEADY_STEP]
    stages = tuple(_stage(window, j) for j in range(plan.num_stages))
    return Script(worker=worker, stages=stages, slots_per_step=period)


def _stage(window: Sequence[Action], j: int) -> StageScript:
    here = [a for a in window if a.j == j]
    peers = {(a.kind, a.payload): a.peer for a in here if a.payload is not None}
    forward = next(a for a in here if a.kind is Kind.F)
    assert forward.v is not None
    return StageScript(
        lag=_STEADY_STEP - forward.v,
        owned=any(a.kind is Kind.UPDATE for a in here),
        parameters_from=peers.get((Kind.RECV, Payload.P)),
        parameters_to=peers.get((Kind.SEND, Payload.P)),
        total_from=peers.get((Kind.RECV, Payload.T)),
        total_to=peers.get((Kind.SEND, Payload.T)),
        sum_from=peers.get((Kind.RECV, Payload.S)),
        sum_to=peers.get((Kind.SEND, Payload.S)),
        buffers_from=peers.get((Kind.RECV, Payload.R)),
        buffers_to=peers.get((Kind.SEND, Payload.R)),
        actions={(a.kind, a.payload): a for a in reversed(here)},
    )
