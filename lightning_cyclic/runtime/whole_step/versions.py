"""The versions of one stage's parameters that a worker keeps, and which one the module shows.

A version lives in a flat buffer. Showing a version points every parameter's ``data`` at it:
nothing is copied, and autograd graphs that still hold the old storage keep it alive. Buffers of
versions that no later forward reads are used again for the next one to arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from lightning_cyclic.runtime.whole_step.flat import FlatBuffer, FlatLayout


@final
class VersionStore:
    """Keep versions of one stage.

    Args:
        parameters: the stage's parameters; their present values become version ``v``.
        v: the version that the parameters hold now.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], v: int) -> None:
        self.parameters = parameters
        self.layout = FlatLayout(parameters)
        self._free: list[FlatBuffer] = []
        self._versions: dict[int, FlatBuffer] = {v: self.layout.new()}
        self._versions[v].write([p.data for p in parameters])
        self._shown: FlatBuffer | None = None
        self.depth = 1
        self.show(v)

    @property
    def newest(self) -> int:
        """Return the newest version kept."""
        return max(self._versions)

    def __contains__(self, v: int) -> bool:
        return v in self._versions

    def __getitem__(self, v: int) -> FlatBuffer:
        return self._versions[v]

    def show(self, v: int) -> FlatBuffer:
        """Point the parameters at version ``v`` and return its buffer."""
        buffer = self._versions[v]
        if buffer is not self._shown:
            for parameter, view in zip(self.parameters, buffer.views, strict=True):
                parameter.data = view
            self._shown = buffer
        return buffer

    @property
    def has_free(self) -> bool:
        """Say whether a second buffer is free, or has not been needed yet."""
        return bool(self._free) or len(self._versions) < 2

    def release(self) -> None:
        """Give the parameters storage of their own again, with the values that are shown."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
        self._shown = None

    def take_free(self) -> FlatBuffer:
        """Return a buffer that holds no version kept."""
        return self._free.pop() if self._free else self.layout.new()

    def put(self, v: int, buffer: FlatBuffer) -> None:
        """Keep ``buffer`` as version ``v``."""
        self._versions[v] = buffer
        self.depth = max(self.depth, len(self._versions))

    def drop_below(self, v: int) -> None:
        """Forget versions older than ``v``; their buffers are free for the next to arrive."""
        for old in [x for x in self._versions if x < v]:
            self._free.append(self._versions.pop(old))

    def advance_in_place(self) -> int:
        """Rename the newest version to the next one, which an update is about to write."""
        v = self.newest
        self.show(v)
        self.put(v + 1, self._versions.pop(v))
        return v + 1

    def advance_to_copy(self) -> int:
        """Make the next version from a copy of the newest, which a later forward still reads."""
        v = self.newest
        buffer = self.take_free()
        buffer.data.copy_(self._versions[v].data)
        self.put(v + 1, buffer)
        self.show(v + 1)
        return v + 1

    def write(self, v: int, values: Sequence[torch.Tensor]) -> None:
        """Keep a copy of ``values`` as version ``v``."""
        buffer = self.take_free()
        buffer.write(list(values))
        self.put(v, buffer)
