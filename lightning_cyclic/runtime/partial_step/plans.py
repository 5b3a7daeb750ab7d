"""The plans of one session, and what a worker does of them in each step.

The number of micro-batches decides: a last batch may give fewer than the others, and a batch of
evaluation is not cut at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import final

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.lower import blocking
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig
from lightning_cyclic.runtime.stages.cuts import Cuts

_AFTER_UPDATE = frozenset({Payload.P, Payload.V})
_SHARED = frozenset({Payload.D, Payload.L})  # what a session sends on its own
_FORWARD = frozenset({Payload.A})


@final
class Plans:
    """Make plans as they are needed, and take actions from their programs.

    Args:
        config: what the user chose.
        worker: whose actions are asked for.
        num_workers: how many there are.
    """

    def __init__(self, config: StagewiseConfig, worker: int, num_workers: int) -> None:
        self._config = config
        self._worker = worker
        self._num_workers = num_workers
        self._cuts: Cuts | None = None
        self._plans: dict[int, Plan] = {}
        self._phases: dict[int, tuple[list[Action], list[Action]]] = {}

    def provisional(self) -> Plan:
        """Make a plan with as many stages as are expected, to be followed until they are known."""
        config = self._config
        num_stages = config.expected_stages or max(1, self._num_workers // config.width)
        return config.make_plan(num_stages, config.num_micro * config.width, (), ())

    @property
    def usual(self) -> Plan | None:
        """Return the plan of a step whose batch has as many micro-batches as asked for.

        None before :meth:`begin`.
        """
        return None if self._cuts is None else self._of(self._config.num_micro)

    def begin(self, cuts: Cuts) -> Plan:
        """Take stages for found; return the plan of a usual step."""
        self._cuts = cuts
        return self._of(self._config.num_micro)

    # ------------------------------------------------------------------ actions

    def before_update(self, num_micro: int, t: int) -> list[Action]:
        """Return what step ``t`` does before its update.

        Args:
            num_micro: micro-batches of each replica.
            t: step.
        """
        return self._at(self._phases_of(num_micro)[0], t)

    def after_update(self, num_micro: int, t: int) -> list[Action]:
        """Return what step ``t`` does behind its update; as :meth:`before_update`."""
        return self._at(self._phases_of(num_micro)[1], t)

    def forward(self, t: int) -> list[Action]:
        """Return the forward of one batch that is not cut, as step ``t``; it may be below 0."""
        actions = self.before_update(1, t)
        return [a for a in actions if a.kind is Kind.F or a.payload in _FORWARD]

    def relays(self, t: int) -> Iterator[list[Action]]:
        """Bring the buffers that the last micro-batch of step ``t`` left to all holders.

        Returns:
            What this worker does, stage by stage.
        """
        plan = self.usual
        assert plan is not None
        for j in plan.relayed:
            holders = plan.axes.placement.workers_of(j)
            source = plan.worker_of(plan.num_micro - 1, j, t)
            a = Action(kind=Kind.SEND, payload=Payload.R, t=t, j=j, peer=source)
            if self._worker == source:
                yield [replace(a, peer=w) for w in holders if w != source]
            elif self._worker in holders:
                yield [replace(a, kind=Kind.RECV)]

    def _phases_of(self, num_micro: int) -> tuple[list[Action], list[Action]]:
        """Return the actions before and after an update, as they are in step 0."""
        if num_micro not in self._phases:
            program = blocking(self._of(num_micro))[self._worker]
            own = [a for a in program if a.payload not in _SHARED]
            before = [a for a in own if a.payload not in _AFTER_UPDATE]
            after = [a for a in own if a.payload in _AFTER_UPDATE]
            self._phases[num_micro] = (before, after)
        return self._phases[num_micro]

    def _at(self, actions: Sequence[Action], t: int) -> list[Action]:
        plan = self.usual
        assert plan is not None
        slots = max(t, 0) * slots_per_step(plan)  # evaluations have steps before 0
        return [replace(a, t=a.t + t, s=a.s + slots) for a in actions]

    # ------------------------------------------------------------------ plans

    def _of(self, num_micro: int) -> Plan:
        """Return the plan of a step whose replicas have ``num_micro`` micro-batches each."""
        if num_micro not in self._plans:
            usual = self._plans.get(self._config.num_micro)
            if usual is not None and flows(usual):
                # a batch of evaluation has a flush behind it, and reads the newest weights
                of_all = num_micro * self._config.width
                made = replace(
                    usual,
                    num_micro=of_all,
                    schedule="gpipe",
                    weights="sync",
                    warmup_steps=0,
                    late_updates=False,
                )
            else:
                made = replace(self._make(num_micro), num_steps=1)
            self._plans[num_micro] = made
        return self._plans[num_micro]

    def _make(self, num_micro: int) -> Plan:
        config, cuts = self._config, self._cuts
        assert cuts is not None
        ties = tuple(sorted(set(cuts.tied.values()))) if self._num_workers > 1 else ()
        relayed = tuple(j for j, names in enumerate(cuts.buffers) if cuts.changed & set(names))
        return config.make_plan(cuts.num_stages, num_micro * config.width, ties, relayed)


def flows(plan: Plan) -> bool:
    """Say whether steps begin before those ahead of them have ended."""
    return plan.placement == "shared" or (plan.placement == "pipelined" and plan.weights != "sync")


def slots_per_step(plan: Plan) -> int:
    """Return how many slots later each step is than the one before."""
    return plan.axes.schedule.period // plan.axes.schedule.unit
