"""Every file in conf/ composes, and what it names can be made."""

from __future__ import annotations

import re
from itertools import groupby, product, zip_longest
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra import compose
from hydra.core.utils import setup_globals
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.harness.rows import chosen

CONF = Path(__file__).parents[2] / "conf"
CHOICES = [
    f"{path.parent.name}={path.stem}"
    for path in sorted(CONF.glob("*/*.yaml"))
    if not path.stem.startswith("_")
]
MODELS_FOR_DATA = {  # which is no image
    "data=stdlib_bytes": ["model=gpt"],
    "data=openwebtext": ["model=gpt2_medium"],
    "data=clicks": ["model=recommender"],
    "data=imdb": ["model=residual_lstm"],
    "data=wmt16": ["model=gnmt"],
    "data=multi30k": ["model=gnmt"],
}
EXPERIMENTS = [choice for choice in CHOICES if choice.startswith("experiment=")]
PIPELINES = ["gpipe", "1f1b", "cyclic_pipeline", "pipedream_2bw", "cyclic_mp"]
IMAGE_MODELS = ["digits_resnet", "resnet18", "resnet50"]
IMAGE_DATA = ["digits", "cifar10", "imagenet"]
PRESETS = [
    "cyclic_dp",
    "cyclic_dp_v1",
    "lockstep_dp",
    "pipedream",
    "pipeoptim",
    "spectrain",
    *PIPELINES,
]


def together() -> list[list[str]]:
    """Return choices of several groups, so that each is in one: fewer compositions."""
    alone = [[c, *MODELS_FOR_DATA.get(c, [])] for c in CHOICES if c.startswith(("exp", "data"))]
    others = [c for c in CHOICES if not c.startswith(("exp", "data"))]
    groups = [list(each) for _, each in groupby(others, lambda c: c.partition("=")[0])]
    return alone + [list(filter(None, each)) for each in zip_longest(*groups)]


@pytest.mark.parametrize("choices", together(), ids="+".join)
def test_every_choice_composes_and_resolves(compose_recipe, choices):
    cfg = compose_recipe(*choices)
    OmegaConf.resolve(cfg)
    assert not OmegaConf.missing_keys(cfg)


@pytest.mark.parametrize("choice", ["data=digits", *EXPERIMENTS])
def test_every_experiment_makes_its_module_and_data(compose_recipe, choice):
    cfg = compose_recipe(choice)
    with torch.device("meta"):  # no memory for the large ones
        assert isinstance(instantiate(cfg.model), L.LightningModule)
    assert isinstance(instantiate(cfg.data), L.LightningDataModule)


@pytest.mark.parametrize(
    ("model", "data"),
    chosen(
        product(IMAGE_MODELS, IMAGE_DATA), list(zip(IMAGE_MODELS, IMAGE_DATA[::-1], strict=True))
    ),
)
def test_every_image_model_fits_every_image_data_set(compose_recipe, model, data):
    cfg = compose_recipe(f"model={model}", f"data={data}")
    assert cfg.model.net.num_classes == cfg.task.num_classes
    assert cfg.model.net.channels == len(cfg.data.get("mean", [0]))


def test_a_requeued_job_has_the_folder_of_its_run(monkeypatch):
    setup_globals()
    groups = {name: OmegaConf.load(CONF / name / "default.yaml") for name in ("paths", "hydra")}
    asked = OmegaConf.create(groups).hydra.run
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", asked.dir)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert asked.dir == "outputs/4711/0"


def test_gpt_brings_its_data_and_the_command_line_wins(compose_recipe):
    assert "stdlib_bytes" in compose_recipe("model=gpt").data._target_
    assert "digits" in compose_recipe("experiment=cdp_cifar10", "data=digits").data._target_


@pytest.mark.parametrize("name", PRESETS)
def test_strategies_with_a_plan_are_made_by_name(compose_recipe, name):
    cfg = compose_recipe(f"strategy={name}", "stages=4")
    assert (cfg.strategy.preset, cfg.strategy.stages) == (name, 4)
    assert isinstance(instantiate(cfg.strategy), L.pytorch.strategies.DDPStrategy)


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco"])
def test_local_steps_are_made_with_their_numbers(compose_recipe, name):
    made = instantiate(compose_recipe(f"strategy={name}", "strategy.preset.every=7").strategy)
    assert made.preset == name
    assert made._options.plan(4, num_workers=2).local.every == 7


@pytest.mark.parametrize(
    ("choice", "name"),
    chosen(
        product(["data=digits", "experiment=byte_lm"], PIPELINES),
        [("data=digits", name) for name in PIPELINES] + [("experiment=byte_lm", "1f1b")],
    ),
)
def test_batches_are_cut_into_as_many_micro_batches_for_two_and_four_stages(
    compose_recipe, name, choice
):
    for workers in (2, 4):
        cfg = compose_recipe(choice, f"strategy={name}", f"workers={workers}")
        assert (cfg.trainer.devices, cfg.strategy.preset) == (workers, name)
        assert cfg.strategy.num_microbatches >= workers
        assert cfg.data.batch_size % cfg.strategy.num_microbatches == 0


def test_single_means_one_device_in_every_experiment(compose_recipe):
    for choice in EXPERIMENTS:
        cfg = compose_recipe(choice, "strategy=single")
        assert (instantiate(cfg.strategy), cfg.trainer.devices) == ("auto", 1)


@pytest.mark.parametrize("choice", chosen(EXPERIMENTS, EXPERIMENTS[::4]))
def test_evaluation_is_on_one_device_whatever_trained(compose_recipe, choice):
    assert compose_recipe(choice).trainer.logger is False
    cfg = compose("eval", [choice, "paths.output_dir=here"])
    assert (instantiate(cfg.strategy), cfg.trainer.devices, cfg.trainer.logger) == (
        "auto",
        1,
        False,
    )
    assert compose("eval", [choice, "strategy=gpipe"]).strategy.preset == "gpipe"


def test_experiments_carry_the_settings_of_the_paper(compose_recipe):
    cifar = compose_recipe("experiment=cdp_cifar10")
    assert (cifar.trainer.devices, cifar.stages, cifar.data.batch_size) == (8, 4, 64)
    assert cifar.trainer.max_epochs == 100
    optimizer, scheduler = cifar.model.optimizer, cifar.model.scheduler
    assert (optimizer.lr, optimizer.momentum, optimizer.weight_decay) == (0.05, 0.9, 5e-4)
    assert (scheduler.step_size, scheduler.gamma) == (30, 0.2)

    imagenet = compose_recipe("experiment=cdp_imagenet")
    optimizer, scheduler = imagenet.model.optimizer, imagenet.model.scheduler
    assert (optimizer.lr, optimizer.momentum, optimizer.weight_decay) == (0.1, 0.9, 1e-4)
    assert (scheduler.step_size, scheduler.gamma) == (30, 0.1)
    assert (imagenet.data.batch_size, imagenet.trainer.max_epochs) == (32, 91)
