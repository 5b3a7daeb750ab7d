"""The plans of one session.

The number of micro-batches decides: a last batch may give fewer than the others, and a batch of
evaluation is not cut at all.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import final

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.passes.transfers import first_stage
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig
from lightning_cyclic.runtime.stages.cuts import Cuts

_EVALUATES = frozenset({Kind.F, Kind.TELL, Payload.D, Payload.A, Payload.L})


@final
class Plans:
    """Make plans as they are needed.

    Args:
        config: what the user chose.
        cuts: where stages begin.
        num_workers: how many there are.
        frozen: names of the parameters that are not trained.
    """

    def __init__(
        self, config: StagewiseConfig, cuts: Cuts, num_workers: int, frozen: Collection[str] = ()
    ) -> None:
        self._config = config
        self._cuts = cuts
        self._num_workers = num_workers
        # behind a flush they may be unfrozen, and must be exchanged then
        self._constant = frozenset(frozen if config.is_delayed else ())
        self._plans: dict[int, Plan] = {}
        self._evaluation: list[Action] | None = None
        self.usual = self.of(config.num_microbatches)  # whose batch has as many as asked for

    def of(self, num_microbatches: int) -> Plan:
        """Return the plan of a step whose replicas have so many micro-batches each."""
        if num_microbatches not in self._plans:
            self._plans[num_microbatches] = self._made(num_microbatches)
        return self._plans[num_microbatches]

    def evaluation(self, worker: int, t: int) -> list[Action]:
        """Return the forward of one batch that is not cut.

        Args:
            worker: whose actions are asked for.
            t: the step that they are to have.
        """
        if self._evaluation is None:
            actions = [*self.of(1).program.first(1)[worker], *self._told_besides(worker)]
            self._evaluation = [a for a in actions if (a.payload or a.kind) in _EVALUATES]
        return [replace(a, t=t) for a in self._evaluation]

    def _told_besides(self, worker: int) -> list[Action]:
        """Let those know what came out who have no part: where workers take turns, some may."""
        plan = self.of(1)
        programs, replica = plan.program.first(1), plan.axes.placement.replica(worker)
        (tell,) = [a for a in programs[replica[-1]] if a.kind is Kind.TELL]
        told = {w for w in replica if any(a.kind is Kind.TELL for a in programs[w])}
        idle = {w: first_stage(plan, w) for w in replica if w not in told}
        if worker == replica[-1]:
            return [message(Kind.SEND, Payload.L, tell, w, j=j) for w, j in idle.items()]
        if worker not in idle:
            return []
        j = idle[worker]
        return [message(Kind.RECV, Payload.L, tell, replica[-1], j=j), replace(tell, j=j)]

    def _made(self, num_microbatches: int) -> Plan:
        of_all = num_microbatches * self._config.replicas
        usual = self._plans.get(self._config.num_microbatches)
        if usual is None or not usual.flows:
            return self._config.make_plan(self._cuts.num_stages, of_all, *self._demands())
        # a batch of evaluation has a flush behind it, and reads the newest weights
        return replace(
            usual, num_microbatches=of_all, schedule="gpipe", weights="sync",
            late_updates=False, norms="none",
        )  # fmt: skip

    def _demands(self) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Return which stages share parameters, and which have buffers that change."""
        cuts = self._cuts
        groups = {stages for n, stages in cuts.tied.items() if n not in self._constant}
        ties = tuple(sorted(groups)) if self._num_workers > 1 else ()
        relayed = tuple(j for j, names in enumerate(cuts.buffers) if cuts.changed & set(names))
        return ties, relayed
