"""Train a recipe: compose it from conf/, run it with Lightning, print what came of it.

    python recipes/train.py                             the main job: digits, cyclic_dp, 2 workers
    python recipes/train.py strategy=ddp                one word changes the strategy
    python recipes/train.py strategy=1f1b workers=4     a pipeline of four stages
    python recipes/train.py experiment=cdp_cifar10      the paper's settings
    python recipes/train.py experiment=compare_pipelines   several trainings, side by side
    python recipes/train.py experiment=samo_digits      a pruned network beside the dense one
    python recipes/train.py experiment=samo_gpt         the same of a GPT
    python recipes/train.py trainer.max_epochs=1 seed=3 any value of any file in conf/

The modules in models/ and datamodules/ are plain Lightning. Nothing in this file is special to
cyclic data parallelism either: the strategy is one more object that the configuration names.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).parents[1]))  # what conf/ names is below `recipes`

from recipes.compare import compare_recipes
from recipes.pruned import train_pruned
from recipes.report import print_results
from recipes.resume import checkpoint_of, keep_rows


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> float:
    """Train what the configuration says.

    Lightning starts the other workers by running this script again, so all of it runs once per
    worker; only rank 0 prints.

    Returns:
        The metric that the data set is judged by (``task.metric``), for Hydra's sweepers; of a
        comparison, the number of runs that failed.
    """
    if "compare" in cfg:
        return compare_recipes(cfg)
    if "pruned" in cfg:
        return train_pruned(cfg)
    started_s = time.perf_counter()
    refuse_popen_sweep(cfg)
    limit_threads(cfg)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    keep_rows(cfg)
    trainer = make_trainer(cfg)
    trainer.fit(instantiate(cfg.model), instantiate(cfg.data), ckpt_path=checkpoint_of(cfg))
    metric = float(trainer.callback_metrics[cfg.task.metric])
    if trainer.is_global_zero:
        print_results(trainer, {cfg.task.metric: metric}, time.perf_counter() - started_s)
    return metric


def make_trainer(cfg: DictConfig) -> L.Trainer:
    """Make the Trainer, with the strategy and its callbacks."""
    make = instantiate(cfg.trainer, _partial_=True)
    strategy = instantiate(cfg.strategy, _convert_="all")  # stages=[...] as a list
    return make(strategy=strategy, callbacks=make_callbacks(cfg))


def make_callbacks(cfg: DictConfig) -> list[L.Callback]:
    """Make those that are named, and what saves more often than Lightning by itself."""
    callbacks = list(instantiate(cfg.callbacks or {}).values())
    if cfg.save_every is None:
        return callbacks
    newest = ModelCheckpoint(filename="newest-{step}", every_n_train_steps=cfg.save_every)
    return [*callbacks, ModelCheckpoint(), newest]


def refuse_popen_sweep(cfg: DictConfig) -> None:
    """Refuse a sweep whose workers would each run the whole sweep again.

    Lightning's popen launcher repeats the command line, ``--multirun`` included, in every worker
    (Lightning issue 11300). Where SLURM starts them, it does nothing.
    """
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    popen = cfg.start_method == "popen" and cfg.trainer.devices != 1
    if sweep and popen and not SLURMEnvironment.detect():
        raise ValueError(
            "--multirun cannot start several workers by popen; allowed: spawn, fork; "
            "add start_method=spawn to the command"
        )


def limit_threads(cfg: DictConfig) -> None:
    """Give each of several CPU workers few threads, or they fight over the cores.

    OMP_NUM_THREADS wins where it is set; the other workers inherit it.
    """
    if cfg.trainer.accelerator == "cpu" and cfg.trainer.devices != 1:
        threads = os.environ.setdefault("OMP_NUM_THREADS", str(cfg.threads))
        torch.set_num_threads(int(threads))


if __name__ == "__main__":
    main()
