"""What Lightning gives a user's step, as the batch, which is cut, and the rest, which is not.

training_step(batch, batch_idx)       the batch comes first
training_step(dataloader_iter)        it is taken from the loader before the step begins; each
run of the step takes its part of it from an iterator
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, final

from typing_extensions import override

from lightning_cyclic.errors import StepError


@final
class StepArguments:
    """Hold the arguments of one call of a step by Lightning.

    Args:
        kwargs: behind them, by name, in the order of the step's own.

    Raises:
        StopIteration: the loader of a step that takes ``dataloader_iter`` has no more batches.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.batch, *self._rest = (*args, *kwargs.values())
        self._loader: Iterator[Any] | None = None
        if hasattr(self.batch, "data_fetcher"):  # Lightning's iterator over a loader
            self._loader = self.batch
            self.batch, *self._rest = next(self._loader)

    def kind(self, step: str) -> str:
        number = self._rest[1] if len(self._rest) > 1 else 0
        return f"{step} on dataloader {number}" if number else step

    def around(self, batch: Any) -> tuple[Any, ...]:
        """Return what a run of the step on this batch, or this part of it, is given."""
        if self._loader is None:
            return (batch, *self._rest)
        return (OneBatch(self._loader, (batch, *self._rest)),)


@final
class OneBatch(Iterator[Any]):
    """Give a run of a step its batch, as often as a batch of the loader was taken: once."""

    def __init__(self, loader: Iterator[Any], item: tuple[Any, ...]) -> None:
        self._loader = loader
        self._item: tuple[Any, ...] | None = item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @override
    def __iter__(self) -> Self:
        return self

    @override
    def __next__(self) -> Any:
        if self._item is None:
            raise StepError(
                "a step takes a second batch from dataloader_iter; allowed: one, which is cut "
                "into micro-batches; use training_step(self, batch, batch_idx) and a loader that "
                "joins batches, or let a step take one"
            )
        item, self._item = self._item, None
        return item
