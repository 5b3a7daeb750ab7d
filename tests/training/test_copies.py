"""Copies of the user's modules, made at any time of a fit: plain modules, or refused by name."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic.errors import StepError
from tests.harness.rows import more
from tests.harness.runs import trained

X = torch.rand(16, 4, generator=torch.Generator().manual_seed(0))
STEP = ["step"]
WITHIN = ["before backward", "after backward"]
BETWEEN = ["batch start", "batch end"]
AT_ENDS = ["epoch end", "validation end", "train end"]


def by_torch(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(module: nn.Module) -> nn.Module:
    data = pickle.dumps(module)
    assert b"lightning_cyclic" not in data
    assert len(data) < 100_000  # half a million with what lies beside its weights in memory
    return pickle.loads(data)


WAYS: list[Callable[[nn.Module], nn.Module]] = [copy.deepcopy, by_pickle, by_torch]


class Copying(LightningModule):
    """Copies its network, and itself, wherever a fit calls its code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # 20 layers in each stage, as one of them alone must not take the others along
        deep = (layer for _ in range(20) for layer in (nn.Linear(4, 4), nn.Tanh()))
        self.net = nn.Sequential(*deep, nn.BatchNorm1d(4), nn.Linear(4, 2))
        with warnings.catch_warnings():  # Lightning would rather not have it there
            warnings.simplefilter("ignore")
            self.save_hyperparameters({"net": self.net})

    def copy(self, where: str) -> None:
        """Note what copies come out, or the words in which they are refused."""
        if self.trainer.global_step == 0:
            return
        noted = vars(self.trainer).setdefault("noted", {}).setdefault(where, set())
        for way in WAYS:
            try:
                copies = [way(self.net), *(m.net for m in [way(self)]), copy.copy(self).net]
            except StepError as error:
                noted.add(str(error))
                continue
            noted.add("")
            assert copies.pop() is self.net
            vars(self.trainer).setdefault("copies", []).extend(copies)
            if where != "step":
                check_values(copies[0], self.net)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        self.copy("step")
        loss = self.net(x).square().mean()
        self.copy("step")
        self.log("loss", loss)
        return loss

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.net(x)

    def on_train_batch_start(self, *args: Any) -> None:
        self.copy("batch start")

    def on_before_backward(self, loss: Tensor) -> None:
        self.copy("before backward")

    def on_after_backward(self) -> None:
        self.copy("after backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self.copy("batch end")

    def on_train_epoch_end(self) -> None:
        self.copy("epoch end")

    def on_validation_epoch_end(self) -> None:
        self.copy("validation end")

    def on_train_end(self) -> None:
        self.copy("train end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def check_values(copied: nn.Module, module: nn.Module) -> None:
    values = copied.state_dict()
    for name, x in module.state_dict().items():
        assert torch.equal(values[name], x), name


@cache
def names() -> dict[type, set[str]]:
    """Return the names of attributes of modules that were just made."""
    return {type(m): set(vars(m)) for m in Copying().net.modules()}


def check_plain(copied: nn.Module) -> None:
    """Check that a copy has nothing of ours, and works alone."""
    for m in copied.modules():
        assert vars(m).keys() == names()[type(m)]
        assert not [name for name, x in vars(m).items() if "_hooks" in name and x]
    for p in copied.parameters():
        assert type(p) is nn.Parameter
        assert not vars(p)
    copied(X).sum().backward()


def batches() -> DataLoader[Any]:
    return DataLoader(X, 4)  # type: ignore[arg-type]


def noted(trainer: Any, module: Copying) -> dict[str, set[str]]:
    """Return what was noted in each hook, when all copies have been looked at."""
    for copied in vars(trainer)["copies"]:
        check_plain(copied)
    assert not {"__deepcopy__", "__reduce_ex__"} & vars(module.net[0]).keys()
    found: dict[str, set[str]] = vars(trainer)["noted"]
    return found


@pytest.mark.multi
@pytest.mark.parametrize(
    ("num_ranks", "strategy", "refused", "words"),
    [
        more(2, {"preset": "lockstep_dp"}, [], ""),
        (2, {"preset": "cyclic_dp"}, [], ""),
        (2, {"preset": "cyclic_zero"}, [*STEP, *WITHIN, *BETWEEN], "is read on rank"),
        (
            2,
            {"preset": "1f1b", "stages": ["net.20"]},
            [*STEP, *WITHIN, *BETWEEN],
            "this rank has not",
        ),
        (1, {"preset": "cyclic_dp", "num_microbatches": 2, "stages": ["net.20"]}, [], ""),
        more(1, {"preset": "pipedream", "stages": ["net.20"]}, [], ""),
    ],
)
def test_copies_in_all_hooks(
    num_ranks: int, strategy: dict[str, Any], refused: list[str], words: str, tmp_path: Path
) -> None:
    for rank in trained(
        Copying, strategy, num_ranks, data=batches, valid=batches, look=noted,
        limit_train_batches=3, limit_val_batches=1, num_sanity_val_steps=0,
        enable_checkpointing=True, default_root_dir=str(tmp_path),
    ):  # fmt: skip
        assert rank.found.keys() >= {*STEP, *WITHIN, *BETWEEN, *AT_ENDS}
        for where, found in rank.found.items():
            refusals = found - {""}
            assert where in refused or not refusals, refusals
            assert all(words in x and "allowed: " in x for x in refusals), refusals
        assert bool(refused) == any(found - {""} for found in rank.found.values())
    (file,) = tmp_path.glob("checkpoints/*.ckpt")  # with the network among its hyperparameters
    saved = torch.load(file, weights_only=False)
    module = Copying()
    module.load_state_dict(saved["state_dict"])
    check_values(saved["hyper_parameters"]["net"], module.net)
    check_plain(saved["hyper_parameters"]["net"])
