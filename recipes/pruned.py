"""Train a pruned network beside the dense one: draw an Early-Bird ticket, train what it keeps.

    search   dense, until the mask no longer changes from epoch to epoch
    sparse   from the weights of the search, with compressed states, for the epochs that are left
    dense    the same model, seed and epochs, with nothing pruned

All three are ordinary Lightning: a callback in the first, a precision plugin in the second.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from rich import get_console
from rich.table import Table
from torch import Tensor, nn

from lightning_cyclic import EarlyBirdPruning, SparseStatePrecision


@dataclass(frozen=True)
class Result:
    """Say what came of a training.

    Args:
        epochs: that were trained.
        metric: what the data set is judged by.
        step_s: seconds of a step; the first epoch, in which caches warm up, is not in it.
        state_bytes: of weights, index, master weights, gradients and optimizer state, for each
            parameter that rank 0 has, as they are in the optimizer's step.
    """

    epochs: int
    metric: float
    step_s: float
    state_bytes: float


class Steps(L.Callback):
    """Measure steps, and weigh what the optimizer has in one."""

    def __init__(self, sparse: SparseStatePrecision | None) -> None:
        self.seconds: list[float] = []
        self.state_bytes = 0.0
        self._sparse = sparse
        self._began_s = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        """Begin."""
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """End."""
        if trainer.current_epoch > 0:
            self.seconds.append(time.perf_counter() - self._began_s)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Count the bytes of what is alive, each tensor once."""
        held: dict[int, Tensor] = {}

        def hold(*tensors: Tensor | None) -> None:
            held.update({x.data_ptr(): x for x in tensors if x is not None and x.numel() > 1})

        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for p in filter(_is_here, trained):
            hold(p, p.grad, *optimizer.state.get(p, {}).values())
        weights = list(filter(_is_here, module.parameters()))
        hold(*weights)
        if self._sparse is not None:
            hold(*self._sparse.kept())
        total = sum(x.numel() * x.element_size() for x in held.values())
        self.state_bytes = total / sum(p.numel() for p in weights)


def _is_here(p: nn.Parameter) -> bool:
    """Say whether a parameter has memory, and not another rank's alone."""
    return p.untyped_storage().nbytes() >= p.numel() * p.element_size()


def train_pruned(cfg: DictConfig) -> float:
    """Search, train sparse, train dense; print the table.

    Returns:
        The metric of the pruned network.
    """
    epochs, options = cfg.trainer.max_epochs, cfg.pruned
    file = Path(cfg.trainer.default_root_dir, "mask.pt")
    ticket: EarlyBirdPruning = instantiate(options.ticket, path=file)
    module, found = _new(cfg), {}
    found["search"] = _fit(cfg, "search", module, options.search_epochs, callbacks=[ticket])
    if ticket.mask is None:
        distances = ", ".join(f"{x:.3f}" for x in ticket.distances)
        raise SystemExit(
            f"no ticket was drawn in {options.search_epochs} epochs: distances of their masks "
            f"were {distances}; raise pruned.search_epochs or pruned.ticket.tolerance"
        )
    weights = copy.deepcopy(module.state_dict())
    module = _new(cfg)
    module.load_state_dict(weights)
    sparse: SparseStatePrecision = instantiate(options.precision, mask=str(file))
    left = max(epochs - found["search"].epochs, 1)
    found["sparse"] = _fit(cfg, "sparse", module, left, sparse=sparse)
    if options.dense:
        found["dense"] = _fit(cfg, "dense", _new(cfg), epochs)
    table = _table(found, cfg.task.metric, ticket, module)
    rank_zero_only(get_console().print)(table)
    return found["sparse"].metric


def _new(cfg: DictConfig) -> L.LightningModule:
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    module: L.LightningModule = instantiate(cfg.model)
    return module


def _fit(
    cfg: DictConfig,
    name: str,
    module: L.LightningModule,
    max_epochs: int,
    *,
    sparse: SparseStatePrecision | None = None,
    callbacks: list[L.Callback] | None = None,
) -> Result:
    steps, folder = Steps(sparse), str(Path(cfg.trainer.default_root_dir, name))
    logger = instantiate(cfg.trainer.logger, save_dir=folder) if cfg.trainer.logger else False
    more: dict[str, Any] = {} if sparse is None else {"plugins": [sparse], "precision": None}
    trainer = instantiate(cfg.trainer, _partial_=True)(
        strategy=instantiate(cfg.strategy, _convert_="all"),
        callbacks=[steps, *(callbacks or [])],
        max_epochs=max_epochs,
        default_root_dir=folder,
        logger=logger,
        **more,
    )
    trainer.fit(module, instantiate(cfg.data))
    metric = float(trainer.callback_metrics[cfg.task.metric])
    seconds = sorted(steps.seconds) or [float("nan")]
    return Result(trainer.current_epoch, metric, seconds[len(seconds) // 2], steps.state_bytes)


def _table(
    found: dict[str, Result], metric: str, ticket: EarlyBirdPruning, module: nn.Module
) -> Table:
    assert ticket.mask is not None
    kept = sum(int(mask.sum()) for mask in ticket.mask.values())
    of = sum(mask.numel() for mask in ticket.mask.values())
    total = sum(p.numel() for p in module.parameters())
    title = f"{1 - kept / of:.1%} of {of:,} weights pruned, of {total:,} parameters"
    table = Table("training", "epochs", metric.replace("_", " "), "ms per step", title=title)
    table.add_column("bytes per parameter")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, x in found.items():
        table.add_row(
            name,
            str(x.epochs),
            f"{x.metric:.4f}",
            f"{1000 * x.step_s:.2f}",
            f"{x.state_bytes:.2f}",
        )
    return table
