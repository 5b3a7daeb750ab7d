"""Reports: what users ask a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from lightning_cyclic.compat import DDPStrategy
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.options import Options

if TYPE_CHECKING:
    from lightning_cyclic.plugin.hooks import Hooks


class Reports(DDPStrategy):
    """Answer what users ask of the plan, the stages and the messages."""

    _training: Hooks
    _plan: Plan | None
    _chosen: Options

    @property
    def preset(self) -> str:
        """Return the name of the plan."""
        return self._chosen.preset

    @property
    def slack(self) -> int:
        """Return how many slots messages are given to travel."""
        return self._chosen.slack

    @property
    def plan(self) -> Plan:
        """Return the plan; after the first training step it has the stages that were found."""
        plan = self._training.plan or self._plan
        if plan is None:
            raise ConfigurationError(
                "strategy.plan was read before setup; allowed: after Trainer.fit has set up; "
                "read it in a callback's on_fit_start or later"
            )
        return plan

    @property
    def stage_of(self) -> dict[str, int]:
        """Return parameter name -> stage; known from the first training step on."""
        found = self._training.stage_of
        if found is not None:
            return found
        if self.lightning_module is not None and self._options.trains_plainly:
            return {n: 0 for n, _ in self.lightning_module.named_parameters()}
        raise ConfigurationError(
            "strategy.stage_of was read before the first training step found the stages; "
            "allowed: after it; read it in on_train_batch_end or later"
        )

    @property
    def own_stages(self) -> tuple[int, ...]:
        """Return the stages whose parameters this rank has; of replicated workers all."""
        own = self._training.own_stages
        return tuple(sorted(set(self.stage_of.values()))) if own is None else own

    @property
    def updated_parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters whose gradients on_before_optimizer_step sees whole, on this rank.

        Replicated workers, and pipelines without a flush, call it for each of their stages.
        """
        updated = self._training.updated_parameters
        if updated is None:
            return list(self.model.parameters()) if self.model is not None else []
        return updated

    def report(self) -> str:
        """Return the profile of a pipelined module, where stages could begin and where they do.

        The last lines name the stages, to paste, and how batches are cut; of replicated workers
        there is no more.
        """
        report = self._training.report()
        if report is None:
            raise ConfigurationError(
                "strategy.report() was asked for where no module has been looked at; allowed: "
                "from the first step on, of a pipeline on rank 0; or run `lightning-cyclic doctor "
                "PATH:CLASS` without training"
            )
        return report

    @property
    def steps_compared(self) -> int:
        """Return how many steps of this fit have been found equal to the plain ones."""
        return self._training.steps_compared

    @property
    def route(self) -> str:
        """Return how messages travel: "named", "edges" or "host_staged"; "" where none do."""
        transport = self._training.transport
        return transport.route if transport else ""

    @property
    def messages_sent(self) -> int:
        """Return how many point-to-point messages this worker has sent in training."""
        transport = self._training.transport
        return sum(transport.messages.values()) if transport else 0

    @property
    def bytes_sent(self) -> int:
        """Return how many bytes this worker has sent in training, point-to-point."""
        transport = self._training.transport
        return sum(transport.num_bytes.values()) if transport else 0

    @property
    def _options(self) -> Options:
        raise NotImplementedError
