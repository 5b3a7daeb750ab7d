"""CIFAR-10, ImageNet and their like through Hugging Face `datasets`: hub name or local folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import datasets
import lightning as L
import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Transform = Callable[[Tensor], Tensor]


@final
class Pictures(Dataset[tuple[Tensor, int]]):
    """Decode, transform and normalise the rows of one split.

    Args:
        rows: A split with one column of images and one of labels.
        label: Name of the column of labels.
        transform: Maps an image (C, H, W) with values in 0..255 to the same, cropped.
        mean: Mean of each channel, on the scale 0..1.
        std: Standard deviation of each channel, on the scale 0..1.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        label: str,
        transform: Transform | None,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        self.rows = rows
        self.label = label
        self.image = _image_column(rows)
        self.transform = transform
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.rows[index]
        image = _pixels(row[self.image], channels=len(self.mean))
        if self.transform is not None:
            image = self.transform(image)
        return (image / 255 - self.mean) / self.std, row[self.label]


@final
class LabelledImages(L.LightningDataModule):
    """Serve the training and validation split of a labelled image data set.

    Args:
        path: Name on the Hugging Face hub, or a local folder: one that ``save_to_disk`` wrote,
            one with parquet files, or one with a folder of images per class and split.
        num_classes: Number of classes that the model has outputs for.
        batch_size: Images of one worker's batch.
        mean: Mean of each channel, on the scale 0..1; one or three channels.
        std: Standard deviation of each channel, on the scale 0..1.
        train_transform: Crops and flips of training, on tensors (C, H, W) of 0..255.
        val_transform: The same for validation.
        train_split: Name of the training split.
        val_split: Name of the validation split.
        label: Name of the column of labels.
        num_workers: Processes that decode images, for each worker and split.
    """

    def __init__(  # noqa: PLR0913  (one keyword for each line of the data set's YAML file)
        self,
        path: str,
        *,
        num_classes: int,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        train_transform: Transform | None = None,
        val_transform: Transform | None = None,
        train_split: str = "train",
        val_split: str = "validation",
        label: str = "label",
        num_workers: int = 4,
    ) -> None:
        super().__init__()
        self.path = path
        self.num_classes = num_classes
        self.label = label
        self.splits = {
            "train": (train_split, train_transform),
            "val": (val_split, val_transform),
        }
        self.normalisation = (tuple(mean), tuple(std))
        self.loader: dict[str, Any] = {
            "batch_size": batch_size,
            "num_workers": num_workers,
            "persistent_workers": num_workers > 0,
        }

    def prepare_data(self) -> None:
        """Download once per host; the other workers of the host wait."""
        for split, _ in self.splits.values():
            load_split(self.path, split)

    def setup(self, stage: str) -> None:
        """Open both splits."""
        self.train = self._pictures("train")
        self.val = self._pictures("val")

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return shuffled batches, all of the same size."""
        return DataLoader(self.train, shuffle=True, drop_last=True, **self.loader)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return the validation images in order."""
        return DataLoader(self.val, **self.loader)

    def _pictures(self, which: str) -> Pictures:
        split, transform = self.splits[which]
        rows = load_split(self.path, split)
        self._check_labels(rows)
        return Pictures(rows, self.label, transform, *self.normalisation)

    def _check_labels(self, rows: datasets.Dataset) -> None:
        feature = rows.features.get(self.label)
        if feature is None:
            raise ValueError(
                f"{self.path!r} has no column {self.label!r}; it has "
                f"{', '.join(rows.features)}; name the labels with data.label=COLUMN"
            )
        known = getattr(feature, "num_classes", self.num_classes)
        if known != self.num_classes:
            raise ValueError(
                f"{self.path!r} has {known} classes, the model {self.num_classes}; "
                f"set task.num_classes={known}"
            )


def load_split(path: str, split: str, name: str | None = None) -> datasets.Dataset:
    """Open one split of a data set on the hub or in a local folder.

    Args:
        path: Name on the Hugging Face hub, or a local folder.
        split: Name of the split.
        name: The part of the data set, where the hub's has several.
    """
    folder = Path(path).expanduser()
    if (folder / "dataset_dict.json").is_file():  # what DatasetDict.save_to_disk leaves behind
        return datasets.load_from_disk(str(folder))[split]
    if folder.is_dir():
        return datasets.load_dataset(str(folder), split=split)
    return datasets.load_dataset(path, name, split=split)


def _image_column(rows: datasets.Dataset) -> str:
    names = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    if not names:
        raise ValueError(
            f"the data set has no column of images, only {', '.join(rows.features)}; "
            "cast one with dataset.cast_column(NAME, datasets.Image())"
        )
    return names[0]


def _pixels(image: Image, channels: int) -> Tensor:
    """Turn a PIL image of any mode into (channels, H, W) with values in 0..255."""
    pixels = np.array(image.convert("RGB" if channels == 3 else "L"))
    return torch.from_numpy(pixels).view(*pixels.shape[:2], channels).permute(2, 0, 1)
