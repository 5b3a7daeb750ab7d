"""Decisions over all stages of a pipeline without a flush: the norm, and whether to update."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from tests import processes
from tests.corpus import assert_same
from tests.rows import more
from tests.stagewise_runs import Job, Outcome, pipelines
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


def clipped(job: Job, stage_of: dict[str, int], width: int = 1) -> Outcome:
    args = (job, "delayed", stage_of, width, Clipped)
    (outcome,) = processes.run(sequential, 1, *args)
    return outcome


@pytest.mark.multi
@pytest.mark.parametrize(
    ("case", "num_ranks", "options"),
    [
        more("resnet", 1, {"stages": 4}),
        ("unet", 2, {"stages": 4}),  # two stages of a worker are updated apart
        more("vit", 4, {"stages": 4}),
        ("gpt2", 2, {"stages": 2}),  # which shares a parameter
        ("vit", 4, {"stages": 2, "width": 2}),
    ],
)
def test_clipping_by_the_norm_over_all_stages(
    case: str, num_ranks: int, options: dict[str, Any]
) -> None:
    job = Job(case=case, flags=(("gradient_clip_val", MAX_NORM),))
    ranks = pipelines(job, num_ranks, preset="pipedream_2bw", function=fit, **options)
    expected = clipped(job, ranks[0]["stage_of"], options.get("width", 1))["weights"]
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


@pytest.mark.multi
def test_synchronous_steps_at_first_are_clipped_so_too() -> None:
    job = Job(case="vit", num_steps=3, flags=(("gradient_clip_val", MAX_NORM),))
    plan = {"preset": "pipedream_2bw", "stages": 4, "warmup_steps": job.num_steps * job.num_epochs}
    sync, *_ = pipelines(job, 1, function=fit, preset="1f1b", stages=4)
    for num_ranks in (1, 2):
        for rank in pipelines(job, num_ranks, function=fit, **plan):
            assert_same(rank["weights"], sync["weights"])


@pytest.mark.parametrize("num_micro", [3, 4, 7])
def test_no_stage_waits_for_a_norm(num_micro: int) -> None:
    plan = make_plan(
        "pipedream_2bw", num_stages=4, num_workers=4, num_micro=num_micro, num_steps=6,
        late_updates=True,
    )  # fmt: skip
    ends = [plan.slot(Kind.B, 2, num_micro - 1, j) for j in range(4)]  # the last, of stage 0
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
