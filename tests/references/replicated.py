"""The sequential run of a classifier, with losses and rates by worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.trainers import assert_same, weights_of
from tests.modules.classifier import Classifier, MicroBatches
from tests.references import sequential


@dataclass(kw_only=True)
class Reference:
    """The sequential run of a module, and what it left.

    Args:
        rule: "sync", "delayed" or "freshest".
        n: number of workers.
        slack: of the rule.
        num_batches: of each worker and epoch.
        num_epochs: how often they are trained on.
        accumulate: batches per step of each worker.
        clip: called before each update with (all parameters, parameters by stage).
        each_epoch: called behind each epoch with the module and the optimizer.
        seed_of: (step, micro-batch) -> seed of the randomness inside.
        saved: a checkpoint whose weights, optimizer and scheduler state it begins with.
        groups: of workers. [each is one]
        wire: between them. [in their own dtype]
    """

    rule: str
    n: int
    num_batches: int
    slack: int = 0
    num_epochs: int = 1
    max_steps: int | None = None
    accumulate: int = 1
    clip: Callable[[list[nn.Parameter], list[list[nn.Parameter]]], None] | None = None
    each_epoch: Callable[[Any, Any], None] | None = None
    seed_of: Callable[[int, int], int] | None = None
    saved: dict[str, Any] | None = None
    groups: int | None = None
    wire: sequential.Wire | None = None

    def run(self, module: Classifier, stage_of: dict[str, int]) -> Reference:
        """Train the module in place; return the reference with losses and rates by worker."""
        self.losses: list[list[float]] = [[] for _ in range(self.n)]
        self.rates: list[float] = []
        self._data = MicroBatches(module.kind, self.num_batches * self.n)
        made = module.configure_optimizers()
        parts = made if isinstance(made, dict) else {"optimizer": made}
        optimizer, scheduler = parts["optimizer"], parts.get("lr_scheduler")
        per_epoch = -(-self.num_batches // self.accumulate)
        stages = by_stage(module, stage_of)
        if self.saved is not None:
            module.load_state_dict(self.saved["state_dict"])
            optimizer.load_state_dict(self.saved["optimizer_states"][0])
            if scheduler is not None:
                scheduler["scheduler"].load_state_dict(self.saved["lr_schedulers"][0])

        def before_update() -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])
            if self.clip is not None:
                self.clip([p for g in optimizer.param_groups for p in g["params"]], stages)

        def after_update(t: int) -> None:
            if scheduler is not None and scheduler["interval"] == "step":
                scheduler["scheduler"].step()
            if (t + 1) % per_epoch == 0 and self.each_epoch is not None:
                self.each_epoch(module, scheduler and scheduler["scheduler"])

        sequential.train(
            module, stages, optimizer, self._loss, rule=self.rule, num_workers=self.n,
            num_steps=self.max_steps or self.num_epochs * per_epoch, slack=self.slack,
            before_update=before_update, after_update=after_update, num_groups=self.groups,
            wire=self.wire,
        )  # fmt: skip
        self.weights = weights_of(module)
        return self

    def _loss(self, module: nn.Module, t: int, i: int) -> Tensor:
        """Sum the gradients of the window's batches on this worker; return its last loss."""
        if self.seed_of is not None:
            torch.manual_seed(self.seed_of(t, i))
        start = t % -(-self.num_batches // self.accumulate) * self.accumulate
        window = range(start, min(start + self.accumulate, self.num_batches))
        for b in window:
            loss = module.loss(self._data[b * self.n + i], b)
            self.losses[i].append(float(loss.detach()))
            if b < window[-1]:
                (loss / self.accumulate / self.n).backward()
        return loss / self.accumulate

    def compare(self, ranks: list[dict[str, Any]]) -> None:
        """Compare losses and weights of every worker, bit by bit."""
        for i, rank in enumerate(ranks):
            assert rank["stage_of"] == ranks[0]["stage_of"]
            assert rank["losses"] == self.losses[i], f"losses of worker {i}"
            assert_same(rank["weights"], self.weights, f"worker {i}")


def by_stage(module: nn.Module, stage_of: dict[str, int]) -> list[list[nn.Parameter]]:
    """Group the trained parameters as the strategy did."""
    named = dict(module.named_parameters())
    stages: list[list[nn.Parameter]] = [[] for _ in range(1 + max(stage_of.values()))]
    for name, j in stage_of.items():
        stages[j].append(named[name])
    return stages
