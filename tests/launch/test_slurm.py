"""A real SLURM runs the recipes' scripts: whatever befalls a job, it ends with the same bits.

Jobs have one epoch, so that all that befalls them does so in mid-epoch. Which steps were trained,
and when, is read from what the logger of rank 0 writes behind each step.
"""

from __future__ import annotations

import csv
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor

from tests.harness import processes, slurm
from tests.harness.commands import Command, Commands, until
from tests.harness.slurm import Cluster, Job
from tests.harness.trainers import assert_same
from tests.recipes.recipe_ranks import ROOT, train_rank

MISSING = slurm.missing()
pytestmark = [
    pytest.mark.multi,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed: no {', '.join(MISSING)}"),
]
TRAIN, ELASTIC = "recipes/slurm/train.sbatch", "recipes/slurm/elastic.sbatch"
NUM_STEPS, ASKED_BEHIND, SAVE_EVERY = 200, 25, 20
LIMIT_S = 120.0
MORE = pytest.mark.exhaustive
Weights = Callable[..., dict[str, Tensor]]
TINY = [
    "model.net.width=4", "stages=[net.groups.2]", "trainer.max_epochs=1",
    f"trainer.limit_train_batches={NUM_STEPS}", "trainer.limit_val_batches=1",
    "trainer.enable_model_summary=false", "trainer.enable_progress_bar=false",
]  # fmt: skip
FOUR_STAGES = ["stages=[net.groups.0,net.groups.1,net.groups.2]"]
TWO_TASKS = ("--ntasks-per-node=2",)
LONG = ["trainer.max_epochs=50"]
LOGGED = ["trainer.log_every_n_steps=1", "+trainer.logger.flush_logs_every_n_steps=1"]


def changes(preset: str) -> list[str]:
    """Return what a recipe is changed by: batches enough for an epoch of NUM_STEPS."""
    mine = ["data.batch_size=2"]
    if preset != "cyclic_dp":
        mine = ["data.batch_size=4", "strategy.num_microbatches=2"]
    return [f"strategy={preset}", *TINY, *mine]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder to submit from, with what a clone has that jobs need."""
    for name in ("recipes", "conf"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Preset, number of workers, more changes -> weights of a run that nothing befell."""

    @cache
    def weights(preset: str, num_workers: int = 2, *more: str) -> dict[str, Tensor]:
        folder = str(tmp_path_factory.mktemp("unbroken"))
        own = ["workers=1", "trainer.logger=false", f"paths.output_dir={folder}"]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose("train", [*changes(preset), *own, *more])
        recipe = OmegaConf.to_container(cfg, resolve=True)
        ranks = processes.run(
            train_rank, num_workers, recipe, num_workers, folder, time_limit_s=LIMIT_S
        )
        return ranks[0]["weights"]

    return weights


def environment() -> dict[str, str]:
    """Return what the user of a cluster sets: its nodes have names that are no hosts here."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(processes.free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHON": sys.executable,
    }


class Run:
    """Be a job of a recipe, and what it leaves.

    Args:
        cluster: that it runs on.
        clone: folder to submit from.
        script: for sbatch.
        preset: of the strategy.
        *more: for Hydra.
        options: of sbatch.
    """

    def __init__(
        self, cluster: Cluster, clone: Path, script: str, preset: str, *more: str,
        options: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._clone = clone
        self.job: Job = cluster.submit(
            clone / script, *changes(preset), *LOGGED, *more,
            options=options, env=environment(), folder=clone,
        )  # fmt: skip
        self.folder = clone / "outputs" / self.job.number / "0"

    def log(self) -> str:
        """Return what all of its tasks printed."""
        return "".join(path.read_text() for path in self._clone.glob("slurm-*.out"))

    def reach(self, step: int) -> None:
        """Wait until a step has been trained."""

        def reached() -> bool:
            assert self.job.is_in("PENDING", "CONFIGURING", "RUNNING"), self.log()
            return any(step in steps for steps in steps_of(self.folder))

        until(reached, LIMIT_S, f"step {step}")

    def assert_ends_with(self, weights: dict[str, Tensor]) -> None:
        """Wait for a good end, with the weights."""
        assert self.job.wait(LIMIT_S) == "COMPLETED", self.log()
        assert_same(final_weights(self.folder), weights)


def steps_of(folder: Path) -> list[list[int]]:
    """Return the steps of each run of a job that rank 0 has logged."""
    files = sorted(folder.glob("metrics/metrics-*.csv")) + [folder / "metrics" / "metrics.csv"]
    return [_steps_in(file) for file in files if file.exists()]


def _steps_in(file: Path) -> list[int]:
    with file.open(newline="") as lines:
        return [int(row["step"]) for row in csv.DictReader(lines) if row.get("train_loss")]


def final_weights(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("metrics/checkpoints/epoch=0-*.ckpt")
    checkpoint = torch.load(file, weights_only=True)
    assert checkpoint["global_step"] == NUM_STEPS
    return checkpoint["state_dict"]


def assert_goes_on_from_a_checkpoint(folder: Path) -> None:
    """Look for a second run that began where one of the first's checkpoints is."""
    before, behind = steps_of(folder)
    assert behind == list(range(behind[0], NUM_STEPS))
    assert SAVE_EVERY < behind[0] <= before[-1] + 1
    assert behind[0] % SAVE_EVERY == 0


