"""A run that is interrupted in any step ends with the bits of one that was not.

By SIGTERM to one rank, on which all stop at the same step, and by kill -9 of one, from the newest
file that is whole. A file that an interrupted run leaves is that which the other one wrote behind
the same step, so that what follows from it follows from the other.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from lightning_cyclic.plan.presets import PRESETS
from tests import processes
from tests.corpus import assert_same
from tests.interrupted import (
    NUM_STEPS,
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
from tests.rows import more

pytestmark = pytest.mark.multi

# whose steps overlap: a loss is logged in the step under way when it is known, and the first
# behind a file in its own
FLOW = [n for n, x in PRESETS.items() if x.schedule == "cyclic" and x.placement != "replicated"]
ACCUMULATE = ["lockstep_dp", "cyclic_dp_v1", "cyclic_zero", "gpipe"]
DEALT = ["cyclic_dp", "lockstep_dp"]


def way_of(preset: str, num_ranks: int) -> Way:
    return Way(
        strategy={"preset": preset, "stages": 4},
        accumulate=2 if preset in ACCUMULATE and num_ranks == 2 else 1,
        shared_order=preset in DEALT and num_ranks == 4,
    )


class Runs:
    """Interrupt a run, and compare what it leaves with one that is not.

    Args:
        preset: whose name seeds what is drawn.
        num_ranks: of all runs.
        folder: of all files.
    """

    def __init__(self, preset: str, num_ranks: int, folder: Path) -> None:
        self.preset, self.num_ranks, self.folder = preset, num_ranks, folder
        self.way = way_of(preset, num_ranks)
        self.whole = self._run("whole", None, None)

    def _run(self, folder: str, at: Interruption | None, start: str | None) -> list[Outcome]:
        path = str(self.folder / folder)
        return processes.run(fit, self.num_ranks, self.way, path, at, start, time_limit_s=100)

    def _at(self, number: int, step: int) -> Interruption:
        return Interruption.drawn(number, step, self.num_ranks, self.preset)

    def _compare_file(self, path: str | None) -> None:
        if path is not None:
            left = contents(path)
            expected = contents(self.folder / "whole" / f"step={left['global_step']}.ckpt")
            assert difference(left, expected) is None

    def _compare_losses(self, losses: dict[int, float]) -> None:
        expected = {k: x for k, x in self.whole[0].losses.items() if k in losses}
        if self.preset in FLOW and losses:
            losses = {k: x for k, x in losses.items() if k > min(losses)}
            expected = {k: x for k, x in expected.items() if k in losses}
        assert losses == expected

    def compare_end(self, ranks: list[Outcome]) -> None:
        assert ranks[0].steps == NUM_STEPS
        for rank in ranks:
            assert_same(rank.weights, self.whole[0].weights)
        self._compare_losses(ranks[0].losses)
        assert difference(*(comparable(x[0].file) for x in (ranks, self.whole))) is None

    def stop_in(self, step: int) -> str | None:
        """Stop a run that begins at a step; return its newest file, None if it has ended."""
        start = str(self.folder / "whole" / f"step={step}.ckpt") if step else None
        name = f"stopped in {step}"
        ranks = self._run(name, self._at(signal.SIGTERM, step), start)
        assert len({rank.steps for rank in ranks}) == 1
        if not ranks[0].stopped:
            self.compare_end(ranks)
            return None
        left = newest(self.folder / name) or start  # where it stops as it begins
        self._compare_file(left)
        self._compare_losses(ranks[0].losses)
        return left

    def kill_in(self, step: int, start: str | None) -> str | None:
        """Kill a run in a step; return the newest whole file."""
        path = self.folder / "killed"
        run_until_killed(self.way, self.num_ranks, path, self._at(signal.SIGKILL, step), start)
        left = newest(path)
        self._compare_file(left)
        return left

    def go_on(self, start: str | None) -> None:
        self.compare_end(self._run("killed", None, start))


@pytest.mark.parametrize(
    "preset",
    [
        "cyclic_dp",
        *(more(p) for p in ("pipedream_2bw", "lockstep_dp", "1f1b")),
    ],
)  # fmt: skip
def test_a_run_that_is_interrupted_ends_with_the_same_bits(preset: str, tmp_path: Path) -> None:
    runs = Runs(preset, 2, tmp_path)
    left = runs.stop_in(9)
    left = runs.kill_in(14, left)
    runs.go_on(left)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("preset", PRESETS)
def test_in_each_step(preset: str, num_ranks: int, tmp_path: Path) -> None:
    runs = Runs(preset, num_ranks, tmp_path)
    for step in range(NUM_STEPS):
        runs.stop_in(step)
        shutil.rmtree(tmp_path / f"stopped in {step}", ignore_errors=True)  # none: it never began
    left = None
    for step in range(NUM_STEPS):
        left = runs.kill_in(step, left)
    runs.go_on(left)
