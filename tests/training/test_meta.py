"""Modules on the meta device, of which each rank makes its own stages: no rank ever has all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, callbacks, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic.errors import ConfigurationError, PeerError, StepError
from tests.conformance.harness import Batches, same
from tests.conformance.modules import vectors
from tests.harness import processes
from tests.harness.rows import more
from tests.harness.trainers import make_trainer
from tests.modules.late import FINE, HERE, LEAN, STAGED, Late, Tied, here_of

pytestmark = pytest.mark.multi
NUM_STEPS = 3


def batches(num: int = NUM_STEPS) -> DataLoader[Any]:
    return DataLoader(Batches(vectors, [[2 * t, 2 * t + 1] for t in range(num)]), batch_size=None)


class Freezes(Callback):
    """Does not train the first layer in the second epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(trainer.current_epoch != 1)


def parts_of(strategy: Any, validates: bool, make: Any = Late, rounds: int = 1) -> Any:
    trainer = make_trainer(
        strategy, max_epochs=2, accumulate_grad_batches=rounds,
        callbacks=[] if make is Tied else [Freezes()],
    )  # fmt: skip
    seed_everything(4, verbose=False)
    module = make()
    trainer.fit(module, batches(), batches(2) if validates else None)
    return here_of(module), HERE, float(trainer.callback_metrics.get("val_loss", 0))


def check(whole: Any, apart: Any) -> None:
    """Compare the parts of ranks, which have all together, with the whole."""
    parts = dict[str, Tensor]()
    for rank, one in zip(apart, whole, strict=True):
        assert rank[0].items()
        assert all(same(x, one[0][n]) for n, x in rank[0].items())
        parts |= rank[0]
        assert 0 < max(rank[1]) < 1
        assert rank[2] == one[2]
    assert parts.keys() == whole[0][0].keys()


@pytest.mark.parametrize(
    ("preset", "make"),
    [more("1f1b", Late), ("1f1b", Tied), ("pipedream_2bw", Late), ("cyclic_mp", Late)],
)
def test_pipelines_of_stages_that_each_rank_makes(preset: str, make: type[Late]) -> None:
    strategy = {"preset": preset, **STAGED}
    whole = processes.run(parts_of, 2, strategy, True, make)
    check(whole, processes.run(parts_of, 2, strategy | LEAN, True, make))
    if preset == "1f1b":  # as of one device
        alone = processes.run(parts_of, 1, strategy, True, make)
        assert same(alone[0][0], whole[0][0])


@pytest.mark.parametrize(
    ("num_ranks", "stages", "rounds", "make"), [(2, FINE, 1, Tied), (2, FINE, 2, Late)], ids=str
)
def test_sharded_weights(num_ranks: int, stages: Any, rounds: int, make: type[Late]) -> None:
    plan = {"stages": stages, "slack": 1}
    whole, lean = {"preset": "cyclic_dp", **plan}, {"preset": "cyclic_zero", **plan, **LEAN}
    check(*(processes.run(parts_of, num_ranks, x, False, make, rounds) for x in (whole, lean)))


@pytest.mark.parametrize("make", [Late, Tied])
def test_sharded_weights_whose_optimizer_state_comes_and_goes(
    make: type[Late], tmp_path: Path
) -> None:
    whole, lean = {"preset": "cyclic_dp", "stages": FINE}, {"preset": "cyclic_zero", **LEAN}
    apart = {**whole, **lean, "disk": str(tmp_path)}
    check(*(processes.run(parts_of, 2, x, False, make) for x in (whole, apart)))


def test_replicas_of_a_pipeline() -> None:
    strategy = {"preset": "1f1b", **STAGED, "replicas": 2}
    check(*(processes.run(parts_of, 4, x, False) for x in (strategy, strategy | LEAN)))