def test_a_job_that_is_asked_to_requeue_does_no_step_twice(
    cluster: Cluster, clone: Path, expected: Weights
) -> None:
    run = Run(cluster, clone, TRAIN, "1f1b")
    run.reach(ASKED_BEHIND)
    run.job.signal("USR1")
    run.job.start_again(LIMIT_S)
    assert [path.name for path in run.folder.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    run.assert_ends_with(expected("1f1b"))
    before, behind = steps_of(run.folder)
    assert before + behind == list(range(NUM_STEPS))
    assert ASKED_BEHIND < len(before) < NUM_STEPS


@MORE
def test_a_job_of_two_tasks_a_node_is_requeued(
    cluster: Cluster, clone: Path, expected: Weights
) -> None:
    run = Run(cluster, clone, TRAIN, "1f1b", *FOUR_STAGES, options=TWO_TASKS)
    run.reach(ASKED_BEHIND)
    run.job.signal("USR1")
    run.job.start_again(LIMIT_S)
    run.assert_ends_with(expected("1f1b", 4, *FOUR_STAGES))


@MORE
@pytest.mark.timeout(900)
def test_a_job_is_requeued_before_its_time_is_over(cluster: Cluster, clone: Path) -> None:
    """SLURM counts time in minutes, and may send the signal a minute early."""
    run = Run(
        cluster, clone, TRAIN, "cyclic_dp", *LONG,
        options=("--time=2", "--signal=USR1@20"),
    )  # fmt: skip
    run.reach(ASKED_BEHIND)
    run.job.start_again(4 * LIMIT_S)
    (before,) = steps_of(run.folder)
    run.reach(before[-1] + ASKED_BEHIND)
    run.job.cancel()
    before, behind = steps_of(run.folder)
    assert before + behind == list(range(len(before) + len(behind)))


@MORE
def test_a_cancelled_job_ends_with_all_of_its_tasks(cluster: Cluster, clone: Path) -> None:
    run = Run(cluster, clone, TRAIN, "1f1b", *FOUR_STAGES, *LONG, options=TWO_TASKS)
    run.reach(ASKED_BEHIND)
    tasks = {slurm.variable(pid, "SLURM_PROCID") for pid in cluster.processes()} - {None}
    assert tasks >= set("0123")
    run.job.cancel()
    until(lambda: not cluster.processes(), 20, "all tasks have ended")
    assert run.job.wait(LIMIT_S) == "CANCELLED"


@MORE
def test_no_task_outlives_one_that_dies(cluster: Cluster, clone: Path) -> None:
    run = Run(cluster, clone, TRAIN, "cyclic_dp", *LONG)
    run.reach(ASKED_BEHIND)
    os.kill(cluster.process_with(SLURM_PROCID="1"), signal.SIGKILL)
    assert run.job.wait(LIMIT_S) == "FAILED"
    until(lambda: not cluster.processes(), 20, "all tasks have ended")


@MORE  # a job that is asked to requeue goes on the same way
def test_a_job_goes_on_from_its_newest_checkpoint_when_a_node_fails(
    cluster: Cluster, clone: Path, expected: Weights
) -> None:
    run = Run(cluster, clone, TRAIN, "cyclic_dp", f"save_every={SAVE_EVERY}")
    run.reach(2 * SAVE_EVERY + 5)
    cluster.fail("n1")
    run.job.start_again(LIMIT_S)
    run.assert_ends_with(expected("cyclic_dp"))
    assert_goes_on_from_a_checkpoint(run.folder)


@MORE
def test_under_torchrun_a_job_goes_on_when_a_worker_dies(
    cluster: Cluster, clone: Path, expected: Weights
) -> None:
    run = Run(cluster, clone, ELASTIC, "1f1b", f"save_every={SAVE_EVERY}")
    run.reach(2 * SAVE_EVERY + 5)
    os.kill(cluster.process_with(RANK="1"), signal.SIGKILL)
    run.assert_ends_with(expected("1f1b"))
    assert_goes_on_from_a_checkpoint(run.folder)


def sweep(cluster: Cluster, clone: Path, preset: str) -> Commands:
    """Begin a sweep of one run, of two tasks."""
    train = [sys.executable, "recipes/train.py", "launcher=slurm", *changes(preset), *LOGGED]
    command = Command(
        arguments=[*train, "trainer.num_nodes=2", "workers=1"],
        env=cluster.environment(environment()),
        folder=clone,
    )
    return Commands({"sweep": command})


@MORE
def test_a_sweep_is_jobs_in_the_queue(cluster: Cluster, clone: Path, expected: Weights) -> None:
    with sweep(cluster, clone, "pipedream_2bw") as commands:
        commands.output("sweep")
    (folder,) = clone.glob("multirun/*/*/0")
    assert_same(final_weights(folder), expected("pipedream_2bw"))
    (script,) = clone.glob("multirun/*/*/.submitit/*/*.sh")
    assert "--ntasks-per-node=1" in script.read_text()


@MORE
def test_a_run_of_a_sweep_is_requeued(cluster: Cluster, clone: Path, expected: Weights) -> None:
    with sweep(cluster, clone, "cyclic_dp") as commands:
        folders = clone.glob
        until(lambda: any(map(steps_of, folders("multirun/*/*/0"))), LIMIT_S, "it trains")
        job = Job(cluster, cluster.command("squeue", "-h", "-o", "%i").strip())
        job.signal("USR1")
        job.start_again(LIMIT_S)
        commands.output("sweep")
    (folder,) = folders("multirun/*/*/0")
    assert_same(final_weights(folder), expected("cyclic_dp"))
    before, behind = steps_of(folder)
    assert before + behind == list(range(NUM_STEPS))
