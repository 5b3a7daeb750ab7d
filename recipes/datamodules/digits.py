"""Scikit-learn's handwritten digits: 1,797 grey images of 8x8 pixels that need no download."""

from __future__ import annotations

from typing import final

import lightning as L
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


@final
class Digits(L.LightningDataModule):
    """Serve 1,437 digits for training and 360 for validation, the same split in every process.

    Args:
        batch_size: Images of one worker's batch.
        split_seed: Which images are kept for validation.
    """

    def __init__(self, *, batch_size: int = 32, split_seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        """Load, split by class, and normalise with the training images' mean and spread."""
        pixels, labels = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8)
        train, val = train_test_split(
            range(len(labels)), test_size=360, random_state=self.split_seed, stratify=labels
        )
        images = (images - images[train].mean()) / images[train].std()
        targets = torch.from_numpy(labels)
        self.train = TensorDataset(images[train], targets[train])
        self.val = TensorDataset(images[val], targets[val])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled batches, all of the same size: BatchNorm dislikes a small last one."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the validation digits in order."""
        return DataLoader(self.val, self.batch_size)
