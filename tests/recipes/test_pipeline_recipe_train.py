"""The papers' recipes on pipelines train, validate and keep a checkpoint, on tiny data."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from recipes.evaluate import evaluate
from recipes.train import make_trainer
from tests.harness import processes
from tests.harness.commands import Command, Commands
from tests.harness.rows import chosen
from tests.recipes.recipe_ranks import train_rank
from tests.recipes.tiny_data import (
    write_cifar100,
    write_imdb,
    write_texts,
    write_tiny_imagenet,
    write_wmt16,
)

ROOT = Path(__file__).parents[2]
LIGHTNING_WARNINGS = [  # of Lightning itself: an old torch name; advice about loaders
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
BATCHES_OF_4 = ["data.batch_size=4"]
IMAGES = [*BATCHES_OF_4, "data.num_workers=0", "model.net.width=4"]
TINY_IMAGENET = [*IMAGES, "data.val_split=validation", "data.val_transform.shorter=90"]
TINY_IMAGENET += ["task.image_size=80"]
TINY_GPT = ["data.train_split=train", "data.val_split=validation", "data.tokenizer=bytes"]
TINY_GPT += [f"task.{change}" for change in ("vocab_size=256", "block_size=16")]
TINY_GPT += [f"model.net.{change}" for change in ("layers=2", "heads=2", "width=8")]
TINY_GPT += ["data.batch_size=8", "trainer.limit_train_batches=4"]
LSTM = ["data.length=12", "model.net.width=8", "model.net.hidden=8"]
TINY = {  # experiment -> who writes its data, and what makes it small
    "pipeoptim_cnn": (write_tiny_imagenet, TINY_IMAGENET),
    "pipeoptim_cnn_adamw": (write_cifar100, IMAGES),
    "pipeoptim_sentiment": (write_imdb, [*BATCHES_OF_4, *LSTM]),
    "pipeoptim_translation": (
        write_wmt16,
        [*BATCHES_OF_4, "task.vocab_size=90", "model.net.width=8", "model.net.layers=3"],
    ),
    "2bw_gpt": (write_texts, [*TINY_GPT, "strategy.num_microbatches=4"]),
}
ALONE = {  # more networks of the same experiments, on one process
    "pipeoptim_cnn": ["model=resnet101", "model=alexnet", "model=inception_v3"],
    "pipeoptim_cnn_adamw": ["model=vgg16", "model=googlenet"],
}
CASES = [(name, model) for name in TINY for model in ALONE.get(name, ["seed=0"])]


def tiny(experiment, folder):
    write, small = TINY[experiment]
    return [f"experiment={experiment}", f"data.path={write(folder)}", *small]


class TestOneProcess:
    """One process runs all four stages of the pipeline."""

    pytestmark = LIGHTNING_WARNINGS

    @pytest.fixture(autouse=True)
    def leave_nothing_behind(self, hub_cache):
        """Take back what a distributed strategy of one worker sets for the whole process."""
        before = dict(os.environ)
        yield
        os.environ.clear()
        os.environ.update(before)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @pytest.mark.parametrize(("experiment", "model"), CASES)
    def test_training(self, experiment, model, compose_recipe, tmp_path):
        quiet = ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"]
        cfg = compose_recipe(
            *tiny(experiment, tmp_path / "data"),
            *(model, "trainer.devices=1", "trainer.fast_dev_run=2", *quiet),
        )
        torch.manual_seed(0)
        trainer = make_trainer(cfg)
        trainer.fit(instantiate(cfg.model), instantiate(cfg.data))
        assert trainer.strategy.plan.num_stages == 4
        assert trainer.global_step == 2
        assert torch.isfinite(trainer.callback_metrics["train_loss"])
        metric = float(trainer.callback_metrics[cfg.task.metric])
        assert 0 <= metric <= 1 if cfg.task.metric == "val_accuracy" else 20 < metric < 500


TWO = {  # with the stages by name: those of a number are measured, and differ from run to run
    "pipeoptim_cnn": ["model=alexnet", "stages=[net.0.3, net.0.8, net.3.1]"],
    "pipeoptim_sentiment": [],
    "pipeoptim_translation": ["stages=[net.encoder.0, net.target, net.decoder.0]"],
    "2bw_gpt": ["stages=[net.transformer.h.0, net.transformer.h.1, net.transformer.ln_f]"],
}


@pytest.mark.multi
@pytest.mark.parametrize(
    "experiment",
    chosen(TWO, ["2bw_gpt"]),
)
def test_two_processes_end_with_the_checkpoint_of_one(experiment, compose_recipe, tmp_path):
    cfg = compose_recipe(
        *tiny(experiment, tmp_path / "data"),
        *(*TWO[experiment], "trainer.devices=1", "trainer.max_epochs=1"),
        *("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"),
    )
    recipe = OmegaConf.to_container(cfg, resolve=True)
    runs = [processes.run(train_rank, n, recipe, n, str(tmp_path / f"on {n}")) for n in (1, 2)]
    (one,), (two, _) = runs
    assert one["stages"] == two["stages"] == 4
    assert one["updates"] == two["updates"] >= 2
    assert one["weights"].keys() == two["weights"].keys() != set()
    for name, weight in one["weights"].items():
        assert torch.equal(weight, two["weights"][name]), name
    assert one["metric"] == two["metric"]


@pytest.mark.multi
@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*many workers", "ignore:The dirpath")
# Lightning's, of older versions that evaluation leaves out
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_user_trains_a_translator_and_asks_for_its_bleu(compose_recipe, hub_cache, tmp_path):
    run = tmp_path / "run"
    recipe = tiny("pipeoptim_translation", tmp_path / "data")
    train = [sys.executable, "recipes/train.py", f"hydra.run.dir={run}", *recipe]
    train += ["trainer.devices=2", "start_method=fork", "trainer.max_epochs=1"]
    env = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    command = Command(arguments=train, is_forked=True, env=env, folder=ROOT)
    with Commands({"train": command}) as commands:
        text = commands.output("train")
    assert re.search(r"val perplexity +│ \d+\.\d{4}", text)
    (file,) = run.glob("metrics/checkpoints/*.ckpt")
    one = ["strategy=single", f"data.tokenizer={run / 'pieces.json'}"]
    trainer = evaluate(compose_recipe(*recipe, *one, f"ckpt_path='{file}'"))
    assert 0 <= trainer.callback_metrics["test_bleu"] <= 1


def test_nothing_is_evaluated_without_a_checkpoint(compose_recipe):
    with pytest.raises(ValueError, match=r"add \"ckpt_path='FILE\.ckpt'\""):
        evaluate(compose_recipe())
