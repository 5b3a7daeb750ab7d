"""Words: what workers tell each other with sums and parameters, without any collective."""

from __future__ import annotations

import enum
from typing import final

from lightning_cyclic.errors import StepError


class Word(enum.IntFlag):
    """Say something about a step; a sum carries what any worker said."""

    NONE = 0
    STOP = 1  # somebody asked to end training (SIGTERM)
    ENDS = 2  # somebody had the last batch of the epoch
    GOES_ON = 4  # somebody has more batches
    OVERFLOW = 8  # gradients overflowed, and the version is the one before (its owner says so)


@final
class Words:
    """Say what this worker has to say about a step, and keep what was heard of all."""

    def __init__(self) -> None:
        self.ends = False  # whether this worker's batch is its last of the epoch
        self.stop_wanted = False
        self._stop_version: int | None = None

    def said(self) -> Word:
        """Return the word that goes with this worker's gradients."""
        word = Word.ENDS if self.ends else Word.GOES_ON
        return word | Word.STOP if self.stop_wanted else word

    def hear(self, v: int, word: Word) -> None:
        """Note what all workers said of the step that made version ``v``.

        Raises:
            StepError: some workers had their last batch, others had not.
        """
        if word & Word.STOP and self._stop_version is None:
            self._stop_version = v
        if word & Word.ENDS and word & Word.GOES_ON:
            raise StepError(
                f"some workers had their last batch in step {v - 1}, others have more; allowed: "
                "the same number of batches on every worker; drop the surplus in the "
                "IterableDataset, or set Trainer(limit_train_batches=...)"
            )

    def stops(self, t: int) -> bool:
        """Say whether training ends before step ``t``; the same on every worker."""
        # a version made with a stop byte has been read by every worker two steps later
        return self._stop_version is not None and t >= self._stop_version + 2
