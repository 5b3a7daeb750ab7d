"""Checkpoint folders: each rank writes what it has; Lightning's script makes a file of them."""

from __future__ import annotations

import pickle
import shutil
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_cyclic import ConfigurationError, CyclicStrategy
from lightning_cyclic.plugin.checkpoint_folder import CheckpointFolder
from lightning_cyclic.runtime.absent import is_absent
from tests.conformance.harness import Batches
from tests.conformance.modules import vectors
from tests.harness import processes
from tests.harness.commands import Command, Commands
from tests.harness.rows import more
from tests.harness.trainers import (
    assert_same,
    make_trainer,
    outcome,
    strategy_of,
    train_data,
    valid_data,
)
from tests.modules.classifier import Classifier
from tests.modules.late import LEAN, STAGED, Late, here_of

pytestmark = pytest.mark.multi
NUM_BATCHES, NUM_EPOCHS = 3, 2  # 6 steps
STEP = 4  # at which it is saved, in mid epoch
ARGS = ("batchnorm_mlp", "adamw")
FOLDERS = {"save_distributed_checkpoint": True}
PIPELINE = {"stages": ["net.6"], "num_microbatches": 2}
STRATEGIES = {
    "1f1b": PIPELINE,
    "cyclic_pipeline": PIPELINE,
    "cyclic_dp": {"stages": 4},
    "cyclic_zero": {"stages": 4},
}


class Saver(ModelCheckpoint):
    """Save one step, and note what this rank has of the parameters while it is saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, every_n_train_steps=STEP, save_top_k=-1, filename="{step}")
        self.here: set[str] = set()

    def on_save_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: Any) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        self.here = {n for n, p in pl_module.named_parameters() if not is_absent(p)}


def train(
    strategy: Any,
    folder: Path | None = None,
    ckpt_path: Path | None = None,
    make: Callable[..., Classifier] = Classifier,
) -> dict[str, Any]:
    """Train, with a checkpoint of one step if a folder is given, or from one."""
    module, saver, read = make(*ARGS), Saver(folder or Path()), _noting_reads()
    if ckpt_path is not None:
        warnings.filterwarnings("ignore", message="The checkpoint was written under")
        for x in module.state_dict().values():
            x.zero_()  # so that all must come from the checkpoint
    trainer = make_trainer(
        strategy, max_epochs=NUM_EPOCHS, enable_checkpointing=folder is not None,
        callbacks=[saver] if folder is not None else [],
    )  # fmt: skip
    trainer.fit(module, train_data(module, NUM_BATCHES), valid_data(module), ckpt_path=ckpt_path)
    return outcome(trainer, module) | {"here": saver.here, "read": read}


def _noting_reads() -> list[str]:
    """Note which values this rank reads of folders from now on."""
    read: list[str] = []
    values = CheckpointFolder.read

    def noting(self: CheckpointFolder, *keys: str) -> Any:
        read.extend(keys)
        return values(self, *keys)

    CheckpointFolder.read = noting  # type: ignore[method-assign]  # of a process that ends soon
    return read


def path_in(folder: Path) -> Path:
    return folder / f"step={STEP}.ckpt"


def consolidated(folder: Path) -> Path:
    """Make a plain file as Lightning's script does, in this process."""
    file = folder.with_suffix(".consolidated")
    torch.save(_format_checkpoint(_load_distributed_checkpoint(folder)), file)
    return file


