"""Decisions over all stages of a pipeline without a flush: the norm, and whether to update."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cyclic.errors import CyclicError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from tests.harness import processes
from tests.harness.pipelines import Job, Outcome, pipelines
from tests.harness.trainers import assert_same, make_trainer, strategy_of
from tests.references.delayed import Chain, loader
from tests.test_flow_features import saved_and_resumed, validated
from tests.test_flow_parity import fit, sequential

MAX_NORM = 0.02


class Clipped:
    """Clip the gradients of all stages by one norm before each update, as one process does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        total = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        assert total > MAX_NORM  # else nothing is tested
        self._optimizer.step()


def clipped(job: Job, stage_of: dict[str, int], replicas: int = 1) -> Outcome:
    args = (job, "delayed", stage_of, replicas, Clipped)
    (outcome,) = processes.run(sequential, 1, *args)
    return outcome


@pytest.mark.multi
@pytest.mark.parametrize(
    ("case", "num_ranks", "options"),
    [
        ("unet", 2, {"stages": 4}),  # two stages of a worker are updated apart
        ("gpt2", 2, {"stages": 2}),  # which shares a parameter
        ("vit", 4, {"stages": 2, "replicas": 2}),
    ],
)
def test_clipping_by_the_norm_over_all_stages(
    case: str, num_ranks: int, options: dict[str, Any]
) -> None:
    job = Job(case=case, flags=(("gradient_clip_val", MAX_NORM),))
    ranks = pipelines(job, num_ranks, preset="pipedream_2bw", function=fit, **options)
    expected = clipped(job, ranks[0]["stage_of"], options.get("replicas", 1))["weights"]
    for r, rank in enumerate(ranks):
        assert_same({n: rank["weights"][n] for n in expected}, expected, f"rank {r}")


@pytest.mark.multi
def test_flushes_in_the_middle_change_no_norm(tmp_path: Any) -> None:
    job = Job(case="vit", num_steps=5, flags=(("gradient_clip_val", MAX_NORM),))
    plan = {"preset": "pipedream_2bw", "stages": 4}
    alone, *_ = pipelines(job, 1, function=fit, **plan)
    for ranks in (
        pipelines(job, 2, function=validated, **plan),
        pipelines(job, 2, str(tmp_path), 3, function=saved_and_resumed, **plan),
    ):
        for rank in ranks:
            assert_same(rank["weights"], alone["weights"])


@pytest.mark.parametrize("num_microbatches", [3, 4, 7])
def test_no_stage_waits_for_a_norm(num_microbatches: int) -> None:
    plan = make_plan(
        "pipedream_2bw", num_stages=4, num_workers=4, num_microbatches=num_microbatches,
        num_steps=6,
        late_updates=True,
    )  # fmt: skip
    ends = [
        plan.slot(Kind.B, 2, num_microbatches - 1, j) for j in range(4)
    ]  # the last, of stage 0
    for program in plan.programs:
        (update,) = [a for a in program if a.kind is Kind.UPDATE and a.t == 2]
        first = next(a for a in program if a.kind is Kind.F and a.v == 3)
        assert max(ends) < update.s == first.s


def test_gradients_of_the_next_step_come_before_a_late_update() -> None:
    """So the tests above would fail if a stage mixed the two that it holds then."""
    plan = make_plan("pipedream_2bw", num_stages=4, num_workers=4, num_steps=6, late_updates=True)
    program = [a for a in plan.programs[3] if a.kind in (Kind.B, Kind.UPDATE)]
    at = next(n for n, a in enumerate(program) if a.kind is Kind.UPDATE and a.t == 2)
    assert {a.t for a in program[:at] if a.kind is Kind.B} == {0, 1, 2, 3}


# ---------------------------------------------------------------------- by metrics


class Decides(Chain):
    """Logs its loss, and lets one rank stop.

    Args:
        stops: by step and rank, where trainer.should_stop is set.
        plateau: whether the learning rate is decided by the loss of each step.
    """

    def __init__(self, stops: tuple[int, int] | None = None, *, plateau: bool = False) -> None:
        super().__init__()
        self.stops, self.plateau = stops, plateau

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx, self.global_rank) == self.stops:
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.plateau:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "loss"}]


def decide(
    kwargs: dict[str, Any], callbacks: list[Any], folder: Path, flags: dict[str, Any]
) -> tuple[str, list[str], int]:
    """Return the error of a fit, the files that were written, and the steps made."""
    strategy = strategy_of({"preset": "cyclic_pipeline", "num_microbatches": 2})
    strategy._timeout = timedelta(seconds=8 if "stops" in kwargs else 20)
    flags |= {"enable_checkpointing": any(isinstance(x, ModelCheckpoint) for x in callbacks)}
    trainer = make_trainer(strategy, max_epochs=2, callbacks=callbacks, **flags)
    text = ""
    try:
        trainer.fit(Decides(**kwargs), loader(2, 4), loader(2, 1))
    except CyclicError as error:
        text = str(error)
    return text, sorted(path.name for path in folder.iterdir()), trainer.global_step


@pytest.mark.multi
@pytest.mark.parametrize(
    ("who", "kwargs", "callback", "flags"),
    [
        ("ModelCheckpoint", {}, ModelCheckpoint, {"every_n_train_steps": 1}),
        ("EarlyStopping", {}, EarlyStopping, {}),
        ("ReduceLROnPlateau", {"plateau": True}, None, {}),
    ],
)
def test_what_decides_within_an_epoch_by_a_metric_of_its_steps_is_refused(
    who: str, kwargs: Any, callback: Any, flags: Any, tmp_path: Path
) -> None:
    flags |= {"dirpath": tmp_path} if callback is ModelCheckpoint else {}
    callbacks = [callback(monitor="loss", **flags)] if callback else []
    often = {"val_check_interval": 2} if callback is EarlyStopping else {}
    for text, files, _ in processes.run(decide, 2, kwargs, callbacks, tmp_path, often):
        assert text.startswith(f"{who} decides within an epoch by 'loss', a metric of the steps")
        assert files == []


@pytest.mark.multi
def test_what_decides_by_validation_or_at_the_end_of_an_epoch_decides_alike(
    tmp_path: Path,
) -> None:
    callbacks = [
        ModelCheckpoint(tmp_path, "a{step}", monitor="val_loss", every_n_train_steps=3),
        ModelCheckpoint(tmp_path, "b{step}", monitor="loss", save_on_train_epoch_end=True),
        EarlyStopping(monitor="loss", check_on_train_epoch_end=True, divergence_threshold=0.0),
    ]
    flags = {"val_check_interval": 2}
    for text, files, steps in processes.run(decide, 2, {}, callbacks, tmp_path, flags):
        assert (text, files, steps) == ("", ["astep=3.ckpt", "bstep=4.ckpt"], 4)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("stops", "words"),
    [
        (
            (1, 1),
            r"rank 1 on \S+ .*(waited 8 s for rank 0 on \S+ .*|waits itself for all ranks )to "
            "stop training as rank 1 does, whose trainer.should_stop is set",
        ),
        ((3, 0), "trainer.should_stop is set on rank 0, and not on rank 1; allowed: "),
    ],
    ids=["in an epoch", "behind its last batch"],
)
def test_a_rank_that_stops_alone_is_named_soon(
    stops: tuple[int, int], words: str, tmp_path: Path
) -> None:
    kwargs = {"stops": stops}
    for text, *_ in processes.run(decide, 2, kwargs, [], tmp_path, {}, time_limit_s=30):
        assert re.search(words, text), text