def go_on(strategy: Any, folder: Path, epochs: int, file: str | None, tests: bool) -> Any:
    """Save a checkpoint behind each epoch, and test the first one behind the fit."""
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = make_trainer(
        strategy, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver],
        default_root_dir=folder,
    )  # fmt: skip
    seed_everything(4, verbose=False)
    module = Late()
    trainer.fit(module, batches(), ckpt_path=file)
    outcome = here_of(module), list(HERE), 0.0
    if tests:
        (tested,) = trainer.test(
            module, batches(2), ckpt_path=folder / "epoch=0.ckpt", verbose=False
        )
        outcome = *outcome[:2], tested["test_loss"]
    return outcome


@pytest.mark.parametrize("preset", ["1f1b", "cyclic_zero"])
def test_checkpoints_go_from_ranks_into_folders_and_back(preset: str, tmp_path: Path) -> None:
    strategy = {"preset": preset} | ({"stages": FINE} if preset == "cyclic_zero" else STAGED)
    lean = strategy | LEAN
    args = ("whole", 2, None, True), ("apart", 1, None, False), ("apart", 2, "epoch=0.ckpt", True)
    whole, _, resumed = (
        processes.run(
            go_on, 2, strategy if name == "whole" else lean, tmp_path / name, epochs,
            file and str(tmp_path / name / file), tests,
        )
        for name, epochs, file, tests in args
    )  # fmt: skip
    check(whole, resumed)


# ---------------------------------------------------------------------- what is refused


class Reads(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        with trainer.strategy.whole():
            assert [p.sum() for p in pl_module.parameters()]


class Bare(Late):
    """Has a parameter that nothing initialises."""

    def configure_model(self) -> None:
        super().configure_model()
        self.scale = nn.Parameter(torch.ones(3, device="meta"))


def refused(what: str, folder: Path) -> str:
    preset = "cyclic_zero" if what in ("validates", "share", "averages") else "1f1b"
    stages = {"stages": FINE} if preset == "cyclic_zero" else STAGED
    flags: dict[str, Any] = {"callbacks": []}
    if what == "reads":
        flags["callbacks"] = [Reads()]
    if what == "averages":
        flags["callbacks"] = [callbacks.StochasticWeightAveraging(0.01)]
    options = dict(LEAN)
    options["save_distributed_checkpoint"] = what not in ("file", "from file", "averages")
    if what == "file":
        flags |= {"enable_checkpointing": True, "default_root_dir": folder}
    if what in ("share", "from file"):
        options["memory_limit_bytes"] = 100 if what == "share" else 1 << 30
    trainer = make_trainer({"preset": preset, **stages, **options}, max_epochs=1, **flags)
    module = Bare() if what == "bare" else Late()
    data = batches(2)
    if what == "from file":
        trainer.fit(module, data)
        trainer.save_checkpoint(folder / "whole.ckpt")
        lean = {"preset": preset, **stages, **LEAN}
        trainer, module = make_trainer(lean, max_epochs=2), Late()
    if what == "goes on":
        trainer.fit(module, data)
    with pytest.raises((ConfigurationError, StepError, PeerError)) as caught:
        trainer.fit(
            module, data, data if what == "validates" else None,
            ckpt_path=folder / "whole.ckpt" if what == "from file" else None,
        )  # fmt: skip
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("reads", "as all parameters together exceed memory_limit_bytes"),
        ("bare", "parameter 'scale' of Bare was made on the meta device"),
        ("file", "checkpoints of this run would be one file"),
        ("from file", "a checkpoint to go on from would be one file"),
        ("validates", "validation under 'cyclic_zero' runs on the whole module"),
        ("share", "is to keep parameters of "),
        ("averages", "StochasticWeightAveraging copies the whole module, of which no rank"),
        ("goes on", "or left to other ranks by a fit that is over"),
    ],
)
def test_what_needs_the_whole_is_refused_by_name(what: str, said: str, tmp_path: Path) -> None:
    texts = processes.run(refused, 2, what, tmp_path)
    assert any(said in text for text in texts), texts
