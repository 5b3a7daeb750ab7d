"""Tiny data in the formats of the hub: parquet files and folders, a few rows each."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
from PIL import Image

REVIEWS = {0: "It's bad,<br />so bad ", 1: "A good film, truly good "}
SENTENCES = {
    "en": ["a dog runs", "two men play ball.", "the small house", "a man sees a dog"],
    "de": ["ein Hund rennt", "zwei Männer spielen.", "das kleine Haus", "ein Mann sieht"],
}
LANGUAGES = ("en", "de")


def write_tiny_imagenet(folder: Path) -> Path:
    """Write images of 64 x 64 pixels, as zh-plus/tiny-imagenet has them; red is the label."""
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=200)}
    )
    return _write_images(folder, features, 64, {"train": 8, "valid": 4})


def write_cifar100(folder: Path) -> Path:
    """Write images of 32 x 32 pixels with two labels each, as uoft-cs/cifar100 has them."""
    classes = {"fine_label": 100, "coarse_label": 20}
    labels = {name: datasets.ClassLabel(num_classes=count) for name, count in classes.items()}
    features = datasets.Features({"img": datasets.Image(), **labels})
    return _write_images(folder, features, 32, {"train": 8, "test": 4})


def write_imdb(folder: Path) -> Path:
    """Write reviews of growing length, as stanfordnlp/imdb has them."""
    label = datasets.ClassLabel(names=["neg", "pos"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    for split, count in {"train": 16, "test": 6}.items():
        labels = [index % 2 for index in range(count)]
        texts = [REVIEWS[label] * (1 + index) for index, label in enumerate(labels)]
        _write(folder, split, {"text": texts, "label": labels}, features)
    return folder


def write_wmt16(folder: Path) -> Path:
    """Write pairs of sentences in one column, as wmt/wmt16 has them."""
    features = datasets.Features({"translation": datasets.Translation(LANGUAGES)})
    for split, pairs in _pairs().items():
        _write(folder, split, {"translation": pairs}, features)
    return folder


def write_multi30k(folder: Path) -> Path:
    """Write pairs of sentences in two columns, as bentrevett/multi30k has them."""
    for split, pairs in _pairs().items():
        columns = {language: [pair[language] for pair in pairs] for language in LANGUAGES}
        _write(folder, split, columns, None)
    return folder


def write_texts(folder: Path) -> Path:
    """Write text files whose names begin with their split."""
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        for index in range(2):
            (folder / f"{split}-{index}.txt").write_text(f"{split} {index}: the quick fox\n" * 20)
    return folder


def _pairs() -> dict[str, list[dict[str, str]]]:
    counts = {"train": 8, "validation": 4, "test": 4}
    return {
        split: [{name: SENTENCES[name][index % 4] for name in LANGUAGES} for index in range(count)]
        for split, count in counts.items()
    }


def _write_images(
    folder: Path, features: datasets.Features, size: int, counts: dict[str, int]
) -> Path:
    image, *labels = features
    for split, count in counts.items():
        numbers = [index % 4 for index in range(count)]
        pixels = [np.full((size, size, 3), (20 * n, 0, 0), np.uint8) for n in numbers]
        rows = {image: [Image.fromarray(p) for p in pixels], **dict.fromkeys(labels, numbers)}
        _write(folder, split, rows, features)
    return folder


def _write(folder: Path, split: str, rows: dict, features: datasets.Features | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{split}-00000-of-00001.parquet"
    datasets.Dataset.from_dict(rows, features).to_parquet(file)
