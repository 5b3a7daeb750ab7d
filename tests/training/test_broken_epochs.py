"""Runs that are broken off at the end of an epoch, and again, have the data of one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_cyclic.plan.presets import PRESETS
from tests.harness import processes
from tests.harness.interrupted import Way, contents, difference, fit
from tests.harness.rows import chosen

pytestmark = pytest.mark.multi
PER_EPOCH, EPOCHS = 2, 3
NUM_STEPS = PER_EPOCH * EPOCHS
ALWAYS = [("lockstep_dp", True, 0), ("cyclic_dp", False, 2)]
ROWS = [
    *ALWAYS,
    ("1f1b", False, 0),
    *((preset, by_steps, 2) for preset in PRESETS for by_steps in (True, False)
      if (preset, by_steps, 2) not in ALWAYS),
]  # fmt: skip


class Broken:
    """Go on from files of a run that was not broken off, and of runs that went on themselves.

    Args:
        folder: of all files.
        preset: of the strategy.
        by_steps: whether runs end behind a number of steps; else, of epochs.
        num_workers: of loaders, which draw an epoch's order before its first batch. [none: at it]
    """

    def __init__(self, folder: Path, preset: str, by_steps: bool, num_workers: int) -> None:
        self._folder = folder
        self._way = Way(
            strategy={"preset": preset, "stages": 4}, num_batches=PER_EPOCH,
            shared_order=preset == "lockstep_dp", num_workers=num_workers,
            num_steps=NUM_STEPS, max_epochs=None if by_steps else EPOCHS,
        )  # fmt: skip
        self._run("whole", None)

    def _run(self, name: str, start: Path | None) -> Path:
        path = None if start is None else str(start)
        folder = self._folder / name
        processes.run(fit, 2, self._way, str(folder), None, path, time_limit_s=100)
        return folder

    def file(self, name: str, step: int) -> Path:
        return self._folder / name / f"step={step}.ckpt"

    def go_on(self, name: str, of: str, step: int) -> None:
        """Go on from a file of a run; compare every file behind it."""
        self._run(name, self.file(of, step))
        for k in range(step + 1, NUM_STEPS + 1):
            found, expected = (contents(self.file(x, k)) for x in (name, "whole"))
            assert difference(found, expected) is None, f"step {k}"
        assert not self.file(name, NUM_STEPS + 1).exists()


@pytest.mark.parametrize(("preset", "by_steps", "num_workers"), chosen(ROWS, ALWAYS))
def test_every_file_behind_is_that_of_a_run_that_was_not_broken_off(
    preset: str, by_steps: bool, num_workers: int, tmp_path: Path
) -> None:
    broken = Broken(tmp_path, preset, by_steps, num_workers)
    broken.go_on("once", "whole", PER_EPOCH)
    broken.go_on("at the next end", "once", 2 * PER_EPOCH)
    broken.go_on("in the epoch behind", "once", PER_EPOCH + 1)
