"""The interface of a codec: what is sent of one gradient, and what its owner makes of that.

    gradient + what was left before  ->  sent  ->  decoded
                                     ->  left, for the next step

What is sent of a tensor has the same shapes and dtypes in every step, so that messages are laid
out once. What a codec leaves out is not lost if it keeps it in its state, and adds it to the next
gradient (error feedback).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = MutableMapping[str, Tensor]
"""What a codec keeps of one tensor of one worker, by names that it chooses; at first nothing."""


class AbstractCodec(ABC):
    """Make gradients smaller that workers send to the owners of their stages.

    Each worker encodes its own gradient, once a step; the owner decodes those of all, its own
    among them, and adds them in the order of micro-batches. Derive from it for a codec of your
    own: what it gives must follow from what it is given alone, or runs do not repeat.

    As ``compress={"activations": ...}`` it encodes activations and their gradients, too, where
    they cross from stage to stage: each by itself, with a state that is empty each time.

    Example:
        >>> class Signs(AbstractCodec):
        ...     def sent(self, like):
        ...         return [like.new_empty(like.numel(), dtype=torch.int8)]
        ...     def encode(self, gradient, state):
        ...         return [gradient.reshape(-1).sign().to(torch.int8)]
        ...     def decode(self, sent, like):
        ...         return sent[0].to(torch.float32).reshape(like.shape)
        >>> Signs().num_bytes(1000)
        1000
    """

    least_elements: ClassVar[int] = 256
    """A tensor with fewer is sent as it is: its message is hardly smaller than its head."""
    has_memory: ClassVar[bool] = False
    """Whether it writes to its state, and so what it sends depends on the steps before."""
    names: Collection[str] | None = None
    """Of the parameters that it encodes; None: of all that it takes."""

    @abstractmethod
    def sent(self, like: Tensor) -> Sequence[Tensor]:
        """Return what is sent of a tensor, without values.

        Args:
            like: the tensor, on the meta device.

        Returns:
            Tensors on the meta device. Their shapes and dtypes depend on nothing else.
        """

    @abstractmethod
    def encode(self, gradient: Tensor, state: State) -> Sequence[Tensor]:
        """Return what is sent of a gradient, in the shapes and dtypes of :meth:`sent`.

        Where an element of the gradient is not finite, what is decoded must not be finite, so
        that whoever looks for that still sees it.

        Args:
            gradient: of one parameter; it is not to be changed.
            state: of this parameter on this worker. Put new tensors into it; those that are in
                it may be in a checkpoint that is being written.
        """

    @abstractmethod
    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the gradient that was encoded, or what is left of it.

        Args:
            sent: as :meth:`encode` gave it; its memory is used again.
            like: the tensor, on the meta device.
        """

    def takes(self, like: Tensor) -> bool:
        """Say whether it encodes such a tensor; others are sent as they are."""
        return like.is_floating_point() and like.numel() >= self.least_elements

    def begin(self, state_of: Callable[[str], State]) -> None:  # noqa: B027  (most need not know)
        """Be told, before a worker's backward, where the state of its parameters is."""

    def num_bytes(self, num_elements: int) -> int:
        """Return the bytes that are sent of a tensor of float32, for plans and simulations."""
        like = torch.empty(num_elements, device="meta")
        sent = self.sent(like) if self.takes(like) else [like]
        return sum(x.numel() * x.element_size() for x in sent)

    def __repr__(self) -> str:
        """Return its name and what it was made with, by which ranks see that theirs are alike."""
        given = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__qualname__}({given})"


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which codecs compute: float32, or a wider one."""
    return torch.promote_types(dtype, torch.float32)


def unless_broken(gradient: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return new values of a state; the old ones behind a gradient that is not finite.

    Such a step is skipped, or ends training; what it leaves would break all that follow.
    """
    return torch.where(gradient.isfinite().all(), new, old)
