"""Profilers of torch see the actions of real fits, by the names of the plan."""

from __future__ import annotations

from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.viz.words import sentence
from tests.harness import processes
from tests.harness.pipelines import Job, pipelines, prepare
from tests.harness.trainers import make_trainer, train_data
from tests.modules.classifier import Classifier

pytestmark = pytest.mark.multi

NUM_STEPS = 3
JOB = Job(case="siamese")


def names_of(found: profile) -> set[str]:
    return {event.name for event in found.events() or ()}


def replicas(preset: str) -> set[str]:
    module = Classifier("mlp")
    trainer = make_trainer({"preset": preset, "stages": 2}, max_epochs=1)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        trainer.fit(module, train_data(module, NUM_STEPS))
    return names_of(found)


def stages(job: Job, strategy: dict[str, Any]) -> set[str]:
    run = prepare(job, strategy, [], max_steps=NUM_STEPS)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run.trainer.fit(run.module, run.batches)
    return names_of(found)


@pytest.mark.parametrize("preset", ["cyclic_dp", "1f1b"])
def test_actions_of_a_fit_are_in_its_profile(preset: str) -> None:
    is_pipeline = preset == "1f1b"
    seen = (
        pipelines(JOB, 2, function=stages, preset=preset, stages=2)
        if is_pipeline
        else processes.run(replicas, 2, preset)
    )
    plan = make_plan(
        preset, num_stages=2, num_workers=2, num_steps=NUM_STEPS,
        num_microbatches=JOB.num_microbatches if is_pipeline else None,
    )  # fmt: skip
    for w, program in enumerate(programs_of(plan)):
        kinds = (Kind.F, Kind.B, Kind.UPDATE)
        # the first step of replicas finds the stages
        own = {sentence(a) for a in program if a.kind in kinds and (is_pipeline or a.t > 0)}
        names = next(names for names in seen if own <= names)
        assert any(name.startswith("wait for") for name in names), w
        # torch would note the end of each message, which may come when the profile is gone
        assert not [name for name in names if name in ("gloo:send", "gloo:recv")], w
