"""A run that is interrupted ends with the bits of one that was not.

By SIGTERM to one rank, on which all stop at the same step, and by kill -9 of one, from the newest
file that is whole. A file that an interrupted run leaves is that which the other one wrote behind
the same step, so that what follows from it follows from the other.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_cyclic import LocalSteps
from tests.harness import processes
from tests.harness.interrupted import (
    Interruption,
    Outcome,
    Way,
    comparable,
    contents,
    difference,
    fit,
    newest,
    run_until_killed,
)
from tests.harness.trainers import assert_same

pytestmark = pytest.mark.multi


LATE = LocalSteps(every=3, delay=1)  # in whose periods a run is stopped


@pytest.mark.parametrize(
    ("preset", "axes"), [("cyclic_dp", {}), ("1f1b", {}), ("diloco", {"weights": LATE})]
)
def test_a_run_that_is_interrupted_ends_with_the_same_bits(
    preset: str, axes: dict[str, Any], tmp_path: Path
) -> None:
    strategy = {"preset": preset, "stages": 4, **axes}
    way = Way(strategy=strategy, num_batches=5, num_steps=12, num_workers=1)

    def run(folder: str, at: Interruption | None, start: str | None) -> list[Outcome]:
        args = way, str(tmp_path / folder), at, start
        return processes.run(fit, 2, *args, time_limit_s=100)

    def left_in(folder: str) -> str:
        path = newest(tmp_path / folder) or start  # where it stops as it begins
        left = contents(path)
        expected = contents(tmp_path / "whole" / f"step={left['global_step']}.ckpt")
        assert difference(left, expected) is None
        return path

    def compare_losses(losses: dict[int, float]) -> None:
        assert losses == {k: x for k, x in whole[0].losses.items() if k in losses}

    whole = run("whole", None, None)
    start = str(tmp_path / "whole" / "step=4.ckpt")
    stopped = run("stopped", Interruption.drawn(signal.SIGTERM, 4, 2, preset), start)
    assert stopped[0].stopped
    assert len({rank.steps for rank in stopped}) == 1
    compare_losses(stopped[0].losses)
    at = Interruption.drawn(signal.SIGKILL, 8, 2, preset)
    run_until_killed(way, 2, tmp_path / "killed", at, left_in("stopped"))
    ranks = run("killed", None, left_in("killed"))
    assert ranks[0].steps == way.num_steps
    for rank, expected in zip(ranks, whole, strict=True):  # each may have buffers of its own
        assert_same(rank.weights, expected.weights)
    compare_losses(ranks[0].losses)
    assert difference(*(comparable(x[0].file) for x in (ranks, whole))) is None
