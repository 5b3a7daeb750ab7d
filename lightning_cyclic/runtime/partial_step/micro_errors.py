"""Errors of the user's step, with a note that says in which micro-batch they came."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_cyclic.errors import PeerError, WaitTimeoutError

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
    """Run the user's step on a micro-batch."""
    with noting(where):
        return call(batch)
