"""Strategies, Trainers and modules that are used again: behind a fit, beside one, or a failure.

What is right is what a new Trainer does, bit by bit; where weights are torn, an error says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cyclic import CyclicStrategy, PipelineStrategy
from lightning_cyclic.errors import ConfigurationError
from tests.harness import processes
from tests.harness.processes import here
from tests.harness.rows import more
from tests.harness.trainers import assert_same, make_trainer, weights_of

BATCHES, FAILS = 4, 2
Weights = dict[str, Tensor]

ALONE = {"num_microbatches": 2, "stages": 2}
ROWS = [
    ({"preset": "cyclic_dp"}, 2),
    ({"preset": "1f1b", "num_microbatches": 2}, 2),
    ({"preset": "cyclic_pipeline", "num_microbatches": 2}, 2),
    ({"preset": "cyclic_dp", **ALONE}, 1),
    more({"preset": "1f1b", **ALONE}, 1),
    ({"preset": "cyclic_pipeline", **ALONE}, 1),
]


class Net(LightningModule):
    """Four layers.

    Args:
        seed: of its weights.
        error: raised in its training step, once.
    """

    def __init__(self, seed: int = 0, error: type[BaseException] | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.error = error

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.error is not None and batch_idx == FAILS:
            raise self.error
        return F.mse_loss(self.layers(batch), batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self.layers(batch), batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.05)


def loader() -> DataLoader[Any]:
    g = torch.Generator().manual_seed(1)
    return DataLoader(list(torch.randn(BATCHES, 6, 4, generator=g)), batch_size=None)  # type: ignore[arg-type]


def fit(trainer: Trainer, module: Net, **more: Any) -> Weights:
    trainer.fit(module, loader(), loader(), **more)
    return weights_of(module)


def new(strategy: dict[str, Any], **flags: Any) -> Trainer:
    return make_trainer(strategy, **({"max_epochs": 1} | flags))


# ---------------------------------------------------------------------- one object, two Trainers


@pytest.mark.parametrize("strategy", [CyclicStrategy, PipelineStrategy])
def test_a_strategy_is_of_one_trainer(strategy: Callable[..., Any]) -> None:
    one = strategy(num_microbatches=2)
    flags: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "devices": 1}
    first = Trainer(accelerator="cpu", strategy=one, **flags)
    assert first.strategy is one
    assert first.strategy.accelerator is first.accelerator
    for accelerator in ("cpu", "auto"):
        said = f"one {strategy.__name__} was given to two Trainers.*; use Trainer.strategy="
        with pytest.raises(ConfigurationError, match=said):
            Trainer(accelerator=accelerator, strategy=one, **flags)


# ---------------------------------------------------------------------- two of each, by turns


class Fits(Callback):
    """Fits another module with another Trainer when an epoch ends."""

    def __init__(self, strategy: dict[str, Any], module: Net) -> None:
        self.strategy, self.module = strategy, module

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        fit(new(self.strategy), self.module)


def by_turns(strategy: dict[str, Any]) -> list[tuple[Weights, Weights]]:
    trainers, modules = [new(strategy, max_epochs=2) for _ in range(2)], [Net(0), Net(1)]
    turns = []
    for epochs in (1, 2):
        for trainer, module in zip(trainers, modules, strict=True):
            trainer.fit_loop.max_epochs = epochs
            turns.append(fit(trainer, module))
    alone = []
    for epochs in (1, 2):
        for seed in (0, 1):
            trainer, module = new(strategy), Net(seed)
            for k in range(1, epochs + 1):
                trainer.fit_loop.max_epochs = k
                weights = fit(trainer, module)
            alone.append(weights)
    return list(zip(turns, alone, strict=True))


def one_in_the_other(strategy: dict[str, Any]) -> list[tuple[Weights, Weights]]:
    outer, inner = Net(0), Net(1)
    fit(new(strategy, callbacks=[Fits(strategy, inner)]), outer)
    found = [weights_of(outer), weights_of(inner)]
    return list(zip(found, [fit(new(strategy), Net(seed)) for seed in (0, 1)], strict=True))


def one_module(strategy: dict[str, Any]) -> list[tuple[Weights, Weights]]:
    module, other = Net(0), Net(1)
    other.load_state_dict(fit(new(strategy), module))
    return [(fit(new(strategy), module), fit(new(strategy), other))]


@pytest.mark.multi
@pytest.mark.parametrize("turns", [by_turns, one_in_the_other, one_module])
@pytest.mark.parametrize(("strategy", "num_ranks"), ROWS)
def test_trainers_do_not_disturb_each_other(
    turns: Callable[..., Any], strategy: dict[str, Any], num_ranks: int
) -> None:
    for rank in processes.run(turns, num_ranks, strategy):
        for found, expected in rank:
            assert_same(found, expected)


# ---------------------------------------------------------------------- behind a failure


class Raises(Callback):
    """Fails behind a batch, as code of a user's may."""

    def on_train_batch_end(self, trainer: Any, module: Net, *args: Any) -> None:
        if module.error is not None and trainer.global_step == FAILS:
            raise module.error


def failed(strategy: dict[str, Any], error: type[BaseException], where: str) -> tuple[Any, Net]:
    """Return a Trainer and a module whose fit has failed."""
    trainer = new(strategy, callbacks=[Raises()] if where == "callback" else [])
    module = Net(0, error)
    if where == "callback":
        module.training_step = Net(0).training_step.__func__.__get__(module)  # type: ignore[method-assign,attr-defined]
    with pytest.raises(BaseException):  # noqa: B017, PT011  (others get a PeerError)
        fit(trainer, module)
    module.error = None
    return trainer, module


