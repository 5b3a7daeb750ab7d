"""Trainers of the ranks of tests, what they leave behind, and how it is compared."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic import PRESETS, CyclicStrategy, PipelineStrategy
from lightning_cyclic.plan.presets import AXES
from lightning_cyclic.registration import make_strategy
from tests.harness.processes import here
from tests.modules.classifier import Classifier, micro_batches


def make_trainer(strategy: Any, **flags: Any) -> Trainer:
    """Make a quiet Trainer for the ranks that :mod:`tests.processes` started."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return Trainer(
        num_nodes=here().num_ranks, strategy=strategy_of(strategy), **(quiet | flags)
    )  # fmt: skip


def strategy_of(strategy: Any) -> Any:
    """Return a name as it is, and a dict as the strategy of its options; it may replace axes."""
    if not isinstance(strategy, dict):
        return strategy
    given = {"preset": "cyclic_dp"} | strategy
    replaced = {axis: given.pop(axis) for axis in AXES if axis in given}
    if not replaced:
        return make_strategy(**given)
    preset = PRESETS[given.pop("preset")]
    door = CyclicStrategy if preset.placement == "replicated" else PipelineStrategy
    return door({axis: getattr(preset, axis) for axis in AXES} | replaced, **given)


def train_data(module: Classifier, num_batches: int) -> DataLoader[Any]:
    """Return the loader of so many batches per worker."""
    return micro_batches(module.kind, num_batches)


def valid_data(module: Classifier, num_batches: int = 2) -> DataLoader[Any]:
    """Return the loader of so many other batches per worker."""
    return micro_batches(module.kind, num_batches, seed=1)


def fit(
    make_module: Callable[[], Classifier], strategy: Any, num_batches: int, flags: dict[str, Any]
) -> dict[str, Any]:
    """Train on this rank and return what tests compare."""
    module = make_module()
    trainer = make_trainer(strategy, **({"max_epochs": 1} | flags))
    trainer.fit(module, train_data(module, num_batches), valid_data(module))
    return outcome(trainer, module)


def outcome(trainer: Trainer, module: Classifier) -> dict[str, Any]:
    """Return what tests compare."""
    return {
        "weights": weights_of(module),
        "stage_of": dict(getattr(trainer.strategy, "stage_of", {})),
        "losses": list(module.losses),
        "rates": list(module.rates),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "metrics": {name: float(x) for name, x in trainer.callback_metrics.items()},
    }


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all parameters and buffers."""
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


def assert_same(given: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    """Compare bit by bit."""
    assert given.keys() == expected.keys(), what
    for name, x in expected.items():
        assert torch.equal(given[name], x), f"{what} {name}"


class Said(logging.Handler):
    """Note what is logged.

    Args:
        name: of the logger.
    """

    def __init__(self, name: str = "lightning.pytorch.utilities.rank_zero") -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
