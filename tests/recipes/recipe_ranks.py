"""Train a recipe on one of several ranks that tests.harness.processes starts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch

ROOT = Path(__file__).parents[2]


def train_rank(recipe: dict[str, Any], num_ranks: int, folder: str) -> dict[str, Any]:
    """Train as recipes/train.py does; return the metric and what the checkpoint holds.

    Args:
        recipe: The composed configuration, resolved.
        num_ranks: Number of ranks, each a node of one device for Lightning.
        folder: Where this run keeps its files.
    """
    import datasets
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from recipes.train import make_trainer

    # ranks without the last stage have nothing of their own to add to a metric
    warnings.filterwarnings("ignore", "The ``compute`` method of metric")
    datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
    datasets.disable_progress_bars()
    cfg = OmegaConf.create(recipe)
    OmegaConf.update(cfg, "trainer.num_nodes", num_ranks)
    OmegaConf.update(cfg, "trainer.default_root_dir", folder)
    L.seed_everything(cfg.seed, workers=True, verbose=False)  # again where ranks meet
    trainer = make_trainer(cfg)
    trainer.fit(instantiate(cfg.model), instantiate(cfg.data))
    checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    return {
        "stages": trainer.strategy.plan.num_stages,
        "updates": checkpoint["global_step"],
        "weights": checkpoint["state_dict"],
        "metric": trainer.callback_metrics[cfg.task.metric],
    }
