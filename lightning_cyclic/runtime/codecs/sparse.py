"""Few elements of a gradient: the largest, or those above a threshold; the others are sent later.

    w    = gradient + left
    sent = values and positions of few elements of w, as many in each step
    left = w without them

So what was sent, and what is left, are the sum of all gradients. In ``left`` an element that was
sent is -0.0, the one number that changes no other, not even the sign of 0.0, when it is added:
what is sent at density 1 has the bits of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.codecs.base import AbstractCodec, State, unless_broken, wide

_INT32_ENDS = 2**31 - 1
_Choose = Callable[[Tensor, int, State], Tensor]


@final
@dataclass(frozen=True)
class TopK(AbstractCodec):
    """Send the largest elements of each gradient, exactly, and add the others to the next one.

    Of activations, ``compress={"activations": TopK(...)}``, it sends the largest of each sample,
    and of their gradients those at the same positions; others are 0.

    Args:
        density: how much of each tensor is sent, above 0 and up to 1.

    Raises:
        ConfigurationError: another density.

    Example:
        >>> TopK(density=0.01).num_bytes(100_000)  # 1000 values, and where they belong
        8000
    """

    density: float

    has_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_density(self, self.density)

    def sent(self, like: Tensor) -> Sequence[Tensor]:
        return _sent(like, self.density)

    def encode(self, gradient: Tensor, state: State) -> Sequence[Tensor]:
        def choose(size: Tensor, most: int) -> Tensor:
            return as_large_as(last_of(size, most), size, most)

        return _encoded(gradient, self.density, state, choose)

    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        return _decoded(sent, like)


@final
@dataclass(frozen=True)
class Dct(AbstractCodec):
    """Send elements of each gradient that exceed a threshold, which is chosen now and then.

    Between choices elements are compared, which is faster than finding the largest. A threshold
    that has become too low would send more than the density, and is chosen anew at once. One that
    has become too high sends fewer, and the rest of the message says nothing.

    Args:
        density: how much of each tensor is sent at most, above 0 and up to 1.
        threshold_every: steps from one choice of the thresholds to the next, at most.

    Raises:
        ConfigurationError: another density, or no steps.

    Source: dynamic communication thresholding, Gupta et al., KDD 2021,
        https://arxiv.org/abs/2010.08899, of data parallelism: owners are its parameter servers.

    Example:
        >>> Dct(density=0.005).num_bytes(200_000)
        8000
    """

    density: float
    threshold_every: int = 1000

    has_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_density(self, self.density)
        every = self.threshold_every
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigurationError(
                f"Dct(threshold_every={every!r}); allowed: whole numbers of steps from 1 on; use "
                "threshold_every=1000"
            )

    def sent(self, like: Tensor) -> Sequence[Tensor]:
        return _sent(like, self.density)

    def encode(self, gradient: Tensor, state: State) -> Sequence[Tensor]:
        age = int(state.get("age", torch.zeros((), dtype=torch.int64)))
        state["age"] = torch.tensor(age + 1)

        def choose(size: Tensor, most: int) -> Tensor:
            least = torch.finfo(size.dtype).smallest_normal
            before = state.get("threshold", size.new_full((), least))
            chosen = size >= before
            is_due = age % self.threshold_every == 0
            # where the host runs ahead of a device, it waits here
            if not is_due and int(chosen.sum()) <= most:
                return chosen
            # of a gradient that is 0 none is sent, and not all of it
            threshold = last_of(size, most).clamp(min=least)
            state["threshold"] = unless_broken(gradient, threshold, before)
            return as_large_as(threshold, size, most)

        return _encoded(gradient, self.density, state, choose)

    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        return _decoded(sent, like)


def _check_density(codec: AbstractCodec, density: object) -> None:
    is_number = isinstance(density, int | float) and not isinstance(density, bool)
    if not (is_number and 0 < density <= 1):  # type: ignore[operator]
        raise ConfigurationError(
            f"{type(codec).__name__}(density={density!r}); allowed: above 0, and up to 1, which "
            "sends all; use density=0.01"
        )


def _most(like: Tensor, density: float) -> int:
    return math.ceil(density * like.numel())


def _sent(like: Tensor, density: float) -> list[Tensor]:
    most, n = _most(like, density), like.numel()
    places = torch.int32 if n <= _INT32_ENDS else torch.int64
    return [
        torch.empty(most, dtype=wide(like.dtype), device="meta"),
        torch.empty(most, dtype=places, device="meta"),
    ]


def _encoded(
    gradient: Tensor, density: float, state: State, choose: Callable[[Tensor, int], Tensor]
) -> list[Tensor]:
    """Return values and positions of chosen elements, and keep the others.

    Args:
        choose: sizes of elements, how many there may be at most -> which of them are sent.
    """
    given = gradient.reshape(-1).to(wide(gradient.dtype))
    left = state.get("left", given.new_full((), -0.0).expand_as(given))
    w = given + left
    most = _most(gradient, density)
    if most == w.numel():
        chosen = torch.ones_like(w, dtype=torch.bool)
    else:  # what is not finite is sent first
        chosen = choose(w.abs().nan_to_num_(nan=torch.inf), most)
    values, places = _sent(gradient, density)
    found = chosen.nonzero().squeeze(1)
    # behind the last element, where nobody looks
    positions = torch.full(places.shape, w.numel(), dtype=places.dtype, device=w.device)
    positions[: len(found)] = found
    entries = torch.zeros(values.shape, dtype=w.dtype, device=w.device)
    entries[: len(found)] = w[found]
    state["left"] = unless_broken(gradient, w.masked_fill(chosen, -0.0), left)
    return [entries, positions]


def _decoded(sent: Sequence[Tensor], like: Tensor) -> Tensor:
    values, positions = sent
    room = values.new_zeros(like.numel() + 1)
    return room.scatter_(0, positions.to(torch.int64), values)[:-1].view(like.shape)


def last_of(size: Tensor, most: int) -> Tensor:
    """Return the smallest of so many largest, of each row."""
    return size.topk(most).values[..., -1]


def as_large_as(last: Tensor, size: Tensor, most: int) -> Tensor:
    """Say which are as large as the last of so many; of equal ones the first, on every device."""
    last = last.unsqueeze(-1)
    above, ties = size > last, size == last
    return above | (ties & (ties.cumsum(-1) <= most - above.sum(-1, keepdim=True)))
