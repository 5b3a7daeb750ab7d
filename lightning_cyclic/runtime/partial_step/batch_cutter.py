"""Cut the batches of a replica: as their tensors say together, or as the user's hook does.

    batch, num_microbatches   ->   [MicroBatch(part, size), ...]

How a batch is cut is told once for batches of one make, where that is not plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.values.reading import Mark, Reading, has_tensor, names, read
from lightning_cyclic.runtime.values.split import MicroBatch, read_to_cut, split

SplitBatch = Callable[[Any, int], Any]  # (batch, number of micro-batches) -> parts
_MOST_MAKES = 16  # of batches, of which it is told how they are cut


@final
class BatchCutter:
    """Cut batches into micro-batches.

    Args:
        num_microbatches: how many micro-batches there are, if there are as many samples.
        split_batch: the user's hook. [none: cut as the tensors say]
        say: tells the user what is cut. [nobody]
        may_leave: run a batch without tensors as one micro-batch, which is said once.
    """

    def __init__(
        self,
        num_microbatches: int,
        split_batch: SplitBatch | None = None,
        say: Callable[[str], None] = lambda text: None,
        *,
        may_leave: bool = False,
    ) -> None:
        self._num_micro = num_microbatches
        self._split_batch = split_batch
        self._say = say
        self._may_leave = may_leave
        self._makes: dict[Mark | None, str] = {}  # of batches so far: how they are cut

    def cut(self, batch: Any) -> list[MicroBatch]:
        """Cut a batch.

        Raises:
            StepError: for a batch whose tensors do not say how, or a hook that returns no parts.
        """
        num = self._num_micro
        if num > 1 and self._split_batch is not None:
            told = f"split_batch cuts batches into {num} micro-batches"
            self._tell(None, f"{told}, in the place of lightning_cyclic", is_plain=True)
            return self._by_hook(self._split_batch, batch)
        if num > 1 and self._may_leave and not has_tensor(batch):
            self._tell(
                None,
                f"A batch of type {type(batch).__name__} holds no tensor with a dim, so that it "
                f"is not cut into {num} micro-batches: the step runs once, on all of it.",
            )
            num = 1
        if num == 1:
            return split(batch, 1)
        reading = self._as_before(read_to_cut(batch, num))
        if reading.mark not in self._makes and len(self._makes) < _MOST_MAKES:
            cut, whole = names(batch, reading)
            told = f"cut: {', '.join(cut)}" + (f"; whole: {', '.join(whole)}" if whole else "")
            self._tell(
                reading.mark,
                f"lightning_cyclic cuts batches into {num} micro-batches: {told}",
                is_plain=not whole and "items" not in _kinds(reading.mark),
            )
        return split(batch, num, reading)

    def _as_before(self, reading: Reading) -> Reading:
        """Keep whole what was whole, if it happens to have as many rows as there are samples."""
        for make in self._makes:
            if make is not None and _may_be(reading.mark, make):
                return reading._replace(mark=make)
        return reading

    def report(self) -> str | None:
        """Return how batches have been cut; None before any has been."""
        return "\n".join(self._makes.values()) or None

    def _tell(self, make: Mark | None, text: str, *, is_plain: bool = False) -> None:
        if make not in self._makes:
            self._makes[make] = text
            if not is_plain:
                self._say(text)

    def _by_hook(self, split_batch: SplitBatch, batch: Any) -> list[MicroBatch]:
        parts = split_batch(batch, self._num_micro)
        if not isinstance(parts, list) or not 1 <= len(parts) <= self._num_micro:
            found = f"{len(parts)} parts" if isinstance(parts, list) else type(parts).__name__
            raise StepError(
                f"split_batch returned {found} for {self._num_micro} micro-batches; allowed: a "
                f"list of {self._num_micro} batches, fewer where a batch has fewer samples; "
                "return [part, ...] or [(part, size), ...]"
            )
        if all(map(_is_sized, parts)):
            return [MicroBatch(part, size) for part, size in parts]
        return self._sized(batch, parts)

    def _sized(self, batch: Any, parts: list[Any]) -> list[MicroBatch]:
        """Count the samples of parts as those of any batch, if they add up to those of all."""
        try:
            sizes, total = [read(part).size for part in parts], read(batch).size
            problem = f"they have {sizes} samples by their tensors, and the batch {total}"
        except StepError as error:
            sizes, total, problem = [], 1, str(error).partition("; allowed")[0]
        if sum(sizes) != total:
            raise StepError(
                f"split_batch returned parts whose numbers of samples are not clear: {problem}; "
                "allowed: parts whose tensors agree and add up, or pairs of a part and its number "
                "of samples, an int of at least 1; return [(part, size), ...]"
            )
        return list(map(MicroBatch, parts, sizes))


def _is_sized(part: Any) -> bool:
    return type(part) is tuple and len(part) == 2 and type(part[1]) is int and part[1] > 0


def _may_be(mark: Mark, make: Mark) -> bool:
    is_so = mark.how == make.how or (mark.how, make.how) == ("rows", "whole")
    alike = is_so and len(mark.parts) == len(make.parts)
    return alike and all(map(_may_be, mark.parts, make.parts))


def _kinds(mark: Mark) -> set[str]:
    return {mark.how}.union(*map(_kinds, mark.parts))
