"""Micro-batches: how a replica's batch is cut, what each part counts, and where an error came.

    batch, num_microbatches   ->   [MicroBatch(part, size), ...]

A batch is cut as its tensors say together, or as the user's hook does; how is told once for
batches of one make, where that is not plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from lightning_cyclic.errors import PeerError, StepError, WaitTimeoutError
from lightning_cyclic.runtime.values.split import (
    Mark,
    MicroBatch,
    Reading,
    has_tensor,
    names,
    read,
    read_to_cut,
    split,
)

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


_TOO_FEW = "Expected more than 1 value per channel"  # torch's words, of BatchNorm


def words_for(i: int, sizes: Sequence[int]) -> str:
    """Name a micro-batch.

    Example:
        >>> words_for(1, [2, 2, 2, 2])
        'in micro-batch 2 of 4 (2 of 8 samples)'
    """
    return f"in micro-batch {i + 1} of {len(sizes)} ({sizes[i]} of {sum(sizes)} samples)"


@contextmanager
def noting(where: str) -> Iterator[None]:
    """Note on what the user's code raises where it was; what other ranks caused has its own."""
    try:
        yield
    except (PeerError, WaitTimeoutError):
        raise
    except Exception as error:
        if where:
            error.add_note(where)
            if str(error).startswith(_TOO_FEW):
                error.add_note(
                    "BatchNorm sees one micro-batch at a time, and this one is too small for it: "
                    "use DataLoader(drop_last=True), larger batches, or a smaller num_microbatches"
                )
        raise


def noted(where: str, call: Callable[[Any], Any], batch: Any) -> Any:
    with noting(where):
        return call(batch)


_LAYERS = (nn.RNNBase, nn.MultiheadAttention)  # those of nn.Transformer are made of these


def refusing_time_major(
    module: nn.Module, size: int, call: Callable[[Any], Any], batch: Any
) -> Any:
    """Run the user's step on the first of several micro-batches.

    Raises:
        StepError: if a layer without batch_first has as many time steps as there are samples, and
            another number of samples.
    """
    handles = [
        layer.register_forward_pre_hook(partial(_check, path, size), with_kwargs=True)
        for path, layer in module.named_modules()
        if isinstance(layer, _LAYERS) and not layer.batch_first
    ]
    try:
        return call(batch)
    finally:
        for handle in handles:
            handle.remove()


def _check(
    path: str, size: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    x = next((x for x in [*args, *kwargs.values()] if isinstance(x, Tensor)), None)
    if x is None or x.dim() != 3 or x.shape[0] != size or x.shape[1] == size:
        return
    raise StepError(
        f"{path}, {type(layer).__name__} without batch_first, was given {list(x.shape)} for a "
        f"micro-batch of {size} samples, as if these were time steps; allowed: batches that are "
        "cut along their samples; make the layer with batch_first=True if dim 0 is the batch; if "
        "dim 0 is time, cut dim 1 in the module's or datamodule's split_batch(batch, "
        "num_microbatches)"
    )


def shares_of(sizes: Sequence[int], parts: int) -> list[Callable[[Tensor], Tensor]]:
    """Return the share of each micro-batch: by samples, where their numbers differ."""
    if len(set(sizes)) == 1:  # as Lightning divides while it accumulates
        count = len(sizes) * parts
        return [lambda ones: ones / count] * len(sizes)
    total = sum(sizes) * parts
    return [lambda ones, size=size: ones * (size / total) for size in sizes]  # type: ignore[misc]


def whole_share(ones: Tensor) -> Tensor:
    """Return the share of a batch that is not cut."""
    return ones


@final
class BatchReads:
    """Remember what Python has read of one micro-batch: each value once, for all stages.

    To read a value the host waits for the device. A step asks once; run stage by stage, the code
    before a stage asks again in each: ``mask.any()`` waits in stage 0, and is known in stages 1
    and 2. The same code asks the same of the same batch, so answers are known by their region and
    number; but not of a run that ghosts of another batch have misled.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[str, Any]] = {}

    def read(self, region: int, number: int, name: str, ask: Callable[[], Any]) -> Any:
        """Return the answer to a question, which is asked where it is not known."""
        known = self._found.get((region, number))
        if known is not None and known[0] == name:
            return known[1]
        answer = ask()
        if isinstance(answer, bool | int | float | complex):  # lists and arrays can be changed
            self._found[region, number] = name, answer
        return answer

    def forget(self) -> None:
        self._found.clear()