def again(
    strategy: dict[str, Any], error: type[BaseException], where: str, file: Path
) -> tuple[dict[str, str], list[tuple[Weights, Weights]]]:
    """Return what is said of each use of a module whose fit has failed, and what is right."""
    said: dict[str, str] = {}
    uses: dict[str, Callable[[Trainer, Net], object]] = {
        "save_checkpoint": lambda t, _: t.save_checkpoint(file),
        "trainer.validate": lambda t, m: t.validate(m, loader(), verbose=False),
        "trainer.fit": fit,
    }
    trainer, module = failed(strategy, error, where)
    for name, use in uses.items():
        try:
            use(trainer, module)
        except ConfigurationError as raised:
            said[name] = str(raised)
    trainer.fit_loop.max_epochs = trainer.current_epoch + 1
    loaded = Net(3).state_dict()
    module.load_state_dict(loaded)
    other = Net(1)
    other.load_state_dict(loaded)
    return said, [
        (fit(trainer, Net(1)), fit(new(strategy), Net(1))),
        (fit(new(strategy), module), fit(new(strategy), other)),
    ]


@pytest.mark.multi
@pytest.mark.parametrize(
    ("error", "where"),
    [(ZeroDivisionError, "step"), (ZeroDivisionError, "callback"), (KeyboardInterrupt, "step")],
)
@pytest.mark.parametrize(("strategy", "num_ranks"), ROWS)
def test_a_module_whose_fit_has_failed_is_refused_where_its_weights_are_torn(
    strategy: dict[str, Any], num_ranks: int, error: type[BaseException], where: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    is_torn = num_ranks > 1 or strategy["preset"] == "cyclic_pipeline"
    for rank in processes.run(again, num_ranks, strategy, error, where, tmp_path / "a.ckpt"):
        said, pairs = rank
        expected = {"save_checkpoint", "trainer.validate", "trainer.fit"} if is_torn else set()
        assert said.keys() == expected
        for name, text in said.items():
            assert text.startswith(f"Net was given to {name}, but its training ended by "), text
        for found, right in pairs:
            assert_same(found, right)


class FailsToValidate(Net):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            raise ZeroDivisionError


def saved_behind_a_failed_validation(strategy: dict[str, Any], file: Path) -> tuple[str, Any, Any]:
    trainer, module = new(strategy), FailsToValidate(0)
    with pytest.raises(BaseException):  # noqa: B017, PT011  (others get a PeerError)
        fit(trainer, module)
    with pytest.raises(ConfigurationError) as refused:
        trainer.save_checkpoint(file)
    trainer.save_checkpoint(file, weights_only=True)
    if here().rank:
        return str(refused.value), {}, {}
    return str(refused.value), torch.load(file)["state_dict"], weights_of(module)


@pytest.mark.multi
@pytest.mark.parametrize(("strategy", "num_ranks"), ROWS[:3])
def test_a_file_behind_a_failure_has_no_part_of_the_optimizers_state(
    strategy: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    ends = processes.run(
        saved_behind_a_failed_validation, num_ranks, strategy, tmp_path / "a.ckpt"
    )
    assert all("the state of its own stages alone" in said for said, _, _ in ends)
    _, saved, weights = ends[0]
    assert_same(saved, weights)


def from_a_file(strategy: dict[str, Any], file: Path) -> list[tuple[Weights, Weights]]:
    trainer = new(strategy, max_epochs=1)
    fit(trainer, Net(0))
    trainer.save_checkpoint(file)
    trainer, module = failed(strategy, ZeroDivisionError, "step")
    trainer.fit_loop.max_epochs = 2
    right = fit(new(strategy, max_epochs=2), Net(1), ckpt_path=file)
    return [(fit(trainer, module, ckpt_path=file), right)]


@pytest.mark.multi
@pytest.mark.parametrize(("strategy", "num_ranks"), ROWS)
def test_a_fit_that_has_failed_goes_on_from_a_file(
    strategy: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    for rank in processes.run(from_a_file, num_ranks, strategy, tmp_path / "a.ckpt"):
        for found, right in rank:
            assert_same(found, right)


# ---------------------------------------------------------------------- behind other uses


def saved_behind(strategy: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """Save behind a fit, and once more behind a validation."""
    trainer, module = new(strategy), Net(0)
    fit(trainer, module)
    trainer.save_checkpoint(folder / "fitted.ckpt")
    trainer.validate(module, loader(), verbose=False)
    trainer.save_checkpoint(folder / "validated.ckpt")
    if here().rank:
        return {}, {}
    files = [torch.load(folder / f"{x}.ckpt", weights_only=False) for x in ("fitted", "validated")]
    one, other = (
        {**x["state_dict"], **_tensors(x["optimizer_states"][0]["state"])} for x in files
    )
    return one, other


def _tensors(state: dict[int, dict[str, Tensor]]) -> Weights:
    return {f"{k}.{name}": x for k, values in state.items() for name, x in values.items()}


@pytest.mark.multi
@pytest.mark.parametrize(("strategy", "num_ranks"), ROWS)
def test_a_file_is_whole_behind_a_validation(
    strategy: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    one, other = processes.run(saved_behind, num_ranks, strategy, tmp_path)[0]
    assert len(one) == 4 * 8  # weights, both means and a count of each
    assert_same(other, one)
