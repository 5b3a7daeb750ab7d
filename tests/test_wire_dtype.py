"""Sums of gradients that travel: in which dtype they are added, and how they are rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cyclic import CyclicStrategy
from lightning_cyclic.errors import ConfigurationError, PeerError, StepError
from lightning_cyclic.registration import make_strategy
from tests.harness import processes
from tests.harness.pipelines import Job, pipelines
from tests.harness.trainers import assert_same, make_trainer, train_data
from tests.modules.classifier import Classifier
from tests.test_precisions import fit_staged, fit_whole, staged_by_rule, whole_by_rule

NUM_STEPS, NET = 6, "resnet"
DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# ---------------------------------------------------------------------- whole steps


@pytest.mark.multi
@pytest.mark.parametrize(
    ("preset", "groups", "precision", "dtype"),
    [
        ("cyclic_zero", None, "32-true", "bf16"), ("lockstep_dp", None, "bf16-true", None),
        ("cyclic_dp", 2, "32-true", "bf16"), ("cyclic_dp", 2, "bf16-true", None),
    ],
)  # fmt: skip
def test_workers_of_whole_steps(
    preset: str, groups: int | None, precision: str, dtype: str | None
) -> None:
    strategy = {"preset": preset, "stages": 4, "reduce_dtype": dtype}
    strategy |= {"group_size": 4 // groups} if groups else {}
    ranks = processes.run(fit_whole, 4, strategy, precision)
    plan = ranks[0]["plan"]
    args = precision, plan.weights, ranks[0]["stage_of"], plan, DTYPES[dtype]
    (expected,) = processes.run(whole_by_rule, 1, *args)
    for rank in ranks:
        assert_same(rank["weights"], expected)


# ---------------------------------------------------------------------- stages apart


@pytest.mark.multi
@pytest.mark.parametrize(
    ("preset", "precision", "dtype"),
    [
        ("1f1b", "bf16-true", None), ("pipedream_2bw", "32-true", "bf16"),
        ("cyclic_mp", "bf16-true", None),
    ],
)  # fmt: skip
def test_workers_of_stages(preset: str, precision: str, dtype: str | None) -> None:
    job = Job(case="vit", num_steps=NUM_STEPS, num_epochs=1, num_microbatches=4)
    replicas = 1 if preset == "cyclic_mp" else 2
    strategy = {
        "preset": preset,
        "reduce_dtype": dtype,
        "stages": 4 // replicas,
        "replicas": replicas,
    }
    ranks = pipelines(job, 4, precision, function=fit_staged, **strategy)
    plan = ranks[0]["plan"]
    parts = replicas if plan.sums_by_replica else 1
    args = job, precision, plan.weights, ranks[0]["stage_of"], plan, DTYPES[dtype], parts
    (expected,) = processes.run(staged_by_rule, 1, *args)
    for rank in ranks:
        assert_same(rank["weights"], expected)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("preset", ["1f1b", "pipedream_2bw"])
def test_one_pipeline_sends_no_sums(preset: str) -> None:
    with pytest.raises(
        ConfigurationError, match="reduce_dtype='bf16' with preset .*, which does not use it"
    ):
        make_strategy(preset, reduce_dtype="bf16")
    make_strategy(preset, reduce_dtype="bf16", replicas=2, num_microbatches=2)


def test_a_dtype_that_is_none_of_these() -> None:
    with pytest.raises(ConfigurationError, match="reduce_dtype='int8'; allowed: 'fp32', 'bf16'"):
        CyclicStrategy("cyclic_dp", reduce_dtype="int8")  # type: ignore[arg-type]


class Steep(Classifier):
    """Has gradients that float16 cannot hold."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 1e9 * super().training_step(batch, batch_idx)


def fit_steep() -> str:
    module = Steep(NET, "sgd")
    trainer = make_trainer({"preset": "cyclic_dp", "reduce_dtype": "fp16"}, max_epochs=1)
    with pytest.raises((StepError, PeerError)) as raised:
        trainer.fit(module, train_data(module, 2))
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.multi
def test_a_sum_beyond_float16_is_named() -> None:
    sender, other = processes.run(fit_steep, 2)
    assert sender.startswith("StepError: gradients have an element of ")
    assert "but reduce_dtype='fp16' sends none above 65504" in sender
    assert "rank 0" in other


def fit_unlike(preset: str) -> str:
    strategy = {"preset": preset, "reduce_dtype": "bf16" if processes.here().rank else None}
    more = {"replicas": 2, "stages": 1, "num_microbatches": 2} if preset == "gpipe" else {}
    module = Classifier("mlp", "sgd")
    with pytest.raises(StepError) as raised:
        make_trainer(strategy | more, max_epochs=1).fit(module, train_data(module, 2))
    return str(raised.value)


@pytest.mark.multi
@pytest.mark.parametrize("preset", ["cyclic_dp", "gpipe"])
def test_ranks_with_other_arguments_are_refused(preset: str) -> None:
    for text in processes.run(fit_unlike, 2, preset):
        assert text.startswith(
            f"ranks differ in the arguments of {type(make_strategy(preset)).__name__}: "
        )
        assert "reduce_dtype=None" in text
        assert "reduce_dtype='bf16'" in text