def keys_by_rank(folder: Path) -> dict[int, set[str]]:
    """Return what each rank has written."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    found: dict[int, set[str]] = defaultdict(set)
    for key, info in index.storage_data.items():
        found[int(info.relative_path.split("_")[2])].add(key.fqn)
    return found


class Runs:
    """Hold a run that wrote folders, one that wrote files, and what they wrote."""

    def __init__(self, preset: str, at: Path) -> None:
        self.strategy: dict[str, Any] = {"preset": preset, **STRATEGIES[preset]}
        self.whole = processes.run(train, 2, self.strategy | FOLDERS, at / "folders")
        self.plain = processes.run(train, 2, self.strategy, at / "files")
        self.folder, self.file = path_in(at / "folders"), path_in(at / "files")


_made: dict[str, Runs] = {}


def _runs(preset: str, factory: pytest.TempPathFactory) -> Runs:
    if preset not in _made:
        _made[preset] = Runs(preset, factory.mktemp(preset))
    return _made[preset]


@pytest.fixture(scope="module", params=["1f1b", "cyclic_dp", more("cyclic_zero")])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return _runs(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return _runs("1f1b", tmp_path_factory)


# ---------------------------------------------------------------------- bits


def test_a_run_goes_on_with_the_same_bits(runs: Runs) -> None:
    assert_same(runs.whole[0]["weights"], runs.plain[0]["weights"], "writing changed something")
    resumed = processes.run(train, 2, runs.strategy | FOLDERS, None, runs.folder)
    for rank, expected in zip(resumed, runs.whole, strict=True):
        assert rank["global_step"] == expected["global_step"]
        assert rank["losses"] == expected["losses"][-len(rank["losses"]) :] != []
        assert_same(rank["weights"], expected["weights"])
    stage_of = resumed[0]["stage_of"]
    of_rank = [{k.removeprefix("optimizer_0.state.") for k in _state(r["read"])} for r in resumed]
    assert not of_rank[0] & of_rank[1]  # each has read the optimizer state of its stages alone
    assert of_rank[0] | of_rank[1] == set(stage_of)


def _state(keys: list[str]) -> list[str]:
    return [k for k in keys if k.startswith("optimizer_0.state.")]


def test_lightning_makes_a_file_of_it_that_holds_what_ours_would(runs: Runs) -> None:
    plain = torch.load(runs.file, weights_only=True)
    file = consolidated(runs.folder)
    made = torch.load(file, weights_only=True)
    assert_same(made["state_dict"], plain["state_dict"])
    (mine,), (theirs,) = made["optimizer_states"], plain["optimizer_states"]
    names = [n for n, _ in Classifier(*ARGS).named_parameters()]
    assert mine["param_groups"] == [
        {**g, "params": [names[k] for k in g["params"]]} for g in theirs["param_groups"]
    ]
    for k, slots in theirs["state"].items():
        assert_same(mine["state"][names[k]], slots, names[k])
    assert made["loops"] == plain["loops"]
    assert made["lr_schedulers"] == plain["lr_schedulers"]
    # a single device goes on from it as from ours
    alone = processes.run(train, 1, "auto", None, file)[0]
    assert_same(alone["weights"], processes.run(train, 1, "auto", None, runs.file)[0]["weights"])


def test_each_rank_writes_its_own_stages(runs: Runs) -> None:
    stage_of, written = runs.whole[0]["stage_of"], keys_by_rank(runs.folder)
    of_rank = [{n for n in stage_of if f"model.{n}" in written[r]} for r in (0, 1)]
    for mine in of_rank:
        assert 0 < len(mine) < len(stage_of)
        assert mine == {n for n in stage_of if stage_of[n] in {stage_of[m] for m in mine}}
    for r in (0, 1):
        state = {k.split(".", 2)[2].rpartition(".")[0] for k in _state([*written[r]])}
        assert state == of_rank[r]
    if runs.strategy["preset"] != "cyclic_dp":  # nobody has had the parameters of others
        assert [rank["here"] for rank in runs.whole] == of_rank


class Stateless(Classifier):
    """Has an optimizer without state; and folders keep no empty dictionaries."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_lightnings_script(tmp_path: Path) -> None:
    strategy = {"preset": "1f1b", **PIPELINE, **FOLDERS}
    processes.run(train, 2, strategy, tmp_path, None, Stateless)
    script = "lightning.pytorch.utilities.consolidate_checkpoint"
    command = [sys.executable, "-m", script, str(path_in(tmp_path))]
    with Commands({"script": Command(arguments=command, is_forked=True)}) as commands:
        commands.output("script")
    file = tmp_path / f"{path_in(tmp_path).name}.consolidated"
    alone = processes.run(train, 1, "auto", None, file, Stateless)[0]
    assert alone["global_step"] == NUM_BATCHES * NUM_EPOCHS
    processes.run(train, 2, strategy, None, path_in(tmp_path), Stateless)


@pytest.mark.parametrize(
    ("n", "other"),
    [
        (2, {"preset": "cyclic_dp", "stages": 3}),
        (1, {"preset": "1f1b", **PIPELINE}),
        (3, {"preset": "gpipe"}),
    ],
    ids=["replicas", "one rank", "more ranks"],
)
def test_another_plan_goes_on_from_the_newest_weights(
    n: int, other: dict[str, Any], pipeline: Runs
) -> None:
    from_folder = processes.run(train, n, other, None, pipeline.folder)
    from_file = processes.run(train, n, other | FOLDERS, None, pipeline.file)
    for rank, same in zip(from_folder, from_file, strict=True):
        assert_same(rank["weights"], same["weights"])


# ---------------------------------------------------------------------- Lightning's ways


def evaluate(strategy: Any, ckpt_path: Path) -> dict[str, float]:
    module = Classifier(*ARGS)
    trainer = make_trainer(strategy)
    found: dict[str, Any] = {}
    for run in (trainer.validate, trainer.test):
        found |= run(module, valid_data(module), ckpt_path=ckpt_path, verbose=False)[0]
    return found


def test_evaluation_loads_folders(pipeline: Runs) -> None:
    found = processes.run(evaluate, 2, pipeline.strategy, pipeline.folder)
    assert found == processes.run(evaluate, 2, pipeline.strategy, pipeline.file)
    assert set(found[0]) == {"val_loss", "test_loss"}


