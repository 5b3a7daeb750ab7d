"""Several replicas of a pipeline without a flush: one exchange of gradients per update."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_cyclic import PipelineStrategy
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind, Payload
from tests.harness import processes
from tests.harness.pipelines import Job, Outcome, pipelines
from tests.harness.trainers import assert_same, make_trainer, weights_of
from tests.test_failures import BAD_STEP, TroubledStage, batches, be_asked_to_stop
from tests.test_flow_features import saved_and_resumed, validated
from tests.test_flow_parity import fit

pytestmark = pytest.mark.multi


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twins(Job):
    """Give every micro-batch to both replicas: half of each gradient twice is one of them."""

    def batch(self, k: int) -> Any:
        return super().batch(k // 2)


@pytest.mark.parametrize("preset", ["pipeoptim", "spectrain"])
def test_every_replica_predicts_as_the_owner_does(preset: str) -> None:
    job = Job(case="vit", num_microbatches=1)
    twins = Twins(case="vit", num_microbatches=2)
    one, *_ = pipelines(job, 2, preset=preset, stages=2, function=fit)
    for rank in pipelines(twins, 4, preset=preset, stages=2, replicas=2, function=fit):
        assert_same(rank["weights"], one["weights"])


# ---------------------------------------------------------------------- in the middle


@cache
def unbroken(job: Job, **strategy: Any) -> Outcome:
    """Return what a run on four ranks gives that nothing interrupts; run once per session."""
    return pipelines(job, 4, function=fit, **strategy)[0]


def test_validation_and_checkpoints_change_nothing(tmp_path: Path) -> None:
    job = Job(case="resnet", num_steps=5)
    plan = {"preset": "cyclic_pipeline", "stages": 2, "replicas": 2}
    for what, ranks in {
        "validated": pipelines(job, 4, function=validated, **plan),
        "resumed": pipelines(job, 4, str(tmp_path), 3, function=saved_and_resumed, **plan),
    }.items():
        for r, rank in enumerate(ranks):
            assert_same(rank["weights"], unbroken(job, **plan)["weights"], f"{what} rank {r}")


def fit_until_asked(culprit: int) -> tuple[int, dict[str, Tensor]]:
    """Return batches done and weights; one rank is asked to stop."""
    here = processes.here().rank
    module = TroubledStage(be_asked_to_stop if here == culprit else lambda: None, 3, "train")
    strategy = PipelineStrategy(
        "pipedream_2bw", stages=["layers.2"], replicas=2, num_microbatches=2
    )
    trainer = make_trainer(strategy, max_epochs=4)
    with pytest.raises(SIGTERMException):
        trainer.fit(module, batches())
    return module.done, weights_of(module)


def test_all_replicas_stop_at_the_same_step() -> None:
    ends = processes.run(fit_until_asked, 4, 2, time_limit_s=50)
    assert len({done for done, _ in ends}) == 1
    assert BAD_STEP < ends[0][0] <= BAD_STEP + 8
    for _, weights in ends:
        assert_same(weights, ends[0][1])


# ---------------------------------------------------------------------- messages


def test_replicas_exchange_gradients_once_per_update() -> None:
    plan = make_plan("pipedream_2bw", num_stages=2, num_workers=6, num_microbatches=12, replicas=3)
    for w, program in enumerate(plan.programs):
        replica, stage = divmod(w, 2)
        of_step = [a for a in program if a.t == 2]
        sums = [(a.kind, a.peer) for a in of_step if a.payload in (Payload.S, Payload.T)]
        before, after = (Kind.RECV, w - 2), (Kind.SEND, w + 2)
        assert sums == [before] * (replica > 0) + [after] * (replica < 2)
        versions = [a for a in program if a.payload is Payload.P and a.v == 3]
        assert [a.kind for a in versions] == ([Kind.SEND] * 2 if replica == 2 else [Kind.RECV])
        assert plan.owner(stage) == 4 + stage
