"""One process that trains a job by the rule of a preset: the oracle of all its ranks.

Which weights a micro-batch reads and in which order gradients are added is in sequential.py, for
workers that run whole micro-batches, and in asynchronous.py, for stages apart. A plan is asked for
its numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.harness.pipelines import CLOSE, Job, Outcome
from tests.harness.trainers import assert_same, weights_of
from tests.references import asynchronous, sequential
from tests.references.replicated import by_stage

WHOLE = {
    "lockstep_dp": "sync", "cyclic_dp": "freshest", "cyclic_dp_v1": "delayed",
    "cyclic_zero": "freshest",
}  # fmt: skip
STAGES_APART = {
    "gpipe": "sync", "1f1b": "sync", "zb_h1": "sync", "cyclic_pipeline": "freshest",
    "pipedream_2bw": "delayed", "pipedream": "stashed", "cyclic_mp": "freshest",
}  # fmt: skip
PREDICTING = ("pipeoptim", "spectrain")  # asynchronous.train_predicted knows their rules
ONE_EACH = ("pipedream", *PREDICTING)  # that make an update per micro-batch


class Reference:
    """The run of a job in one process.

    What is public may be replaced before it trains, as the optimizer by one that steps otherwise.

    Args:
        job: what is trained.
        stage_of: parameter -> stage, as the ranks found them.
        precision: by which it computes. [float32]
    """

    def __init__(
        self, job: Job, stage_of: dict[str, int], precision: Precision | None = None
    ) -> None:
        self.precision = precision or Precision()
        self.module: Any = job.make()
        self.module.log = self.module.log_dict = lambda *args, **kwargs: None
        self.precision.convert_module(self.module)
        self.stages = by_stage(self.module, stage_of)
        self.before: Callable[[int, int], None] = lambda t, i: None  # each micro-batch
        self.losses: list[list[float]] = [[] for _ in range(job.num_microbatches)]
        self.rates: list[float] = []  # by batch
        self._job = job
        self.configure()

    def configure(self) -> None:
        """Begin with a new optimizer and scheduler."""
        made = self.module.configure_optimizers()
        self.optimizer, self.schedulers = made, []
        if isinstance(made, tuple):
            (self.optimizer,), self.schedulers = made

    def train(
        self, plan: Any, num_steps: int | None = None, *, rule: str | None = None, first: int = 0,
        accumulate: int = 1, dtype: torch.dtype | None = None,
    ) -> Reference:  # fmt: skip
        """Train by the rule of a plan.

        Args:
            plan: of the ranks.
            num_steps: how often it updates. [in all epochs]
            rule: in place of the plan's. ["sync" without one]
            first: the batch with which it begins.
            accumulate: batches of each worker per step.
            dtype: in which sums travel. [their own]
        """
        job, m = self._job, self._job.num_microbatches
        per_epoch = -(-job.num_steps // accumulate)
        own = next(self.module.parameters()).dtype
        wire = None
        if dtype is not None or own != torch.float32:
            wire = sequential.wire_of(plan, dtype, torch.promote_types(sequential.LEAST, own))

        def loss(module: Any, t: int, i: int) -> Tensor:
            self.before(t, i)
            begin = (first + t) % per_epoch * accumulate
            window = range(begin, min(begin + accumulate, job.num_steps))
            for b in window:
                if i == 0:
                    self.rates.append(self.optimizer.param_groups[0]["lr"])
                value = self._loss(b, i) / accumulate
                self.losses[i].append(float(value.detach()))
                value = value * getattr(self.optimizer, "scale", lambda t: 1.0)(t)
                if b < window[-1]:
                    (value / m).backward()
            return value

        def after_update(t: int) -> None:
            for x in self.schedulers:
                if x["interval"] == "step" or (t + 1) % per_epoch == 0:
                    x["scheduler"].step()

        rule = rule or (plan.weights if plan else "sync")
        shared = {"rule": rule, "wire": wire, "after_update": after_update,
                  "num_steps": num_steps or job.num_epochs * per_epoch}  # fmt: skip
        args = self.module, self.stages, self.optimizer, loss
        if plan is None or plan.preset in WHOLE:
            is_many = plan is not None and plan.placement == "replicated"
            sequential.train(
                *args, num_workers=m, slack=plan.slack if plan else 0,
                num_groups=plan.num_groups if is_many else None, **shared,
            )  # fmt: skip
        else:
            parts = plan.replicas if plan.sums_by_replica else 1
            asynchronous.train(*args, num_microbatches=m, replicas=parts, **shared)
        self.weights = weights_of(self.module)
        return self

    def _loss(self, b: int, i: int) -> Tensor:
        """Return the loss of micro-batch i of batch b."""
        batch = self.precision.convert_input(self._job.batch(b * self._job.num_microbatches + i))
        with self.precision.train_step_context():
            output = self.module.training_step(batch, b)
        return output["loss"] if isinstance(output, dict) else output

    def compare(self, ranks: Sequence[Outcome]) -> None:
        """Compare weights and rates of all ranks bit by bit, and losses: of each, or the mean."""
        for r, rank in enumerate(ranks):
            assert_same(rank["weights"], self.weights, f"rank {r}")
            assert rank["stage_of"] == ranks[0]["stage_of"]
            assert rank["rates"] == self.rates, f"rank {r}"
        plan = ranks[0]["plan"]
        if plan.placement == "replicated":
            assert [rank["returned"] for rank in ranks] == self.losses
            return
        if next(self.module.parameters()).dtype.itemsize < 4:
            return  # the mean is rounded to it
        expected = torch.tensor(self.losses, dtype=torch.float64).mean(0)
        given = torch.tensor([rank["logged"] for rank in ranks]).double()
        if plan.replicas > 1:  # each has logged its own micro-batches
            given = given.mean(0, keepdim=True)
        elif plan.num_workers == plan.num_stages:  # else rank 0 has begun the next step before
            torch.testing.assert_close(given[0], expected, rtol=CLOSE, atol=CLOSE)
        ends = slice(self._job.num_steps - 1, None, self._job.num_steps)  # of epochs
        for each in given[:, ends]:
            torch.testing.assert_close(each, expected[ends], rtol=CLOSE, atol=CLOSE)


class Clipped:
    """Clip gradients before each update.

    Args:
        optimizer: which makes them.
        stages: the parameters of each.
        limit: of the norm, or value.
        by: "value", the norm of "all", or that of each "stage".
    """

    def __init__(
        self, optimizer: Any, stages: list[list[nn.Parameter]], limit: float, by: str
    ) -> None:
        self.param_groups, self.zero_grad = optimizer.param_groups, optimizer.zero_grad
        self.has_clipped = False
        self._optimizer, self._limit, self._by = optimizer, limit, by
        self._apart = [{id(p) for p in stage} for stage in stages]
        if by != "stage":
            self._apart = [set().union(*self._apart)]

    def step(self) -> None:
        each = [p for group in self.param_groups for p in group["params"]]
        if self._by == "value":
            self.has_clipped |= any(bool((p.grad.abs() > self._limit).any()) for p in each)
            clip_grad_value_(each, self._limit)
        else:
            for ids in self._apart:
                norm = clip_grad_norm_([p for p in each if id(p) in ids], self._limit)
                self.has_clipped |= bool(norm > self._limit)
        self._optimizer.step()
