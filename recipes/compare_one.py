"""Train one run of a comparison: FOLDER/run.yaml becomes FOLDER/record.json.

    python recipes/compare_one.py FOLDER

Lightning starts the other workers of a run by running this again; rank 0 writes the record.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, final

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader, RandomSampler

sys.path.insert(0, str(Path(__file__).parents[1]))  # what conf/ names is below `recipes`

from lightning_cyclic.errors import StepError

_FINAL_SHARE = 0.1  # of the steps, over which the final loss is averaged


def main(folder: Path) -> None:
    """Train, and keep the record."""
    cfg = OmegaConf.load(folder / "run.yaml")
    assert isinstance(cfg, DictConfig)
    cfg.trainer.default_root_dir = str(folder)
    torch.set_num_threads(cfg.threads)
    recorder = Recorder(cfg.task.metric, cfg.updates_per_step)
    is_finite = train(cfg, recorder)
    if recorder.is_global_zero:
        found = judged(recorder.rows, is_finite=is_finite)
        sent = {"bytes_per_step": recorder.bytes_per_step}
        (folder / "record.json").write_text(json.dumps(found | sent))


def train(cfg: DictConfig, recorder: Recorder) -> bool:
    """Train as the configuration says.

    Returns:
        Whether the loss was finite to the end.
    """
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    data = instantiate(cfg.data)
    data.prepare_data()
    data.setup("fit")
    loader = in_order_of(cfg.seed, data.train_dataloader())
    cfg.trainer.limit_train_batches = whole_steps(
        len(loader), cfg.updates_per_step, cfg.trainer.limit_train_batches
    )
    make = instantiate(cfg.trainer, _partial_=True)
    strategy = instantiate(cfg.strategy, _convert_="all")
    own = [] if cfg.callback is None else [instantiate(cfg.callback)]
    trainer = make(strategy=strategy, callbacks=[recorder, *own])
    try:
        trainer.fit(instantiate(cfg.model), loader, data.val_dataloader())
    except StepError as error:  # how CyclicStrategy ends a training whose loss is NaN
        if "allowed: a finite loss" not in str(error):
            raise
        return False
    return True


def in_order_of(seed: int, loader: DataLoader[Any]) -> DataLoader[Any]:
    """Let the order of the data depend on the seed alone, not on what else draws numbers."""
    if isinstance(loader.sampler, RandomSampler):
        loader.sampler.generator = torch.Generator().manual_seed(seed)
    return loader


def whole_steps(num_batches: int, updates_per_step: int, limit: float | None) -> int:
    """Count the batches of an epoch, so that each contender sees the same samples.

    Args:
        num_batches: of the loader, one for each update.
        updates_per_step: how many of them make a step.
        limit: most batches, or a share of them, or None for all.
    """
    most = int(num_batches * limit) if isinstance(limit, float) else (limit or num_batches)
    return min(most, num_batches) // updates_per_step * updates_per_step


@final
class Recorder(L.Callback):
    """Note the loss of each step and the metric of each validation, and the seconds until then.

    Behind the training, also what all workers have sent per step, by the count of the transport.

    Without a flush a loss may be known a few updates later, the later the fewer processes there
    are: what is noted is the newest that is known. Time spent in validation does not count.

    Args:
        metric: the name under which the module logs what it is judged by.
        updates_per_step: whose mean loss is that of a step.
    """

    def __init__(self, metric: str, updates_per_step: int) -> None:
        self.rows: list[dict[str, float]] = []
        self.is_global_zero = False
        self.bytes_per_step = 0.0
        self._metric = metric
        self._updates_per_step = updates_per_step
        self._losses: list[float] = []
        self._step = 0
        self._began_s = self._stopped_s = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.is_global_zero = trainer.is_global_zero
        self._began_s = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Note the mean loss of a step's updates."""
        self._losses.append(float(outputs["loss"]))
        if len(self._losses) == self._updates_per_step:
            self._step += 1
            self._note(trainer, loss=sum(self._losses) / len(self._losses))
            self._losses = []

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock; the flush lies behind."""
        self._stopped_s = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the metric, and let the clock go on."""
        if trainer.sanity_checking:
            return
        self._began_s += time.perf_counter() - self._stopped_s
        self._note(trainer, value=float(trainer.callback_metrics[self._metric]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add up what was sent; strategies of others do not count."""
        sent = torch.tensor(float(getattr(trainer.strategy, "bytes_sent", 0)), dtype=torch.float64)
        if trainer.world_size > 1:
            sent = trainer.strategy.reduce(sent, reduce_op="sum")
        self.bytes_per_step = float(sent) / max(1, self._step)

    def _note(self, trainer: L.Trainer, **found: float) -> None:
        seconds = time.perf_counter() - self._began_s
        place = {"epoch": trainer.current_epoch, "step": self._step, "seconds": seconds}
        self.rows.append(place | found)


def judged(rows: list[dict[str, float]], *, is_finite: bool) -> dict[str, Any]:
    """Say whether the loss went down, and where loss and metric ended."""
    losses = [row["loss"] for row in rows if "loss" in row]
    values = [row["value"] for row in rows if "value" in row]
    last = losses[-max(1, int(len(losses) * _FINAL_SHARE)) :]
    final = sum(last) / len(last) if last else math.nan
    if not is_finite or not math.isfinite(final):
        return {"status": "diverged", "reason": "the loss was not finite", "rows": rows}
    if final > losses[0]:
        reason = f"the loss ended at {final:.3g}, above {losses[0]:.3g} of the first step"
        return {"status": "diverged", "reason": reason, "rows": rows}
    found = {"loss": final, "value": values[-1] if values else None}
    return {"status": "trained", **found, "seconds": rows[-1]["seconds"], "rows": rows}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
