"""Errors of the user's step say in which micro-batch they came, and keep their type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests import processes
from tests.corpus import make_trainer

pytestmark = pytest.mark.multi


class Net(LightningModule):
    """May fail on rows that begin with a seven, in its forward or in its backward."""

    def __init__(self, fails: str = "", norm: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Tanh()
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.head(self.norm(self.first(x)))
        if self.fails and 7.0 in x:
            if self.fails == "forward":
                raise KeyError("a seven")
            h.register_hook(_fail)
        return F.cross_entropy(h, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fail(grad: Tensor) -> Tensor:
    raise ZeroDivisionError("in a hook")


def notes_of(fails: str, remat: str) -> tuple[str, list[str]]:
    x = torch.zeros(8, 8)
    x[2] = 7.0  # in the second of four micro-batches
    options = {
        "preset": "1f1b",
        "num_microbatches": 4,
        "stages": ["head"],
        "activation_checkpointing": remat,
    }
    trainer = make_trainer(options, max_epochs=1)
    loader = DataLoader([(x, torch.zeros(8, dtype=torch.long))], batch_size=None)  # type: ignore[arg-type]
    with pytest.raises((KeyError, ZeroDivisionError)) as caught:
        trainer.fit(Net(fails), loader)
    return caught.type.__name__, caught.value.__notes__


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize(
    ("fails", "kind"), [("forward", "KeyError"), ("backward", "ZeroDivisionError")]
)
def test_a_note_says_in_which_micro_batch(fails: str, kind: str, remat: str) -> None:
    ((found, notes),) = processes.run(notes_of, 1, fails, remat)
    where = f"in micro-batch 2 of 4 (2 of 8 samples), stage 1, {fails}"
    assert found == kind
    assert notes.count(where) == 1


def fit_normed(drop_last: bool, num_microbatches: int) -> list[str]:
    """Train on batches of 8, 8 and 4 rows; return the notes of what is raised."""
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(20, 8, generator=g), torch.zeros(20, dtype=torch.long))
    options = {"preset": "1f1b", "num_microbatches": num_microbatches, "stages": ["head"]}
    trainer = make_trainer(options, max_epochs=1)
    try:
        trainer.fit(Net(norm=True), DataLoader(data, batch_size=8, drop_last=drop_last))
    except ValueError as error:
        return error.__notes__
    return [f"trained {trainer.global_step}"]


def test_a_micro_batch_too_small_for_batchnorm_says_what_to_do_and_that_helps() -> None:
    (notes,) = processes.run(fit_normed, 1, False, 4)
    assert notes[0] == "in micro-batch 1 of 4 (1 of 4 samples), stage 0, forward"
    assert (
        "use DataLoader(drop_last=True), larger batches, or a smaller num_microbatches" in notes[1]
    )
    assert processes.run(fit_normed, 1, True, 4) == [["trained 2"]]
    assert processes.run(fit_normed, 1, False, 2) == [["trained 3"]]