def keep_the_best(strategy: Any, folder: Path) -> list[str]:
    module = Classifier(*ARGS)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=1, monitor="step",
                            mode="max", save_last=True)  # fmt: skip
    trainer = make_trainer(strategy, max_epochs=2, enable_checkpointing=True, callbacks=[saver])
    trainer.fit(module, train_data(module, 3), valid_data(module))
    for name in ("by hand", "a file before"):
        trainer.save_checkpoint(folder / name)
    trainer.save_checkpoint(folder / "by hand")  # once more
    return [p.name for p in sorted(folder.iterdir()) if p.is_dir()]


def test_old_folders_go(tmp_path: Path) -> None:
    (tmp_path / "a file before").write_text("which was here")
    strategy = {"preset": "cyclic_pipeline", **PIPELINE, **FOLDERS}
    ranks = processes.run(keep_the_best, 2, strategy, tmp_path)
    assert ranks[0] == ranks[1] == ["a file before", "by hand", "last.ckpt", "step=6.ckpt"]
    for name in ranks[0]:
        weights = CheckpointFolder(tmp_path / name).completed({}, lazily=False)["state_dict"]
        assert set(weights) == set(Classifier(*ARGS).state_dict())


def fit_late(strategy: Any, folder: Path, ckpt_path: Path | None) -> dict[str, Any]:
    """Train a module that each rank makes by stages."""
    read, module = _noting_reads(), Late()
    trainer = make_trainer(
        strategy, max_epochs=2, callbacks=[Saver(folder)], enable_checkpointing=True,
        default_root_dir=folder,
    )  # fmt: skip
    batches = Batches(vectors, [[2 * t, 2 * t + 1] for t in range(STEP)])
    seed_everything(4, verbose=False)
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return {"weights": here_of(module), "read": read}


def test_ranks_that_make_their_stages_alone_read_these_alone(tmp_path: Path) -> None:
    strategy = {"preset": "1f1b", **STAGED, **LEAN}
    whole = processes.run(fit_late, 2, strategy, tmp_path / "a", None)
    resumed = processes.run(fit_late, 2, strategy, tmp_path / "b", path_in(tmp_path / "a"))
    for rank, first, own in zip(resumed, whole, ({"2", "5"}, {"0", "1"}), strict=True):
        assert_same(rank["weights"], first["weights"])
        parameters = [k for k in rank["read"] if k.endswith((".weight", ".bias"))]
        assert {k.split(".")[2] for k in parameters if k.startswith("model.")} == own


# ---------------------------------------------------------------------- bad input


class Other(Classifier):
    """Has other layers."""

    def __init__(self, change: str) -> None:
        super().__init__(*ARGS)
        if change == "reshaped":
            self.net[12] = nn.Linear(12, 4)
        elif change == "extra":
            self.net.append(nn.Linear(3, 3))
        elif change == "missing":
            del self.net[12]
        self.change = change

    def configure_optimizers(self) -> Any:
        if self.change == "frozen":
            return torch.optim.AdamW(self.net[:12].parameters())
        return super().configure_optimizers()


def fit_other(strategy: Any, change: str, ckpt_path: Path) -> None:
    module = Other(change)
    trainer = make_trainer(strategy, max_epochs=NUM_EPOCHS)
    trainer.fit(module, train_data(module, NUM_BATCHES), ckpt_path=ckpt_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("reshaped", "size mismatch for net.12.weight"),
        ("extra", 'Missing key(s) in state_dict: "net.13.weight"'),
        ("missing", 'Unexpected key(s) in state_dict: "net.12.weight"'),
        ("frozen", "parameter group that doesn't match the size of optimizer's group"),
    ],
)
def test_a_folder_of_another_module(change: str, words: str, pipeline: Runs) -> None:
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(fit_other, 2, pipeline.strategy, change, pipeline.folder)
    for text in (caught.value.errors[0], caught.value.errors[1]):
        assert words in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("__1_0.distcp", "No such file or directory"),
        (".metadata", "No such file or directory"),
        ("meta.pt", "meta.pt"),
        ("delayed_1_of_2.pt", "has what is delayed of 1 ranks out of 2"),
    ],
)
def test_a_folder_that_lacks_a_file(name: str, words: str, pipeline: Runs, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(pipeline.folder, tmp_path / "copy.ckpt"))
    (damaged / name).unlink()
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(train, 2, pipeline.strategy, None, damaged)
    for text in (caught.value.errors[0], caught.value.errors[1]):
        assert words in text


def test_what_is_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"save_distributed_checkpoint='yes'; allowed"):
        CyclicStrategy(save_distributed_checkpoint="yes")  # type: ignore[arg-type]
    for flags, path, words in [
        ({"plugins": [AsyncCheckpointIO()]}, tmp_path / "x", "AsyncCheckpointIO"),
        ({}, "s3://bucket/x", "the path 's3://bucket/x'"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            _save_alone(flags, path)


def _save_alone(flags: dict[str, Any], path: Any) -> None:
    trainer = Trainer(
        strategy=strategy_of(FOLDERS), accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **flags,
    )  # fmt: skip
    trainer.strategy.connect(LightningModule())
    trainer.strategy.save_checkpoint({"state_dict": {}, "optimizer_states": []}, path)
