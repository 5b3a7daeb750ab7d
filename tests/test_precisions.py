"""Every precision under every kind of preset: the bits of one process that goes by the same rule.

The reference computes by Lightning's own precision plugin. Half precision with a loss scale is in
test_loss_scaling.py and test_pipeline_scaling.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor

from lightning_cyclic.plan import Plan
from tests.harness import processes
from tests.harness.pipelines import Job, Outcome, pipelines, prepare
from tests.harness.trainers import assert_same, make_trainer, train_data, weights_of
from tests.modules.classifier import Classifier
from tests.references import asynchronous
from tests.references.replicated import Reference, by_stage
from tests.references.sequential import LEAST, wire_of

pytestmark = pytest.mark.multi

WHOLE = {"cyclic_dp": "freshest", "cyclic_zero": "freshest"}
STAGED = {
    "gpipe": "sync", "1f1b": "sync", "pipedream_2bw": "delayed", "cyclic_pipeline": "freshest",
}  # fmt: skip
NUM_STEPS, NET = 6, "resnet"


def plugin(precision: str) -> Precision:
    if precision == "32-true":
        return Precision()
    if precision == "64-true":
        return DoublePrecision()
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", "cpu")
    return HalfPrecision(precision)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- whole steps


def fit_whole(strategy: Any, precision: str) -> dict[str, Any]:
    module = Classifier(NET, "sgd")
    trainer = make_trainer(strategy, max_epochs=1, precision=precision)
    trainer.fit(module, train_data(module, NUM_STEPS))
    made = trainer.strategy
    return {"weights": weights_of(module), "stage_of": dict(made.stage_of), "plan": made.plan}


def whole_by_rule(
    precision: str, rule: str, stage_of: dict[str, int], plan: Plan,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    own, module, num = plugin(precision), Classifier(NET, "sgd"), plan.num_microbatches
    own.convert_module(module)
    loss = module.loss

    def converted(batch: Any, t: int) -> Tensor:
        with own.train_step_context():
            return loss(own.convert_input(batch), t)

    module.loss = converted  # type: ignore[method-assign]
    wire = wire_of(plan, dtype, torch.promote_types(LEAST, next(module.parameters()).dtype))
    groups = num // plan.group_size
    run = Reference(rule=rule, n=num, num_batches=NUM_STEPS, groups=groups, wire=wire)
    return run.run(module, stage_of).weights


@pytest.mark.parametrize(
    ("preset", "precision"),
    [("cyclic_dp", "bf16-true"), ("cyclic_zero", "bf16-mixed"), ("cyclic_zero", "64-true")],
)
def test_whole_steps(preset: str, precision: str) -> None:
    ranks = processes.run(fit_whole, 2, {"preset": preset, "stages": 4}, precision)
    args = precision, WHOLE[preset], ranks[0]["stage_of"], ranks[0]["plan"]
    (expected,) = processes.run(whole_by_rule, 1, *args)
    for rank in ranks:
        assert_same(rank["weights"], expected)


# ---------------------------------------------------------------------- stages apart

JOB = Job(case="resnet", num_steps=NUM_STEPS, num_epochs=1)


def fit_staged(job: Job, strategy: dict[str, Any], precision: str) -> Outcome:
    run = prepare(job, strategy, precision=precision)
    run.trainer.fit(run.module, run.batches)
    made = run.trainer.strategy
    return run.outcome() | {"stage_of": made.stage_of, "plan": made.plan}


def staged_by_rule(
    job: Job, precision: str, rule: str, stage_of: dict[str, int], plan: Plan,
    dtype: torch.dtype | None = None, replicas: int = 1,
) -> dict[str, Tensor]:  # fmt: skip
    own, module = plugin(precision), job.make()
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    own.convert_module(module)
    made = module.configure_optimizers()
    optimizer, step = made, lambda t: None
    if isinstance(made, tuple):
        (optimizer,), (scheduler,) = made
        step = lambda t: scheduler["scheduler"].step()  # noqa: E731

    def loss(module: Any, t: int, i: int) -> Tensor:
        batch = own.convert_input(job.batch(t * job.num_microbatches + i))
        with own.train_step_context():
            output = module.training_step(batch, 0)
        return output["loss"] if isinstance(output, dict) else output

    least = torch.promote_types(LEAST, next(module.parameters()).dtype)
    asynchronous.train(
        module, by_stage(module, stage_of), optimizer, loss, rule=rule,
        num_microbatches=job.num_microbatches,
        num_steps=job.num_steps, after_update=step, replicas=replicas,
        wire=wire_of(plan, dtype, least),
    )  # fmt: skip
    return weights_of(module)


@pytest.mark.parametrize(
    ("preset", "precision"),
    [
        ("gpipe", "16-true"), ("1f1b", "bf16-mixed"), ("pipedream_2bw", "bf16-true"),
        ("cyclic_pipeline", "64-true"),
    ],
)  # fmt: skip
def test_stages_apart(preset: str, precision: str) -> None:
    ranks = pipelines(JOB, 2, precision, preset=preset, stages=4, function=fit_staged)
    args = JOB, precision, STAGED[preset], ranks[0]["stage_of"], ranks[0]["plan"]
    (expected,) = processes.run(staged_by_rule, 1, *args)
    for rank in ranks:
        assert_same(rank["weights"], expected)
