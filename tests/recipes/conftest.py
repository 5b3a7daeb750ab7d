"""Compose the recipes' configuration as `python recipes/train.py` does, and make tiny data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from PIL import Image

ROOT = Path(__file__).parents[2]

Compose = Callable[..., DictConfig]


@pytest.fixture
def compose_recipe(tmp_path: Path) -> Iterator[Compose]:
    """Compose conf/train.yaml with overrides; whatever a run writes goes to tmp_path."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield lambda *overrides: compose(
            "train", [f"paths.output_dir={tmp_path}", "logger=none", *overrides]
        )


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what `datasets` caches out of the home directory."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tiny_images(hub_cache: None) -> datasets.DatasetDict:
    """Twelve images of CIFAR-10's columns, sizes and splits; the red channel is the label."""
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
    )

    def split(count: int) -> datasets.Dataset:
        labels = [index % 10 for index in range(count)]
        images = [_image(label, 32, 32) for label in labels]
        return datasets.Dataset.from_dict({"img": images, "label": labels}, features)

    return datasets.DatasetDict({"train": split(12), "test": split(4)})


@pytest.fixture
def cifar10_folder(tiny_images: datasets.DatasetDict, tmp_path: Path) -> Path:
    """A folder of parquet files: what the hub serves for CIFAR-10."""
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for name, rows in tiny_images.items():
        rows.to_parquet(folder / f"{name}-00000-of-00001.parquet")
    return folder


@pytest.fixture
def imagenet_folder(hub_cache: None, tmp_path: Path) -> Path:
    """A folder of JPEG files per split and class, as ImageNet is unpacked; sizes differ."""
    folder = tmp_path / "imagenet"
    for split, count in (("train", 4), ("val", 2)):
        for label in range(3):
            place = folder / split / f"n0{label}"
            place.mkdir(parents=True)
            for index in range(count):
                _image(label, 40 + 8 * index, 56).save(place / f"{index}.JPEG")
    return folder


def _image(label: int, height: int, width: int) -> Image.Image:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = 20 * label
    return Image.fromarray(pixels)
