"""The sequential run of a classifier, from a checkpoint or not, with losses by worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tests.harness.trainers import weights_of
from tests.modules.classifier import Classifier, MicroBatches
from tests.references import sequential


@dataclass(kw_only=True)
class Reference:
    """The sequential run of a module, and what it left.

    Args:
        rule: "sync", "delayed" or "freshest".
        n: number of workers.
        num_batches: of each worker and epoch.
        slack: of the rule.
        num_epochs: how often they are trained on.
        max_steps: how often weights are updated. [in all epochs]
        saved: a checkpoint whose weights, optimizer and scheduler state it begins with.
    """

    rule: str
    n: int
    num_batches: int
    slack: int = 0
    num_epochs: int = 1
    max_steps: int | None = None
    saved: dict[str, Any] | None = None

    def run(self, module: Classifier, stage_of: dict[str, int]) -> Reference:
        """Train the module in place; return the reference with losses by worker."""
        self.losses: list[list[float]] = [[] for _ in range(self.n)]
        self._data = MicroBatches(module.kind, self.num_batches * self.n)
        made = module.configure_optimizers()
        parts = made if isinstance(made, dict) else {"optimizer": made}
        optimizer, scheduler = parts["optimizer"], parts.get("lr_scheduler")
        if self.saved is not None:
            module.load_state_dict(self.saved["state_dict"])
            optimizer.load_state_dict(self.saved["optimizer_states"][0])
            if scheduler is not None:
                scheduler["scheduler"].load_state_dict(self.saved["lr_schedulers"][0])

        def after_update(t: int) -> None:
            if scheduler is not None:  # by the step
                scheduler["scheduler"].step()

        sequential.train(
            module, by_stage(module, stage_of), optimizer, self._loss, rule=self.rule,
            num_workers=self.n, num_steps=self.max_steps or self.num_epochs * self.num_batches,
            slack=self.slack, after_update=after_update,
        )  # fmt: skip
        self.weights = weights_of(module)
        return self

    def _loss(self, module: nn.Module, t: int, i: int) -> Tensor:
        b = t % self.num_batches
        loss = module.loss(self._data[b * self.n + i], b)
        self.losses[i].append(float(loss.detach()))
        return loss


def by_stage(module: nn.Module, stage_of: dict[str, int]) -> list[list[nn.Parameter]]:
    """Group the trained parameters as the strategy did."""
    named = dict(module.named_parameters())
    stages: list[list[nn.Parameter]] = [[] for _ in range(1 + max(stage_of.values()))]
    for name, j in stage_of.items():
        stages[j].append(named[name])
    return stages
