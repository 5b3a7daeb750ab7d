"""Half precision goes on under another plan: from the newest scale, as the newest weights do.

What a pipeline without a flush saves beside it, the scales of steps that had begun, is of no use
to a plan under which others have. The reference is one process that goes by one rule, then by
another.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests import asynchronous, processes, sequential
from tests.corpus import assert_same
from tests.scaled import FIRST_SCALE, Scaled, precision
from tests.stagewise_runs import Job, Outcome, pipelines, prepare

pytestmark = pytest.mark.multi

JOB = Job(case="vit", num_steps=14, num_epochs=1)
RULES = {
    "pipedream_2bw": "delayed", "cyclic_pipeline": "freshest", "cyclic_mp": "freshest",
    "1f1b": "sync", "auto": "sync",
}  # fmt: skip
STEP, BATCH = 3, 6  # of the checkpoint; of the run that goes back to it


def save(job: Job, strategy: dict[str, Any] | None, folder: str) -> None:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEP, save_top_k=-1)
    flags = {"max_steps": STEP + 2, "enable_checkpointing": True, "plugins": [precision()]}
    run = prepare(job, strategy, [saver], **flags)
    run.trainer.fit(run.module, run.batches)


class GoingBack(Callback):
    """Load everything from a file in the middle of a fit."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == BATCH - 1:
            saved = trainer.strategy.load_checkpoint(self.file)
            trainer.strategy.load_model_state_dict(saved)
            trainer.strategy.load_optimizer_state_dict(saved)
            trainer.precision_plugin.load_state_dict(saved["MixedPrecision"])


def go_on(job: Job, strategy: dict[str, Any], file: str, in_the_middle: bool) -> Outcome:
    run = prepare(job, strategy, [GoingBack(file)] if in_the_middle else [], plugins=[precision()])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.trainer.fit(run.module, run.batches, ckpt_path=None if in_the_middle else file)
    scaler = run.trainer.precision_plugin.scaler.state_dict()
    return run.outcome() | {
        "stage_of": run.trainer.strategy.stage_of,
        "scaler": (scaler["scale"], scaler["_growth_tracker"]),
        "said": sum("another plan" in str(w.message) for w in said),
    }


def by_rules(
    job: Job, rules: tuple[str, str], stage_of: dict[str, int], begin: int
) -> dict[str, Any]:
    """Train by one rule up to the checkpoint, and by another from batch ``begin`` on."""
    torch.set_num_threads(1)
    module: Any = job.make()
    module.log = module.log_dict = lambda *args, **kwargs: None
    stages: list[list[nn.Parameter]] = [[] for _ in range(1 + max(stage_of.values()))]
    for name, p in module.named_parameters():
        stages[stage_of[name]].append(p)
    optimizer, state, skipped = module.configure_optimizers(), (FIRST_SCALE, 0), []
    for rule, first, num_steps in (
        (rules[0], 0, STEP), (rules[1], begin, job.num_steps - begin),
    ):  # fmt: skip
        scaled = Scaled(
            optimizer, stages, together=rule != "freshest", late=int(rule != "sync"), state=state
        )

        def loss(module: Any, t: int, i: int, first: int = first, scaled: Any = scaled) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                output = module.training_step(job.batch((first + t) * job.num_microbatches + i), 0)
            value: Tensor = output["loss"] if isinstance(output, dict) else output
            return value * scaled.scale(t)

        if rule == "sync":
            sequential.train(
                module, stages, scaled, loss, rule=rule,  # type: ignore[arg-type]
                num_workers=job.num_microbatches, num_steps=num_steps,
            )  # fmt: skip
        else:
            asynchronous.train(
                module, stages, scaled, loss, rule=rule,  # type: ignore[arg-type]
                num_microbatches=job.num_microbatches, num_steps=num_steps,
            )  # fmt: skip
        state = scaled.states[-1]
        skipped.append(scaled.skipped)
    weights = {n: x.detach().clone() for n, x in module.state_dict().items()}
    return {"weights": weights, "scaler": state, "skipped": skipped}


OTHERS = [
    ("pipedream_2bw", "cyclic_mp"), ("cyclic_mp", "pipedream_2bw"),
    ("cyclic_pipeline", "cyclic_mp"), ("1f1b", "cyclic_mp"), ("cyclic_mp", "1f1b"),
]  # fmt: skip
PLAIN = [("auto", "pipedream_2bw"), ("auto", "cyclic_mp")]  # whose epochs count micro-batches


ALWAYS = [
    ("cyclic_mp", "1f1b", False), ("auto", "pipedream_2bw", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "in_the_middle"),
    [
        pytest.param(*row, marks=() if row in ALWAYS else pytest.mark.exhaustive)
        for row in [
            *((*pair, False) for pair in OTHERS),
            *((*pair, True) for pair in OTHERS + PLAIN),
        ]
    ],
)
def test_another_plan_goes_on_from_the_newest_scale(
    first: str, second: str, in_the_middle: bool, tmp_path: Path
) -> None:
    if first == "auto":
        processes.run(save, 1, JOB, None, str(tmp_path))
    else:
        pipelines(JOB, 2, str(tmp_path), preset=first, stages=4, function=save)
    file = str(tmp_path / f"step={STEP}.ckpt")
    scales = torch.load(file, weights_only=False).get("lightning_cyclic", {}).get("scales")
    assert (scales is None) == (RULES[first] == "sync")
    assert scales is None or len(set(scales.values())) > 1  # else any of them would do
    given = pipelines(JOB, 2, file, in_the_middle, preset=second, stages=4, function=go_on)
    begin = BATCH if in_the_middle else STEP
    args = (JOB, (RULES[first], RULES[second]), given[0]["stage_of"], begin)
    (expected,) = processes.run(by_rules, 1, *args)
    for r, rank in enumerate(given):
        assert_same({n: rank["weights"][n] for n in expected["weights"]}, expected["weights"])
        assert rank["scaler"] == expected["scaler"], f"rank {r}"
        assert rank["global_step"] == JOB.num_steps
    assert given[0]["said"] == (first != "auto")
    assert all(max(skipped) > 0 for skipped in expected["skipped"])  # before, and behind


@pytest.mark.parametrize(
    "preset",
    ["pipedream", pytest.param("pipeoptim", marks=pytest.mark.exhaustive)],
)
def test_a_run_goes_back_to_its_own_checkpoint_alike_on_all_ranks(
    preset: str, tmp_path: Path
) -> None:
    job = Job(case="vit", num_steps=10, num_epochs=1, num_microbatches=1)
    plan: dict[str, Any] = {"preset": preset, "stages": 4}
    pipelines(job, 2, str(tmp_path), function=save, **plan)
    args = str(tmp_path / f"step={STEP}.ckpt"), True
    (alone,) = pipelines(job, 1, *args, function=go_on, **plan)
    for rank in pipelines(job, 2, *args, function=go_on, **plan):
        assert_same(rank["weights"], alone["weights"])
        assert rank["scaler"] == alone["scaler"]
