"""Reductions that training_step asks for: held back until its forward is over.

``self.log(..., on_step=True, sync_dist=True)`` reduces over all workers in the middle of the
forward. Worker 0 would wait there for worker 1, which waits for the BatchNorm statistics that
worker 0 hands on behind it. So the tensor is given back at once and takes the reduced value, in
place, when the forward is over: before any callback or logger reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor

Reduce = Callable[[Tensor, Any, Any], Tensor]


@final
class HeldReductions:
    """Hold reductions back, and run them in the order in which they were asked for."""

    def __init__(self) -> None:
        self.holding = False
        self._held: list[tuple[Tensor, Any, Any]] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold back what the body asks for."""
        self.holding = True
        try:
            yield
        finally:
            self.holding = False

    def hold(self, tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
        """Return the tensor, which takes the reduced value later."""
        self._held.append((tensor, group, reduce_op))
        return tensor

    def run(self, reduce: Reduce) -> None:
        """Reduce everything that is held."""
        held, self._held = self._held, []
        for tensor, group, reduce_op in held:
            reduced = reduce(tensor, group, reduce_op)
            if reduced is not tensor:
                tensor.copy_(reduced)
