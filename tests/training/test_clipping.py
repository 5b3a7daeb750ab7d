"""Gradients are clipped as on one device: by value, by the norm of all, or of each stage."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.pipelines import Job, fit, pipelines
from tests.harness.rows import in_words, more
from tests.modules.plain import Images, Logging, accuracy
from tests.references.rules import WHOLE, Clipped, Reference

pytestmark = pytest.mark.multi

LIMIT = 0.02
DELAYED = {"weights": "delayed"}
VALUE = {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.001}


class Meets(Callback):
    """All workers meet behind each step, as they do to write a checkpoint."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            assert trainer.strategy.broadcast(trainer.global_step) == trainer.global_step


class Backwards(Logging):
    """Uses its parameters in another order than it registers them, as torch's Transformer does."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(accuracy())
        self.d, self.c, self.b = (nn.Linear(12, n) for n in (4, 12, 12))
        self.a = nn.Linear(192, 12)

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        x = self.b(torch.tanh(self.a(batch[0].flatten(1))))
        logits = self.d(torch.tanh(self.c(torch.tanh(x))))
        return self.note(F.cross_entropy(logits, batch[1]), logits, batch[1])


MEETS, TWO = {"callbacks": [Meets()]}, {"accumulate_grad_batches": 2}
BACKWARDS = {"stages": ["c"], "clip_norm": "stage"}


@pytest.mark.parametrize(
    ("preset", "num_ranks", "case", "by", "flags", "options"),
    [
        # workers that run whole micro-batches
        ("cyclic_dp", 2, "resnet", "value", VALUE, {"stages": 4}),
        ("cyclic_dp", 2, "resnet", "stage", {}, {"stages": 5, "clip_norm": "stage"}),
        more("cyclic_dp", 2, "gpt2", "all", {}, {"stages": 5, "clip_norm": "global"}),
        more("cyclic_dp_v1", 4, "unet", "all", {}, {"stages": 5}),
        more("lockstep_dp", 4, "unet", "all", {}, {"stages": 5}),
        ("lockstep_dp", 2, "unet", "all", {}, {"stages": 5}),
        # where buffers travel, too, and where updates meet: inside of a step, or behind it
        ("cyclic_dp", 2, "resnet", "all", {}, {"stages": 2, "clip_norm": "global"}),
        more("cyclic_zero", 2, "resnet", "all", TWO, {"stages": 2, "clip_norm": "global"}),
        more("cyclic_zero", 4, "resnet", "all", {}, {"stages": 3, "clip_norm": "global"}),
        ("cyclic_dp", 3, "resnet", "all", MEETS | TWO, {"stages": 3, "clip_norm": "global"}),
        ("cyclic_zero", 2, "resnet", "all", MEETS, {"stages": 2, "clip_norm": "global"}),
        more("cyclic_zero", 3, "unet", "all", MEETS | TWO, {"stages": 4, "clip_norm": "global"}),
        ("cyclic_dp_v1", 2, "unet", "all", MEETS, {"stages": 5, "clip_norm": "global"}),
        # groups of workers, whose messages have no names
        (
            "cyclic_dp",
            4,
            "gpt2",
            "all",
            TWO,
            {"stages": 4, "clip_norm": "global", "group_size": 2, "transport": "edges"},
        ),
        # one device adds norms in the order in which many do
        ("cyclic_dp", 1, Backwards, "stage", {}, BACKWARDS),
        ("cyclic_dp", 2, Backwards, "stage", {}, BACKWARDS),
        # stages apart, with a flush
        more("1f1b", 2, "resnet", "all", {}, {"stages": 2}),
        ("1f1b", 2, "gpt2", "all", {}, {"stages": 4}),  # whose tied weights count once
        ("gpipe", 2, "frozen", "all", {}, {"stages": 2}),
        more("gpipe", 4, "resnet", "value", VALUE, {"stages": 4}),
        # without one
        ("pipedream_2bw", 2, "unet", "all", {}, {"stages": 4}),  # two stages, updated apart
        more("pipedream_2bw", 2, "vit", "all", {"val_check_interval": 2}, {"stages": 4}),
        more("pipedream_2bw", 2, "gpt2", "all", {}, {"stages": 2}),  # which share a parameter
        ("pipedream_2bw", 4, "vit", "all", {}, {"stages": 2, "replicas": 2}),
        ("cyclic_pipeline", 2, "resnet", "stage", {}, {"stages": 4, "clip_norm": "stage"}),
        more("cyclic_pipeline", 4, "resnet", "value", VALUE, {"stages": 4}),
        ("cyclic_mp", 2, "resnet", "all", {}, {"stages": 4, **DELAYED}),
        ("cyclic_mp", 2, "resnet", "stage", {}, {"stages": 2, "clip_norm": "stage"}),
    ],
    ids=in_words,
)
def test_it_clips_as_one_process_does(
    preset: str, num_ranks: int, case: Any, by: str, flags: dict[str, Any],
    options: dict[str, Any],
) -> None:  # fmt: skip
    job = Job(
        case="resnet" if isinstance(case, type) else case,
        module=case if isinstance(case, type) else None, num_epochs=1, num_steps=8,
        num_microbatches=num_ranks if preset in WHOLE and num_ranks > 1 else 4,
        flags=tuple(({"gradient_clip_val": LIMIT} | flags).items()),
    )  # fmt: skip
    ranks = pipelines(job, num_ranks, preset=preset, **options)
    reference = Reference(job, ranks[0]["stage_of"])
    limit = VALUE["gradient_clip_val"] if by == "value" else LIMIT
    clipped = Clipped(reference.optimizer, reference.stages, limit, by)
    reference.optimizer = clipped
    accumulate = flags.get("accumulate_grad_batches", 1)
    reference.train(ranks[0]["plan"], accumulate=accumulate).compare(ranks)
    assert clipped.has_clipped  # else nothing is tested


def warnings_of_fit(job: Job, strategy: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=r"gradient_clip_val clips")
        fit(job, strategy)
    return [str(each.message) for each in caught]


def test_clipping_of_freshest_weights_says_once_what_it_does() -> None:
    flags = (("gradient_clip_val", LIMIT),)
    job = Job(case="unet", num_microbatches=2, num_steps=2, num_epochs=1, flags=flags)
    (said,), others = pipelines(job, 2, preset="cyclic_dp", function=warnings_of_fit)
    assert "clips each stage by its own norm" in said
    assert others == []
    chosen = {"preset": "cyclic_dp", "clip_norm": "stage"}
    assert pipelines(job, 2, function=warnings_of_fit, **chosen) == [[], []]
