"""OpenWebText, WikiText and their like through Hugging Face `datasets`: windows of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

import datasets
import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from recipes.datamodules.labelled_images import load_split

BYTES = "bytes"
_LAST_BYTE = 255


class Cut(NamedTuple):
    """Join texts, an end-of-text token behind each, and cut them into windows.

    `datasets` keeps what this gives, under a name made of these fields.

    Args:
        tokenizer: ``"bytes"``, or the name or folder of a tokenizer of `transformers`.
        size: Tokens of a window.
        column: Name of the column of texts.
    """

    tokenizer: str
    size: int
    column: str

    def __call__(self, rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        """Map some texts to ``tokens``, windows of ``size``; what is left over is dropped.

        Neighbours share one token: the target of one window, the first input of the next.
        """
        encode, end, _ = open_tokenizer(self.tokenizer)
        tokens = list(chain.from_iterable([*encode(text), end] for text in rows[self.column]))
        starts = range(0, len(tokens) - self.size + 1, self.size - 1)
        return {"tokens": [tokens[start : start + self.size] for start in starts]}


@final
class TextWindows(L.LightningDataModule):
    """Serve windows of ``block_size + 1`` tokens.

    Args:
        path: Name on the Hugging Face hub, or a local folder: one that ``save_to_disk`` wrote, one
            with parquet or JSON files, or one of text files whose names begin with the split.
        block_size: Tokens that the model sees at once.
        batch_size: Windows of one worker's batch.
        val_batch_size: The same for validation, where pipelines do not cut batches.
        tokenizer: ``"bytes"``, or a tokenizer of `transformers` that is on this machine: its
            folder, or a name that has been downloaded before.
        vocab_size: Number of tokens that the model has embeddings for.
        train_split: Name of the training split, or a slice of it: ``train[1%:]``.
        val_split: The same for validation.
        text: Name of the column of texts.
    """

    def __init__(  # noqa: PLR0913  (one keyword for each line of the data set's YAML file)
        self,
        path: str,
        *,
        block_size: int,
        batch_size: int,
        val_batch_size: int,
        tokenizer: str,
        vocab_size: int,
        train_split: str = "train",
        val_split: str = "validation",
        text: str = "text",
    ) -> None:
        super().__init__()
        self.path = path
        self.batch_sizes = {"train": batch_size, "val": val_batch_size}
        self.vocab_size = vocab_size
        self.cut = Cut(tokenizer, block_size + 1, text)
        self.splits = {"train": train_split, "val": val_split}

    def prepare_data(self) -> None:
        """Download and cut once per host; the other workers of the host wait."""
        for which in self.splits:
            self._windows(which)

    def setup(self, stage: str) -> None:
        """Open what prepare_data has cut."""
        self.train = self._windows("train")
        self.val = self._windows("val")

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return shuffled batches of windows (N, block_size + 1)."""
        size = self.batch_sizes["train"]
        return DataLoader(self.train, size, collate_fn=collate, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation windows in order."""
        return DataLoader(self.val, self.batch_sizes["val"], collate_fn=collate)

    def _windows(self, which: str) -> datasets.Dataset:
        _, _, count = open_tokenizer(self.cut.tokenizer)
        if count > self.vocab_size:
            raise ValueError(
                f"the tokenizer {self.cut.tokenizer!r} has {count} tokens, the model "
                f"{self.vocab_size}; set task.vocab_size={count}"
            )
        rows = load_texts(self.path, self.splits[which])
        if self.cut.column not in rows.features:
            raise ValueError(
                f"{self.path!r} has no column {self.cut.column!r}; it has "
                f"{', '.join(rows.features)}; name the texts with data.text=COLUMN"
            )
        return rows.map(self.cut, batched=True, remove_columns=rows.column_names)


def load_texts(path: str, split: str) -> datasets.Dataset:
    """Open one split of a data set on the hub, in a local folder, or of text files."""
    folder = Path(path).expanduser()
    if any(folder.glob("*.txt")):
        return datasets.load_dataset(
            "text", data_dir=str(folder), sample_by="document", split=split
        )
    return load_split(path, split)


def collate(windows: list[dict[str, list[int]]]) -> Tensor:
    """Make a tensor (N, block_size + 1) of windows."""
    return torch.tensor([window["tokens"] for window in windows])


Encode = Callable[[str], list[int]]


@lru_cache(maxsize=1)
def open_tokenizer(name: str) -> tuple[Encode, int, int]:
    """Return what turns text into tokens, the token behind each text, and how many there are.

    Raises:
        ValueError: If the tokenizer is not on this machine; nothing is downloaded.
    """
    if name == BYTES:
        return lambda text: list(text.encode()), 0, _LAST_BYTE + 1
    folder = Path(name).expanduser()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else name, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the tokenizer {name!r} is neither a folder nor among the files downloaded from the "
            f"Hugging Face hub; allowed: {BYTES}, a folder, a name that has been downloaded; "
            f"run `hf download {name} tokenizer.json tokenizer_config.json config.json` once, or "
            "set data.tokenizer=bytes task.vocab_size=256"
        ) from error

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return encode, tokenizer.eos_token_id, len(tokenizer)
