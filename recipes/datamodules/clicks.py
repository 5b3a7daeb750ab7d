"""Clicks on advertisements, made up: what a recommender is trained on, without a download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

_HIDDEN = 4  # numbers that stand for an id in the rule by which people click
_CLICK_RATE_LOGIT = -1.0  # of an average row: about one in four


@final
class Clicks(L.LightningDataModule):
    """Serve rows of measured numbers and ids, and whether there was a click.

    Ids are drawn by Zipf's law: a few come in most rows, and most in hardly any, so that gradients
    of their embeddings are mostly zero. A click is a draw from a logistic rule of the numbers, of
    each id by itself, and of all pairs of ids (a factorization machine), which no user sees.

    Args:
        batch_size: Rows of one worker's batch.
        num_numbers: Measured numbers of a row.
        cardinalities: How many ids each field has.
        num_train: Rows for training.
        num_val: Rows for validation.
        seed: Of the rule and of the rows, the same in every process.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        num_numbers: int,
        cardinalities: Sequence[int],
        num_train: int,
        num_val: int,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_numbers = num_numbers
        self.cardinalities = tuple(cardinalities)
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Make the rows."""
        draws = torch.Generator().manual_seed(self.seed)
        count = self.num_train + self.num_val
        numbers = torch.randn(count, self.num_numbers, generator=draws)
        ids = torch.stack([zipf(n, count, draws) for n in self.cardinalities], dim=1)
        odds = self._logits(numbers, ids, draws).sigmoid()
        clicks = (torch.rand(count, generator=draws) < odds).float()
        rows = TensorDataset(numbers, ids, clicks)
        self.train = torch.utils.data.Subset(rows, range(self.num_train))
        self.val = torch.utils.data.Subset(rows, range(self.num_train, count))

    def _logits(self, numbers: Tensor, ids: Tensor, draws: torch.Generator) -> Tensor:
        weights = torch.randn(self.num_numbers, generator=draws) / self.num_numbers**0.5
        logits = _CLICK_RATE_LOGIT + numbers @ weights
        hidden = []
        for field, n in enumerate(self.cardinalities):
            logits += 0.5 * torch.randn(n, generator=draws)[ids[:, field]]
            hidden.append(torch.randn(n, _HIDDEN, generator=draws)[ids[:, field]])
        total = torch.stack(hidden).sum(0)
        pairs = (total.square() - sum(x.square() for x in hidden)).sum(1) / 2
        return logits + pairs / (len(hidden) * _HIDDEN**0.5)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled batches: numbers (N, num_numbers), ids (N, fields), clicks (N,)."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the validation rows in order."""
        return DataLoader(self.val, self.batch_size)


def zipf(num_ids: int, count: int, draws: torch.Generator) -> Tensor:
    """Draw ids of which the k-th comes k times as rarely as the first."""
    shares = 1 / torch.arange(1, num_ids + 1, dtype=torch.float64)
    return torch.multinomial(shares, count, replacement=True, generator=draws)
