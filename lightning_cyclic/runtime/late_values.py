"""Late values: numbers of a step that the host looks at without waiting for a GPU.

    of the host    put(x) -> look
    of a GPU       put(x) -> copy to pinned memory ...           put(y) -> look at x, copy y ...

By the time of the next step the copy has long been made. All workers see a value equally late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from lightning_cyclic.runtime.transport.streams import (
    AbstractCopies,
    Event,
    HostCopies,
    StreamCopies,
)

Look = Callable[[float], None]


class _Copy(NamedTuple):
    host: Tensor
    made: Event | None
    look: Look


@final
class LateValues:
    """Look at one number per step: at once where the host has it, else one step later.

    Args:
        copies_for: device -> what copies from there to the host.
    """

    def __init__(self, copies_for: Callable[[torch.device], AbstractCopies] | None = None) -> None:
        self._copies_for = copies_for or _copies_for
        self._copies: dict[torch.device, AbstractCopies] = {}
        self._waiting: _Copy | None = None

    def put(self, x: Tensor, look: Look) -> None:
        """Have a number looked at, and look at the one before.

        Args:
            x: of one element.
            look: called with its value; may raise.
        """
        self.settle()
        copies = self._copies.get(x.device)
        if copies is None:
            copies = self._copies[x.device] = self._copies_for(x.device)
        self._waiting = _Copy(*copies.to_host(x.detach()), look)
        if self._waiting.made is None:
            self.settle()

    def settle(self) -> None:
        """Look at the number that has not been looked at; wait for it, if that must be."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            if waiting.made is not None:
                waiting.made.synchronize()
            waiting.look(waiting.host.item())


def _copies_for(device: torch.device) -> AbstractCopies:
    return StreamCopies(device) if device.type == "cuda" else HostCopies()
