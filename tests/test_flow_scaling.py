"""Half precision in pipelines without a flush: the scale of each step, and which updates it skips.

The reference is one process under autocast that goes by the rule, micro-batch by micro-batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests import asynchronous, processes
from tests.corpus import assert_same
from tests.rows import more
from tests.scaled import FIRST_SCALE, Scaled, precision
from tests.stagewise_runs import Job, Outcome, loader, pipelines, prepare

MAX_NORM = 0.02
RULES = {"pipedream_2bw": "delayed", "cyclic_pipeline": "freshest", "cyclic_mp": "freshest"}
DELAYED, BY_STAGE = {"weights": "delayed"}, {"clip_norm": "stage"}
JOB = Job(case="vit", num_steps=7)


def fit(job: Job, strategy: dict[str, Any], *validation: int, **flags: Any) -> Outcome:
    flags = {"plugins": [precision()]} | flags
    if validation:
        flags |= {"val_check_interval": 2, "limit_val_batches": 1}
    run = prepare(job, strategy, **flags)
    run.trainer.fit(run.module, run.batches, loader(job, 1) if validation else None)
    scaler = run.trainer.precision_plugin.scaler
    stage_of = run.trainer.strategy.stage_of
    outcome = run.outcome() | {"stage_of": stage_of, "scaler": scaler.state_dict()}
    return outcome | {"lrs": [g["lr"] for g in run.trainer.optimizers[0].param_groups]}


def saved_and_resumed(job: Job, strategy: dict[str, Any], folder: str, step: int) -> Outcome:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=step, save_top_k=-1)
    flags = {"max_steps": step + 2, "enable_checkpointing": True, "plugins": [precision()]}
    first = prepare(job, strategy, [saver], **flags)
    first.trainer.fit(first.module, first.batches)
    second = prepare(job, strategy, plugins=[precision()])
    second.trainer.fit(second.module, second.batches, ckpt_path=f"{folder}/step={step}.ckpt")
    return second.outcome() | {"scaler": second.trainer.precision_plugin.scaler.state_dict()}


def sequential(job: Job, rule: str, stage_of: dict[str, int], max_norm: float | None) -> Outcome:
    torch.set_num_threads(1)
    module: Any = job.make()
    module.log = module.log_dict = lambda *args, **kwargs: None
    stages: list[list[nn.Parameter]] = [[] for _ in range(1 + max(stage_of.values()))]
    for name, p in module.named_parameters():
        stages[stage_of[name]].append(p)
    configured = module.configure_optimizers()
    optimizer, after = configured, lambda t: None
    if isinstance(configured, tuple):
        (optimizer,), (scheduler,) = configured
        after = lambda t: scheduler["scheduler"].step()  # noqa: E731
    scaled = Scaled(optimizer, stages, together=rule == "delayed", max_norm=max_norm, late=1)

    def loss(module: Any, t: int, i: int) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            output = module.training_step(
                job.batch(t % job.num_steps * job.num_microbatches + i), 0
            )
        value: Tensor = output["loss"] if isinstance(output, dict) else output
        return value * scaled.scale(t)

    asynchronous.train(
        module, stages, scaled, loss, rule=rule, num_microbatches=job.num_microbatches,  # type: ignore[arg-type]
        num_steps=job.num_steps * job.num_epochs, after_update=after,
    )  # fmt: skip
    state = {n: x.detach().clone() for n, x in module.state_dict().items()}
    lrs = [g["lr"] for g in optimizer.param_groups]
    return {
        "weights": state, "skipped": scaled.skipped, "state": scaled.states[-1], "lrs": lrs
    }  # fmt: skip


@pytest.mark.multi
@pytest.mark.parametrize(
    ("preset", "num_ranks", "case", "clips", "more"),
    [
        more("pipedream_2bw", 1, "vit", False, {}),
        ("pipedream_2bw", 2, "vit", True, {}),
        more("pipedream_2bw", 4, "vit", False, {}),
        more("cyclic_pipeline", 2, "vit", False, {}),
        ("cyclic_pipeline", 4, "vit", False, {}),
        ("cyclic_pipeline", 2, "vit", True, BY_STAGE),
        more("cyclic_mp", 1, "vit", False, {}),
        pytest.param("cyclic_mp", 2, "vit", False, {}, marks=pytest.mark.exhaustive),
        pytest.param("cyclic_mp", 4, "vit", True, BY_STAGE, marks=pytest.mark.exhaustive),
        ("cyclic_mp", 4, "resnet", False, {}),  # with a schedule, and buffers that change
        pytest.param("cyclic_mp", 2, "vit", False, DELAYED, marks=pytest.mark.exhaustive),
        ("cyclic_mp", 4, "vit", True, DELAYED),
        pytest.param("cyclic_mp", 4, "resnet", False, DELAYED, marks=pytest.mark.exhaustive),
    ],
)
def test_scales_and_skipped_updates_follow_the_rule(
    preset: str, num_ranks: int, case: str, clips: bool, more: dict[str, str]
) -> None:
    flags = (("gradient_clip_val", MAX_NORM),) if clips else ()
    job = Job(case=case, num_steps=JOB.num_steps, flags=flags)
    ranks = pipelines(job, num_ranks, preset=preset, stages=4, function=fit, **more)
    rule = more.get("weights", RULES[preset])
    args = (job, rule, ranks[0]["stage_of"], MAX_NORM if clips else None)
    (expected,) = processes.run(sequential, 1, *args)
    for r, rank in enumerate(ranks):
        same = {n: rank["weights"][n] for n in expected["weights"]}
        assert_same(same, expected["weights"], f"rank {r}")
        scale = (rank["scaler"]["scale"], rank["scaler"]["_growth_tracker"])
        assert scale == expected["state"]
        assert rank["global_step"] == len(expected["skipped"])  # a step that is skipped counts
        assert rank["lrs"] == expected["lrs"]
    skipped = set(expected["skipped"])
    assert 0 in skipped
    if rule == "delayed":
        assert skipped == {0, 4}
    else:
        assert skipped - {0, 4}  # some stages were updated while others were not


@pytest.mark.multi
@pytest.mark.parametrize(
    "strategy",
    [
        more({"preset": "pipedream_2bw"}),
        {"preset": "pipeoptim"},
        more({"preset": "cyclic_mp"}),
        {"preset": "cyclic_mp", **DELAYED},
    ],
)
def test_flushes_in_the_middle_change_no_scale(strategy: dict[str, Any]) -> None:
    job = Job(
        case="vit", num_microbatches=1 if strategy["preset"] == "pipeoptim" else 4, num_steps=7
    )
    alone, *_ = pipelines(job, 1, stages=4, function=fit, **strategy)
    for rank in pipelines(job, 2, 1, stages=4, function=fit, **strategy):
        assert_same(rank["weights"], alone["weights"])
        assert rank["scaler"] == alone["scaler"]


@pytest.mark.multi
@pytest.mark.parametrize(
    ("plan", "step"),
    [
        ({"preset": "pipedream_2bw"}, 2),
        more({"preset": "pipedream_2bw"}, 9),
        more({"preset": "cyclic_mp"}, 3),
        ({"preset": "cyclic_mp", **DELAYED}, 9),
    ],
)
def test_a_resumed_run_goes_on_with_the_scales(
    plan: dict[str, Any], step: int, tmp_path: Any
) -> None:
    alone, *_ = pipelines(JOB, 1, function=fit, stages=4, **plan)
    args = str(tmp_path), step
    for rank in pipelines(JOB, 2, *args, function=saved_and_resumed, stages=4, **plan):
        assert_same(rank["weights"], alone["weights"])
        assert rank["scaler"] == alone["scaler"]


@pytest.mark.multi
def test_replicas_have_the_same_scale() -> None:
    ranks = pipelines(JOB, 4, preset="pipedream_2bw", stages=2, replicas=2, function=fit)
    for rank in ranks:
        assert_same(rank["weights"], ranks[0]["weights"])
        assert rank["scaler"] == ranks[0]["scaler"]
        assert rank["scaler"]["scale"] < FIRST_SCALE
