"""activation_checkpointing="optimal": the bits of "never", with units run again to keep a limit.

How a unit is run again, with the bytes and runs of the plan: tests/runtime/partial_step/
test_segments.py; which are: tests/planner/test_rematerialisation.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from tests.harness.pipelines import Job, Outcome, fit, pipelines
from tests.harness.processes import RanksFailedError
from tests.harness.rows import in_words, more
from tests.harness.trainers import assert_same
from tests.modules import changed

pytestmark = pytest.mark.multi


class Chosen(Callback):
    """Remember how many units of each stage of this rank are run again, of how many."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, int, int]] = {}

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        session: Any = trainer.strategy._training._session  # type: ignore[attr-defined]
        for (j, _), (chain, plan) in session._step.schedules.chosen.items():
            room = session._step.schedules._rooms[j]
            assert plan.peak_bytes <= room.bytes
            self.found[j] = plan.runs_again, len(chain.units), plan.peak_bytes


def fit_again(job: Job, strategy: dict[str, Any]) -> Outcome:
    chosen = Chosen()
    return fit(job, strategy, callbacks=[chosen]) | {"again": chosen.found}


@pytest.mark.parametrize(
    ("name", "preset", "num_ranks", "limit", "options"),
    [
        ("gpt2", "1f1b", 2, 195007, {"stages": 2}),
        ("resnet", "gpipe", 1, 558007, {"stages": 2}),
        ("resnet", "cyclic_pipeline", 2, 242948, {"stages": 2}),
        ("gpt2", "zb_h1", 2, 205007, {"stages": 2}),
        more("gpt2", "pipedream_2bw", 1, 504007, {"stages": 2}),
        more("unet", "1f1b", 2, 92608, {"stages": 2}),
        more("resnet", "interleaved_1f1b", 2, 440896, {"stages": 4}),
        more("gpt2", "interleaved_1f1b", 1, 697007, {"stages": 4}),
        ("t5", "pipedream", 2, 239007, {"stages": 2}),
        more("resnet", "cyclic_mp", 2, 242948, {"stages": 2}),
        more("gpt2", "zb_v", 2, 481476, {"stages": 4}),
        more("resnet", "dualpipe_v", 2, 471572, {"stages": 4}),
        more("resnet", "1f1b", 4, 308372, {"stages": 2, "replicas": 2}),
    ],
    ids=in_words,
)
def test_the_bits_are_those_of_keeping_all(
    name: str, preset: str, num_ranks: int, limit: int, options: dict[str, Any]
) -> None:
    replicas = options.get("replicas", 1)
    m = replicas if preset == "pipedream" else 4
    job = Job(case=name, num_microbatches=m, dropout=0.2)
    _assert_same_bits(job, num_ranks, limit, {"preset": preset, **options})


def _assert_same_bits(job: Job, num_ranks: int, limit: int, strategy: dict[str, Any]) -> None:
    never = pipelines(job, num_ranks, **strategy)
    again = pipelines(
        job, num_ranks, function=fit_again, activation_checkpointing="optimal",
        memory_limit_bytes=limit, **strategy,
    )  # fmt: skip
    assert any(runs for rank in again for runs, _, _ in rank["again"].values())
    for r, (rank, expected) in enumerate(zip(again, never, strict=True)):
        assert_same(rank["weights"], expected["weights"], f"rank {r}")
        assert rank["logged"] == expected["logged"]


@pytest.mark.parametrize(
    ("name", "preset", "limit"),
    [
        ("checkpointed", "1f1b", 132864),
        more("compiled", "1f1b", 184704),
        more("adapted", "zb_h1", 195416),
        more("frozen", "1f1b", 177024),
    ],
)
def test_models_as_users_change_them(name: str, preset: str, limit: int) -> None:
    job = Job(case="gpt2", module=getattr(changed, name), dropout=0.2)
    _assert_same_bits(job, 2, limit, {"preset": preset, "stages": ["model.transformer.h.2"]})


def test_a_limit_that_nothing_meets_names_the_nearest() -> None:
    job, strategy = Job(case="resnet"), {"preset": "gpipe", "stages": 1}
    again = {"activation_checkpointing": "optimal", **strategy}
    with pytest.raises(RanksFailedError, match=r"memory_limit_bytes=100000 leaves 0") as failed:
        pipelines(job, 1, memory_limit_bytes=100_000, **again)
    (nearest,) = set(re.findall(r"use memory_limit_bytes=(\d+)", str(failed.value)))
    with pytest.raises(RanksFailedError, match=f"use memory_limit_bytes={nearest}"):
        pipelines(job, 1, memory_limit_bytes=int(nearest) - 1, **again)
    (rank,) = pipelines(
        job, 1, function=fit_again, memory_limit_bytes=int(nearest), **again
    )  # fmt: skip
    assert rank["again"][0][0] > 0
