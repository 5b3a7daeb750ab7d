"""How weights are trained, and what travels of them and of their gradients.

weight     what the module has: forwards and backwards read it, and versions are of it
trained    what the optimizer has in its place; its ``grad`` has sums of gradients
sent       what travels of a version of the weight, or of its gradient, in the weight's dtype
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


class WeightForms:
    """Train weights as they are, and send all of their elements."""

    def trained(self, weight: nn.Parameter) -> nn.Parameter:
        """Return what the optimizer has in the place of a weight."""
        return weight

    def weight(self, trained: nn.Parameter) -> nn.Parameter:
        """Return the weight in whose place the optimizer has a parameter."""
        return trained

    def stand_in(self, weight: nn.Parameter, other: nn.Parameter) -> nn.Parameter:
        """Let a parameter be an older version of a weight, whose gradients are the weight's."""
        return other

    def sends_all(self, weight: nn.Parameter) -> bool:
        """Say whether all elements of a weight travel, in its own shape."""
        return True

    def compress(self, weight: nn.Parameter, values: Tensor) -> Tensor:
        """Return what travels of a tensor of a weight's shape."""
        return values

    def expand_into(self, weight: nn.Parameter, sent: Tensor, values: Tensor) -> None:
        """Write what has come into a tensor of a weight's shape; elsewhere it becomes zero."""
        values.copy_(sent)

    def as_weight(self, weight: nn.Parameter, gradient: Tensor) -> Tensor:
        """Return a gradient of what is trained in a weight's shape; it is zero elsewhere."""
        return gradient

    def leave(self, mine: Sequence[nn.Parameter]) -> None:
        """Give up what is kept of parameters that other workers update.

        Args:
            mine: what the optimizer updates on this worker, or may update later.
        """

    @contextmanager
    def updating(
        self, trained: Sequence[nn.Parameter], *, follows: bool = False
    ) -> Iterator[None]:
        """Let the body update, from the gradients in ``grad``; weights have it behind.

        Args:
            trained: what is updated.
            follows: whether what others have written into weights is taken over.
        """
        yield


ALL = WeightForms()  # that are trained and sent as they are
