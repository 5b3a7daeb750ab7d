"""SLURM's signal to requeue: all ranks save one checkpoint, and the job goes on from it.

The queue itself is not here: a program in the place of scontrol notes what it is asked to.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from tests.harness import processes
from tests.harness.trainers import assert_same, make_trainer, train_data, weights_of
from tests.modules.classifier import Classifier

pytestmark = pytest.mark.multi

NUM_BATCHES, ASKED_IN, JOB = 12, 5, "4711"


class Asked(Classifier):
    """Is sent the signal in the middle of a step, on one rank.

    Args:
        rank: which one; None for nobody.
    """

    def __init__(self, rank: int | None) -> None:
        super().__init__("batchnorm_mlp", "adamw")
        self._asked = rank == processes.here().rank
        self.num_batches = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.num_batches += 1

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self._asked and self.num_batches == ASKED_IN:
            self._asked = False
            os.kill(os.getpid(), signal.SIGUSR1)


def fit(
    preset: str, folder: str, asked: int | None, flags: dict[str, Any]
) -> tuple[dict[str, Tensor], int, int]:
    """Return weights, batches of this process, and steps; as a task of a job."""
    here = processes.here()
    scontrol = Path(folder, "scontrol")
    if here.rank == 0 and not scontrol.exists():
        scontrol.write_text(
            f'#!/bin/sh\necho "$@" >> {folder}/asked\nls {folder} | grep ckpt >> {folder}/there\n'
        )
        scontrol.chmod(0o755)
    os.environ |= {
        "SLURM_JOB_ID": JOB, "SLURM_JOB_NAME": "job", "SLURM_NTASKS": str(here.num_ranks),
        "SLURM_PROCID": str(here.rank), "SLURM_NODEID": str(here.rank), "SLURM_LOCALID": "0",
        "SLURM_NTASKS_PER_NODE": "1",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }  # fmt: skip
    module = Asked(asked)
    trainer = make_trainer(
        {"preset": preset}, default_root_dir=folder,
        plugins=[SLURMEnvironment(auto_requeue=True)], **({"max_epochs": 1} | flags),
    )  # fmt: skip
    data = train_data(module, NUM_BATCHES)
    if asked is None or here.num_ranks == 1:  # Lightning's own handler lets one process go on
        trainer.fit(module, data)
    else:
        with pytest.raises(SIGTERMException):
            trainer.fit(module, data)
    return weights_of(module), module.num_batches, trainer.global_step


def assert_goes_on(preset: str, folder: Path, num_ranks: int, **flags: Any) -> None:
    unbroken, broken = folder / "unbroken", folder / "broken"
    for path in (unbroken, broken):
        path.mkdir()
    expected, *_ = processes.run(fit, num_ranks, preset, str(unbroken), None, flags)
    before = processes.run(fit, num_ranks, preset, str(broken), num_ranks - 1, flags)
    assert len({(done, steps) for _, done, steps in before}) == 1
    assert ASKED_IN <= before[0][1] < expected[1]
    assert (broken / "asked").read_text() == f"requeue {JOB}\n"
    assert [path.name for path in broken.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    behind = processes.run(fit, num_ranks, preset, str(broken), None, flags)
    for weights, done, steps in behind:
        assert done == expected[1] - before[0][1]
        assert steps == expected[2]
        assert_same(weights, expected[0])


@pytest.mark.parametrize("preset", ["cyclic_dp", "1f1b"])
def test_a_requeued_job_ends_with_the_same_bits(preset: str, tmp_path: Path) -> None:
    assert_goes_on(preset, tmp_path, 2)


@pytest.mark.parametrize("preset", ["lockstep_dp", "1f1b"])
def test_gradients_that_are_accumulated_are_applied_before(preset: str, tmp_path: Path) -> None:
    assert_goes_on(preset, tmp_path, 2, accumulate_grad_batches=4, max_epochs=2)
