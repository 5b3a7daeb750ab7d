"""Sums of gradients that travel: in which dtype they are added, and how they are rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.errors import ConfigurationError, PeerError, StepError
from lightning_cyclic.plan import Plan
from lightning_cyclic.strategy import CyclicStrategy
from tests import asynchronous, processes, sequential
from tests.corpus import (
    Classifier,
    MicroBatches,
    assert_same,
    by_stage,
    make_trainer,
    train_data,
    weights_of,
)
from tests.sequential import wire_of
from tests.stagewise_runs import Job, Outcome, pipelines, prepare
from tests.test_precisions import plugin

NUM_STEPS, NET = 6, "resnet"
DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAST = {"64-true": torch.float64}


# ---------------------------------------------------------------------- whole steps


def fit_whole(strategy: Any, precision: str) -> dict[str, Any]:
    module = Classifier(NET, "sgd")
    trainer = make_trainer(strategy, max_epochs=1, precision=precision)
    trainer.fit(module, train_data(module, NUM_STEPS))
    made = trainer.strategy
    return {"weights": weights_of(module), "stage_of": dict(made.stage_of), "plan": made.plan}


def whole_by_rule(
    precision: str, dtype: str | None, plan: Plan, stage_of: dict[str, int]
) -> dict[str, Tensor]:
    own, module, num = plugin(precision), Classifier(NET, "sgd"), plan.num_micro
    own.convert_module(module)
    data = MicroBatches(module.kind, NUM_STEPS * num)

    def loss(module: nn.Module, t: int, i: int) -> Tensor:
        batch = own.convert_input(data[t * num + i])
        with own.train_step_context():
            return module.loss(batch, t)

    sequential.train(
        module, by_stage(module, stage_of), module.configure_optimizers(), loss,
        rule=plan.weights, num_workers=num, num_steps=NUM_STEPS,
        wire=wire_of(plan, DTYPES[dtype], LEAST.get(precision, torch.float32)),
    )  # fmt: skip
    return weights_of(module)


WHOLE = [
    (preset, precision, dtype)
    for preset in ("cyclic_dp", "cyclic_dp_v1", "lockstep_dp", "cyclic_zero", "weipipe")
    for precision in ("32-true", "bf16-true", "bf16-mixed", "64-true")
    for dtype in DTYPES
    if (precision, dtype) != ("32-true", None)  # which all other tests compare
]
ALWAYS = {
    ("cyclic_dp", "bf16-true", None), ("cyclic_zero", "32-true", "bf16"),
    ("weipipe", "bf16-true", None),
}  # fmt: skip


def marked(rows: list[tuple[Any, ...]], always: set[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*r, marks=() if r in always else pytest.mark.exhaustive) for r in rows]


@pytest.mark.multi
@pytest.mark.parametrize(("preset", "precision", "dtype"), marked(WHOLE, ALWAYS))
def test_workers_of_whole_steps(preset: str, precision: str, dtype: str | None) -> None:
    strategy = {"preset": preset, "stages": 4, "wire_dtype": dtype}
    ranks = processes.run(fit_whole, 4, strategy, precision)
    args = precision, dtype, ranks[0]["plan"], ranks[0]["stage_of"]
    (expected,) = processes.run(whole_by_rule, 1, *args)
    for rank in ranks:
        assert_same(rank["weights"], expected)


# ---------------------------------------------------------------------- stages apart

REPLICAS = ("1f1b", "gpipe", "pipedream_2bw", "cyclic_pipeline")
STAGED = [
    (preset, precision, dtype)
    for preset in (*REPLICAS, "cyclic_mp")
    for precision in ("32-true", "bf16-true")
    for dtype in DTYPES
    if (precision, dtype) != ("32-true", None)
]
STAGED_ALWAYS = {
    ("1f1b", "bf16-true", None), ("pipedream_2bw", "32-true", "bf16"),
    ("cyclic_mp", "bf16-true", None),
}  # fmt: skip


def fit_staged(job: Job, strategy: dict[str, Any], precision: str) -> Outcome:
    run = prepare(job, strategy, precision=precision)
    run.trainer.fit(run.module, run.batches)
    made = run.trainer.strategy
    return run.outcome() | {"stage_of": made.stage_of, "plan": made.plan}


def staged_by_rule(
    job: Job, precision: str, dtype: str | None, plan: Plan, stage_of: dict[str, int], width: int
) -> dict[str, Tensor]:
    own, module = plugin(precision), job.make()
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    own.convert_module(module)
    made = module.configure_optimizers()
    optimizer, step = made, lambda t: None
    if isinstance(made, tuple):
        (optimizer,), (scheduler,) = made
        step = lambda t: scheduler["scheduler"].step()  # noqa: E731

    def loss(module: Any, t: int, i: int) -> Tensor:
        batch = own.convert_input(job.batch(t * job.num_micro + i))
        with own.train_step_context():
            output = module.training_step(batch, 0)
        return output["loss"] if isinstance(output, dict) else output

    wire = wire_of(plan, DTYPES[dtype], LEAST.get(precision, torch.float32))
    asynchronous.train(
        module, by_stage(module, stage_of), optimizer, loss, rule=plan.weights,
        num_micro=job.num_micro, num_steps=job.num_steps, after_update=step, width=width,
        wire=wire,
    )  # fmt: skip
    return weights_of(module)


@pytest.mark.multi
@pytest.mark.parametrize(("preset", "precision", "dtype"), marked(STAGED, STAGED_ALWAYS))
def test_workers_of_stages(preset: str, precision: str, dtype: str | None) -> None:
    job = Job(case="vit", num_steps=NUM_STEPS, num_epochs=1, num_micro=4)
    width = 2 if preset in REPLICAS else 1
    strategy = {"preset": preset, "wire_dtype": dtype, "stages": 4 // width, "width": width}
    ranks = pipelines(job, 4, precision, function=fit_staged, **strategy)
    parts = width if ranks[0]["plan"].sums_by_replica else 1
    args = job, precision, dtype, ranks[0]["plan"], ranks[0]["stage_of"], parts
    (expected,) = processes.run(staged_by_rule, 1, *args)
    for rank in ranks:
        assert_same(rank["weights"], expected)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("preset", ["1f1b", "pipedream_2bw"])
def test_one_pipeline_sends_no_sums(preset: str) -> None:
    with pytest.raises(ConfigurationError, match="wire_dtype='bf16' is of no use with one"):
        CyclicStrategy(preset, wire_dtype="bf16")
    CyclicStrategy(preset, wire_dtype="bf16", width=2, num_micro=2)


def test_a_dtype_that_is_none_of_these() -> None:
    with pytest.raises(ConfigurationError, match="'int8' is unknown; allowed: fp32, bf16"):
        CyclicStrategy("cyclic_dp", wire_dtype="int8")  # type: ignore[arg-type]


class Steep(Classifier):
    """Has gradients that float16 cannot hold."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 1e9 * super().training_step(batch, batch_idx)


def fit_steep() -> str:
    module = Steep(NET, "sgd")
    trainer = make_trainer({"preset": "cyclic_dp", "wire_dtype": "fp16"}, max_epochs=1)
    with pytest.raises((StepError, PeerError)) as raised:
        trainer.fit(module, train_data(module, 2))
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.multi
def test_a_sum_beyond_float16_is_named() -> None:
    sender, other = processes.run(fit_steep, 2)
    assert sender.startswith("StepError: gradients have an element of ")
    assert "but wire_dtype='fp16' sends none above 65504" in sender
    assert "rank 0" in other
