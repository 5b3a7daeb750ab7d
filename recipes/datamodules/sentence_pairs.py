"""WMT-16, Multi30k and their like through Hugging Face `datasets`: sentences, translated."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, final

import datasets
import lightning as L
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from recipes.datamodules.labelled_images import load_split
from recipes.datamodules.tokens import END, PAD, learn_tokenizer, load_tokenizer

Batch = tuple[Tensor, Tensor]
_PAIRS_AT_ONCE = 1000


class Encode(NamedTuple):
    """Turn sentences of both languages into numbers.

    `datasets` keeps what this gives, under a name made of these fields.

    Args:
        tokenizer: The tokenizer's file.
        checksum: Of that file: another tokenizer at the same place is another name.
        languages: Source and target.
    """

    tokenizer: str
    checksum: int
    languages: tuple[str, str]

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        """Map columns of sentences to ``source`` and ``target``, from BEGIN to END."""
        tokenizer = _open(self.tokenizer, self.checksum)
        sides = zip(("source", "target"), self.languages, strict=True)
        return {
            side: [encoded.ids for encoded in tokenizer.encode_batch(_column(rows, language))]
            for side, language in sides
        }


@final
class SentencePairs(L.LightningDataModule):
    """Serve pairs of sentences as pieces of words, one vocabulary for both languages.

    The pieces are learnt from the training sentences before the first run, and kept in a file.

    Args:
        path: Name on the Hugging Face hub, or a local folder: one that ``save_to_disk`` wrote, or
            one with parquet, CSV or JSON files. Columns are the two languages, or one column
            ``translation`` holds both.
        name: The part of the data set, where the hub's has several, such as "de-en".
        source: Language to translate from.
        target: Language to translate to.
        tokenizer: The file of the pieces.
        vocab_size: Number of pieces that the model has embeddings for.
        max_length: Pieces of the longest sentence that is trained on, with BEGIN and END.
        batch_size: Pairs of one worker's batch.
        splits: Names of the splits for training, validation and test.
    """

    def __init__(  # noqa: PLR0913  (one keyword for each line of the data set's YAML file)
        self,
        path: str,
        *,
        source: str,
        target: str,
        tokenizer: str,
        vocab_size: int,
        max_length: int,
        batch_size: int,
        name: str | None = None,
        splits: tuple[str, str, str] = ("train", "validation", "test"),
    ) -> None:
        super().__init__()
        self.path = path
        self.name = name
        self.languages = (source, target)
        self.tokenizer_file = Path(tokenizer)
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.batch_size = batch_size
        self.splits = dict(zip(("train", "val", "test"), splits, strict=True))

    def prepare_data(self) -> None:
        """Download, learn the pieces, encode: once per host; the host's other workers wait."""
        sentences = self._sentences(self._rows("train"))
        learn_tokenizer("pieces", sentences, self.tokenizer_file, vocab_size=self.vocab_size)
        for which in self.splits:
            self._encoded(which)

    def setup(self, stage: str) -> None:
        """Open what prepare_data has encoded."""
        self.tokenizer = load_tokenizer(self.tokenizer_file, vocab_size=self.vocab_size)
        self.train, self.val, self.test = map(self._encoded, self.splits)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return shuffled batches of pairs."""
        return self._loader(self.train, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the validation pairs in order."""
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return the test pairs in order."""
        return self._loader(self.test)

    def decode(self, words: Tensor) -> list[str]:
        """Turn rows of pieces (N, T) into sentences, each up to its END."""
        rows = (row[: row.index(END)] if END in row else row for row in words.tolist())
        return self.tokenizer.decode_batch(list(rows))

    def _loader(self, pairs: datasets.Dataset, **how: bool) -> DataLoader[Batch]:
        return DataLoader(pairs, self.batch_size, collate_fn=collate, **how)

    def _encoded(self, which: str) -> datasets.Dataset:
        rows = self._rows(which)
        load_tokenizer(self.tokenizer_file, vocab_size=self.vocab_size)  # or say what is wrong
        checksum = zlib.crc32(self.tokenizer_file.read_bytes())
        encode = Encode(str(self.tokenizer_file), checksum, self.languages)
        pairs = rows.map(encode, batched=True, remove_columns=rows.column_names)
        return pairs.filter(Short(self.max_length)) if which == "train" else pairs

    def _rows(self, which: str) -> datasets.Dataset:
        rows = load_split(self.path, self.splits[which], self.name)
        known = rows.features
        nested = known.get("translation")
        languages = list(getattr(nested, "languages", nested or known))
        missing = [language for language in self.languages if language not in languages]
        if missing:
            raise ValueError(
                f"{self.path!r} has no sentences in {', '.join(map(repr, missing))}, only in "
                f"{', '.join(languages)}; set data.source=LANGUAGE data.target=LANGUAGE"
            )
        return rows

    def _sentences(self, rows: datasets.Dataset) -> Iterator[str]:
        for some in rows.iter(_PAIRS_AT_ONCE):
            for language in self.languages:
                yield from _column(some, language)


class Short(NamedTuple):
    """Keep pairs of which no sentence is longer than ``max_length`` pieces."""

    max_length: int

    def __call__(self, pair: dict[str, list[int]]) -> bool:
        """Say whether a pair is kept."""
        return max(len(pair["source"]), len(pair["target"])) <= self.max_length


def collate(pairs: list[dict[str, list[int]]]) -> Batch:
    """Make tensors (N, S) and (N, T) of pairs, padded behind to the longest of the batch."""
    source, target = (
        pad_sequence(
            [torch.tensor(pair[side]) for pair in pairs], batch_first=True, padding_value=PAD
        )
        for side in ("source", "target")
    )
    return source, target


def _column(rows: dict[str, list[Any]], language: str) -> list[str]:
    if "translation" in rows:
        return [pair[language] for pair in rows["translation"]]
    return rows[language]


@lru_cache(maxsize=1)
def _open(path: str, checksum: int) -> Tokenizer:
    return Tokenizer.from_file(path)
