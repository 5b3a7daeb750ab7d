"""IMDB and its like through Hugging Face `datasets`: texts with labels, as rows of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import datasets
import lightning as L
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from recipes.datamodules.labelled_images import load_split
from recipes.datamodules.tokens import PAD, learn_tokenizer, load_tokenizer


@final
class LabelledTexts(L.LightningDataModule):
    """Serve the beginnings of texts, all of one length, with their labels.

    The words are learnt from the training texts before the first run, and kept in a file.

    Args:
        path: Name on the Hugging Face hub, or a local folder: one that ``save_to_disk`` wrote, or
            one with parquet, CSV or JSON files.
        tokenizer: The file of the words.
        vocab_size: Number of words that the model has embeddings for.
        length: Words of each text: longer ones are cut, shorter ones padded behind.
        batch_size: Texts of one worker's batch.
        train_split: Name of the training split.
        val_split: Name of the validation split.
        text: Name of the column of texts.
        label: Name of the column of labels.
    """

    def __init__(  # noqa: PLR0913  (one keyword for each line of the data set's YAML file)
        self,
        path: str,
        *,
        tokenizer: str,
        vocab_size: int,
        length: int,
        batch_size: int,
        train_split: str = "train",
        val_split: str = "test",
        text: str = "text",
        label: str = "label",
    ) -> None:
        super().__init__()
        self.path = path
        self.tokenizer = Path(tokenizer)
        self.vocab_size = vocab_size
        self.length = length
        self.batch_size = batch_size
        self.splits = {"train": train_split, "val": val_split}
        self.columns = (text, label)

    def prepare_data(self) -> None:
        """Download and learn the words once per host; the other workers of the host wait."""
        rows = {which: self._rows(which) for which in self.splits}
        texts = rows["train"][self.columns[0]]
        learn_tokenizer("words", texts, self.tokenizer, vocab_size=self.vocab_size)

    def setup(self, stage: str) -> None:
        """Turn both splits into numbers."""
        tokenizer = load_tokenizer(self.tokenizer, vocab_size=self.vocab_size)
        tokenizer.enable_truncation(self.length)
        tokenizer.enable_padding(length=self.length, pad_id=PAD)
        self.train = self._tensors("train", tokenizer)
        self.val = self._tensors("val", tokenizer)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled batches of words (N, length) and labels (N,)."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the validation texts in order."""
        return DataLoader(self.val, self.batch_size)

    def _tensors(self, which: str, tokenizer: Tokenizer) -> TensorDataset:
        text, label = self.columns
        rows = self._rows(which)
        words = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(rows[text]))]
        return TensorDataset(torch.tensor(words), torch.tensor(list(rows[label])))

    def _rows(self, which: str) -> datasets.Dataset:
        rows: Any = load_split(self.path, self.splits[which])
        missing = [column for column in self.columns if column not in rows.features]
        if missing:
            raise ValueError(
                f"{self.path!r} has no column {', '.join(map(repr, missing))}; it has "
                f"{', '.join(rows.features)}; name them with data.text=COLUMN data.label=COLUMN"
            )
        return rows
