"""A run goes on with another number of ranks, by another preset, under DDP or on one device.

Weights and optimizer state are those of the file, exactly; what is delayed goes on where the plan
is the same, and else the log says that it does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_cyclic.plugin.strategy import PlannedStrategy
from tests.harness import processes
from tests.harness.interrupted import difference
from tests.harness.processes import here
from tests.harness.trainers import make_trainer, train_data
from tests.modules.classifier import Classifier

pytestmark = pytest.mark.multi

NUM_BATCHES, SAVED_AT, END = 4, 3, 5  # behind a step in the middle of an epoch; in the next one
OTHER_PLAN = "The checkpoint was written under"


@dataclass(frozen=True)
class Run:
    """Who trains.

    Args:
        name: of a preset, or "ddp"; on one rank that is one device without a strategy.
        num_ranks: how many.
    """

    name: str
    num_ranks: int

    @property
    def strategy(self) -> Any:
        if self.name == "ddp":
            return "ddp" if self.num_ranks > 1 else "auto"
        return {"preset": self.name, "stages": 4}

    @property
    def file(self) -> str:
        return f"{self.name}-{self.num_ranks}.ckpt"


class Seen(Callback):
    """Write what a run begins with."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.file)


def write(run: Run, folder: Path) -> None:
    """Train some steps, and write a file."""
    module = Classifier("mlp", "adamw")
    trainer = make_trainer(run.strategy, max_steps=SAVED_AT, max_epochs=-1)
    trainer.fit(module, train_data(module, NUM_BATCHES))
    trainer.save_checkpoint(folder / run.file)


@dataclass
class Begun:
    """How a run went on.

    Args:
        where: it begins with something else than what the file has, if anywhere.
        said: what was warned of.
        leaves: whether it has left out older versions that the file has, or it would read.
    """

    where: str | None
    said: list[str]
    leaves: bool


def go_on(run: Run, folder: Path, files: Sequence[str]) -> list[Begun | None]:
    """Go on from each of some files; rank 0 says how."""
    return [_go_on(run, folder, file) for file in files]


def _go_on(run: Run, folder: Path, file: str) -> Begun | None:
    module, seen = Classifier("mlp", "adamw"), folder / f"seen {run.file}"
    for p in module.parameters():
        p.data.zero_()  # so that all must come from the file
    trainer = make_trainer(run.strategy, max_steps=END, max_epochs=-1, callbacks=[Seen(seen)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, train_data(module, NUM_BATCHES), ckpt_path=folder / file)
    assert trainer.global_step == END
    if here().rank > 0:
        return None
    files = [torch.load(path, weights_only=True) for path in (folder / file, seen)]
    keys = ("state_dict", "optimizer_states", "lr_schedulers")
    return Begun(
        where=difference(*({key: read[key] for key in keys} for read in files)),
        said=[str(warning.message) for warning in said],
        leaves=_leaves_versions(files[0], trainer.strategy),
    )


def _leaves_versions(file: dict[str, Any], strategy: Any) -> bool:
    saved = file.get("lightning_cyclic", {}).get("plan")
    if saved is None or not isinstance(strategy, PlannedStrategy):
        return False  # Lightning has its own words for the second
    plan = strategy.plan
    reads_older = plan.weights != "sync" and (plan.num_workers > 1 or plan.delay(0) > 0)
    mine = {name: getattr(plan, name) for name in saved} | {
        "num_microbatches": plan.num_microbatches // plan.rounds,
        "num_stages": saved["num_stages"],  # as many as were found
    }
    is_same = mine == saved
    return not is_same and (saved["weights"] != "sync" or reads_older)


def assert_goes_on(run: Run, origins: Sequence[Run], folder: Path) -> None:
    files = [origin.file for origin in origins]
    ranks = processes.run(go_on, run.num_ranks, run, folder, files, time_limit_s=110)
    for origin, begun in zip(origins, ranks[0], strict=True):
        assert begun.where is None, f"{origin} -> {run}: {begun.where}"
        says_so = any(OTHER_PLAN in text for text in begun.said)
        assert says_so == begun.leaves, f"{origin} -> {run}: {begun.said}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def written(origins: Sequence[Run], folder: Path) -> None:
    for origin in origins:
        if not (folder / origin.file).exists():
            processes.run(write, origin.num_ranks, origin, folder)


FEW = [Run("cyclic_dp", 2), Run("1f1b", 4), Run("pipedream_2bw", 2), Run("ddp", 1)]


@pytest.mark.parametrize("run", [Run("cyclic_dp", 3), Run("1f1b", 2), Run("ddp", 2)], ids=str)
def test_runs_go_on_elsewhere(run: Run, files: Path) -> None:
    written(FEW, files)
    assert_goes_on(run, FEW, files)
