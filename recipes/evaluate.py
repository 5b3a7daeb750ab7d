"""Test a checkpoint of a recipe: what a module's ``test_step`` says of the test data.

    python recipes/evaluate.py experiment=pipeoptim_translation
        data.tokenizer=RUN/pieces.json "ckpt_path='RUN/metrics/checkpoints/epoch=7-step=9.ckpt'"

RUN is the folder that training printed as "files". The quotes are for Hydra: the file's name has
equals signs in it. Whatever strategy wrote the checkpoint, ``strategy=single`` reads
it: the default of conf/eval.yaml.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).parents[1]))  # what conf/ names is below `recipes`

from recipes.report import print_results
from recipes.train import limit_threads, make_trainer


@hydra.main(version_base="1.3", config_path="../conf", config_name="eval")
def main(cfg: DictConfig) -> None:
    """Test what the configuration says, and print the metrics."""
    started_s = time.perf_counter()
    limit_threads(cfg)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    trainer = evaluate(cfg)
    if trainer.is_global_zero:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        print_results(trainer, metrics, time.perf_counter() - started_s)


def evaluate(cfg: DictConfig) -> L.Trainer:
    """Run the module's ``test_step`` on the weights of a checkpoint.

    Raises:
        ValueError: If no checkpoint is named: first weights are not worth a test.
    """
    if cfg.ckpt_path is None:
        raise ValueError(
            "no checkpoint to test was given; allowed: a file that training has kept; "
            "add \"ckpt_path='FILE.ckpt'\""
        )
    trainer = make_trainer(cfg)
    trainer.test(instantiate(cfg.model), instantiate(cfg.data), cfg.ckpt_path, verbose=False)
    return trainer


if __name__ == "__main__":
    main()
