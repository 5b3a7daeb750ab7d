"""Every precision, and every dtype in which sums travel: the bits of one process by the same rule.

The reference computes by Lightning's own precision plugin. Half precision with a loss scale is in
test_loss_scaling.py.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.pipelines import Job, assert_equals_plain, pipelines
from tests.harness.rows import in_words, more
from tests.modules.plain import Images, Logging, accuracy
from tests.references.rules import WHOLE, Reference

pytestmark = pytest.mark.multi

DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def plugin(precision: str) -> Precision:
    if precision == "32-true":
        return Precision()
    if precision == "64-true":
        return DoublePrecision()
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", "cpu")
    return HalfPrecision(precision)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("preset", "num_ranks", "precision", "options"),
    [
        ("cyclic_dp", 2, "bf16-true", {"stages": 4}),
        ("cyclic_zero", 2, "bf16-mixed", {"stages": 4}),
        more("cyclic_zero", 2, "64-true", {"stages": 4}),
        ("gpipe", 2, "16-true", {"stages": 4}),
        more("1f1b", 2, "bf16-mixed", {"stages": 4}),
        more("pipedream_2bw", 2, "bf16-true", {"stages": 4}),
        ("cyclic_pipeline", 2, "64-true", {"stages": 4}),
        # sums that travel: of workers
        ("lockstep_dp", 2, "bf16-true", {"stages": 4}),
        ("cyclic_zero", 2, "32-true", {"stages": 4, "compress": "bf16"}),
        more("cyclic_dp", 2, "32-true", {"stages": 4, "compress": "fp16"}),
        # of groups, which add in two places
        ("cyclic_dp", 4, "32-true", {"stages": 4, "group_size": 2, "compress": "bf16"}),
        more("cyclic_dp", 4, "bf16-true", {"stages": 4, "group_size": 2}),
        # of replicas
        ("1f1b", 4, "bf16-true", {"stages": 2, "replicas": 2}),
        ("pipedream_2bw", 4, "32-true", {"stages": 2, "replicas": 2, "compress": "bf16"}),
        # of workers that take turns
        ("cyclic_mp", 2, "bf16-true", {"stages": 2}),
        more("cyclic_mp", 4, "bf16-true", {"stages": 4}),
    ],
    ids=in_words,
)
def test_every_rank_has_the_bits_of_its_rule(
    preset: str, num_ranks: int, precision: str, options: dict[str, Any]
) -> None:
    m = num_ranks if preset in WHOLE else 4
    case = "vit" if "replicas" in options or preset == "cyclic_mp" else "resnet"
    flags = (("precision", precision),)
    job = Job(case=case, num_steps=6, num_epochs=1, num_microbatches=m, flags=flags)
    ranks = pipelines(job, num_ranks, preset=preset, **options)
    reference = Reference(job, ranks[0]["stage_of"], plugin(precision))
    reference.train(ranks[0]["plan"], dtype=DTYPES[options.get("compress")]).compare(ranks)


def test_mixed_precision_with_rematerialisation() -> None:
    job = Job(case="gpt2", flags=(("precision", "bf16-mixed"),))
    again = {"activation_checkpointing": "always"}
    assert_equals_plain(pipelines(job, 2, preset="1f1b", stages=4, **again), job)


# ---------------------------------------------------------------------- FP8


class Float8(Logging):
    """Computes in FP8, emulated: layers of torchao, whose scales come from what they are given."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(accuracy(16))
        self.net = nn.Sequential(nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 16))
        logging.disable(logging.WARNING)  # of kernels that are for GPUs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig(emulate=True)
            self.net = convert_to_float8_training(self.net, config=config)
        logging.disable(logging.NOTSET)

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        logits = self.net(batch[0].flatten(1))
        return self.note(F.cross_entropy(logits, batch[1]), logits, batch[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_zero", "lockstep_dp"])
def test_layers_of_torchao_have_the_bits_of_one_process(preset: str) -> None:
    pytest.importorskip("torchao", reason="pip install torchao")  # which CI does not install
    assert "Float8Linear" in {type(m).__name__ for m in Float8().modules()}
    job = Job(case="resnet", module=Float8, size=16, num_microbatches=2)
    ranks = pipelines(job, 2, preset=preset, stages=["net.2"])
    Reference(job, ranks[0]["stage_of"]).train(ranks[0]["plan"]).compare(ranks)
