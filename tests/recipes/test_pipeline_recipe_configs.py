"""The recipes of papers on pipelines carry the papers' settings; the rest of conf/ fits them."""

from __future__ import annotations

import pytest
import torch
from hydra.utils import instantiate

PIPEOPTIM = [
    "pipeoptim_cnn",
    "pipeoptim_cnn_adamw",
    "pipeoptim_sentiment",
    "pipeoptim_translation",
]


def test_2bw_gpt(compose_recipe):
    cfg = compose_recipe("experiment=2bw_gpt")
    assert (cfg.strategy.preset, cfg.strategy.activation_checkpointing) == (
        "pipedream_2bw",
        "always",
    )
    assert (cfg.data.batch_size, cfg.data.block_size, cfg.model.net.block_size) == (512, 512, 512)
    assert cfg.data.batch_size % cfg.strategy.num_microbatches == 0
    assert cfg.strategy.num_microbatches >= cfg.strategy.stages == 4
    assert (cfg.model.optimizer._target_, cfg.model.optimizer.lr) == ("torch.optim.AdamW", 1e-4)


@pytest.mark.parametrize("name", PIPEOPTIM)
def test_pipeoptim_has_four_stages_and_an_update_per_mini_batch(compose_recipe, name):
    cfg = compose_recipe(f"experiment={name}")
    assert (cfg.strategy.preset, cfg.strategy.num_microbatches) == ("pipeoptim", 1)
    stages = cfg.strategy.stages
    assert stages == 4 or len(stages) == 3  # of a list, stage 0 begins by itself
    assert cfg.trainer.devices == 4


@pytest.mark.parametrize(
    ("name", "optimizer", "settings", "batch_size", "epochs"),
    [
        ("pipeoptim_cnn", "SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}, 64, 70),
        ("pipeoptim_cnn_adamw", "AdamW", {"lr": 1e-3, "weight_decay": 5e-4}, 128, 120),
        ("pipeoptim_sentiment", "SGD", {"lr": 0.06, "momentum": 0.9}, 256, 50),
        ("pipeoptim_translation", "Adam", {"lr": 3e-4, "betas": [0.9, 0.999]}, 64, 8),
    ],
)
def test_pipeoptims_optimizers(compose_recipe, name, optimizer, settings, batch_size, epochs):
    cfg = compose_recipe(f"experiment={name}")
    assert cfg.model.optimizer._target_ == f"torch.optim.{optimizer}"
    assert {key: cfg.model.optimizer[key] for key in settings} == settings
    assert (cfg.data.batch_size, cfg.trainer.max_epochs) == (batch_size, epochs)
    instantiate(cfg.model.optimizer)([torch.nn.Parameter(torch.zeros(1))])  # no key too many


@pytest.mark.parametrize(
    ("name", "tenths"), [("pipeoptim_cnn", [40, 60]), ("pipeoptim_cnn_adamw", [90])]
)
def test_the_learning_rate_falls_to_a_tenth(compose_recipe, name, tenths):
    cfg = compose_recipe(f"experiment={name}")
    optimizer = instantiate(cfg.model.optimizer)([torch.nn.Parameter(torch.zeros(1))])
    scheduler = instantiate(cfg.model.scheduler)(optimizer)
    rates = []
    for _ in range(cfg.trainer.max_epochs):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    falls = [epoch for epoch in range(1, len(rates)) if rates[epoch] != rates[epoch - 1]]
    assert falls == tenths
    assert rates[-1] == pytest.approx(rates[0] / 10 ** len(tenths))


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("pipeoptim_cnn", ["resnet101", "alexnet", "inception_v3"]),
        ("pipeoptim_cnn_adamw", ["vgg16", "googlenet", "resnet50"]),
    ],
)
def test_every_network_takes_the_experiments_optimizer(compose_recipe, name, models):
    for model in models:
        cfg = compose_recipe(f"experiment={name}", f"model={model}")
        assert cfg.model.optimizer == compose_recipe(f"experiment={name}").model.optimizer
        with torch.device("meta"):
            instantiate(cfg.model)


def test_a_smaller_data_set_for_translation(compose_recipe):
    cfg = compose_recipe("experiment=pipeoptim_translation", "data=multi30k")
    assert (cfg.data.path, cfg.data.name) == ("bentrevett/multi30k", None)
    assert cfg.data.vocab_size == cfg.model.net.vocab_size == cfg.task.vocab_size == 10_000
