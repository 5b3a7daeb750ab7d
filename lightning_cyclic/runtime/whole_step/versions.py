"""The versions of one stage's parameters that a worker keeps, and which one the module shows.

A version lies in the buffer of a message. Showing a version points every parameter's ``data`` at
it: nothing is copied, and autograd graphs that still hold the old storage keep it alive. Buffers
of versions that no later forward reads are used again for the next one to arrive.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import nn

from lightning_cyclic.runtime.buffers import Buffer, Layout
from lightning_cyclic.runtime.messages import Messages
from lightning_cyclic.runtime.weight_watch import put_data


@final
class VersionStore:
    """Keep versions of one stage.

    Args:
        parameters: the stage's parameters; their present values become version ``v``.
        v: the version that the parameters hold now.
        messages: whose buffers versions lie in.
        keeps: whether their memory waits for the next version, or goes.
        is_here: whether the parameters have values; else there is no version yet.
        changing: is entered while the parameters change, for who watches them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        v: int,
        messages: Messages,
        *,
        keeps: bool = True,
        is_here: bool = True,
        changing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.parameters = parameters
        self.changing = changing
        # what has no memory yet is to come as its owner has it: contiguous
        self._laid = (
            parameters
            if is_here
            else [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parameters]
        )
        self.layout: Layout = messages.layout(self._laid, keeps=keeps)
        self.words: dict[int, int] = {}  # what all workers said in the step that made each
        self._messages = messages
        self._changing = threading.Lock()  # versions arrive on a lane, too
        self._versions: dict[int, Buffer] = {}
        self._held: Counter[int] = Counter()  # by how many that lanes are about to send
        self._needed = v  # the oldest version that is read here
        self._shown: Buffer | None = None  # not where it holds another version since
        self._has_shown = False
        self.depth = 1
        if is_here:
            self.put(v, self.layout.new())
            self._versions[v].write([p.data for p in parameters])
            self.show(v)

    def layout_of(self, some: Collection[nn.Parameter]) -> Layout:
        """Return how messages lie that have something for each of some of the parameters."""
        if len(some) == len(self.parameters):
            return self.layout
        return self._messages.layout(self.laid(some), keeps=self.layout.keeps)

    def laid(self, some: Collection[nn.Parameter]) -> list[torch.Tensor]:
        """Return tensors that lie as some of the parameters do, when they are here."""
        wanted = set(map(id, some))
        each = zip(self.parameters, self._laid, strict=True)
        return [x for p, x in each if id(p) in wanted]

    @property
    def newest(self) -> int:
        with self._changing:
            return max(self._versions)

    @property
    def versions(self) -> list[int]:
        with self._changing:
            return list(self._versions)

    def __contains__(self, v: int) -> bool:
        return v in self._versions

    def __getitem__(self, v: int) -> Buffer:
        return self._versions[v]

    def show(self, v: int) -> None:
        buffer = self._versions[v]
        if buffer is not self._shown:
            with self.changing():
                for parameter, view in zip(self.parameters, buffer.tensors, strict=True):
                    put_data(parameter, view)
            self._shown, self._has_shown = buffer, True

    def show_other(self, values: Sequence[torch.Tensor]) -> None:
        """Show what is no version, until one is shown."""
        with self.changing():
            for parameter, value in zip(self.parameters, values, strict=True):
                put_data(parameter, value)
        self._shown, self._has_shown = None, True

    def release(self) -> None:
        """Give the parameters storage of their own again, with the values that are shown."""
        if self._versions:
            self.drop_below(self.newest)  # before there are copies
        for parameter in self.parameters if self._has_shown else ():
            parameter.data = parameter.data.clone()
        self._shown, self._has_shown = None, False

    def put(self, v: int, buffer: Buffer, word: int = 0) -> None:
        with self._changing:
            self._versions[v] = buffer
            self.words[v] = word
            self.depth = max(self.depth, len(self._versions))

    def drop_below(self, v: int) -> None:
        """Forget versions older than ``v``; their buffers are free for the next to arrive."""
        with self._changing:
            self._needed = v
            for held in [u for u in self._versions if u < v and self._held[u]]:
                self._versions[held].note_use()  # here; lanes are to let them go
            self._drop()

    def leave_behind(self, v: int) -> None:
        """Forget versions older than ``v``, which nobody reads any more, and show none of them."""
        if any(self._versions[u] is self._shown for u in self.versions if u < v):
            self.show(v)
        self.drop_below(v)

    def forget(self, v: int) -> None:
        with self._changing:
            if self._versions[v] is self._shown:
                self._has_shown = False
            self._let_go(v)

    def has_left(self, v: int) -> bool:
        """Say whether nothing of a version is on its way to others any more."""
        return all(sent.pending.is_done() for sent in self._versions[v].sent)

    def hold(self, v: int) -> None:
        """Keep a version, which may still be on its way, until it has been handed on."""
        with self._changing:
            self._held[v] += 1

    def let_go(self, v: int) -> None:
        """Hold a version no longer for one of those who hold it."""
        with self._changing:
            assert self._held[v] > 0, f"version {v} is let go more often than it was held"
            self._held -= Counter([v])  # which keeps what is above zero
            self._drop()

    def _drop(self) -> None:
        for old in [v for v in self._versions if v < self._needed and not self._held[v]]:
            self._let_go(old)

    def _let_go(self, v: int) -> None:
        buffer = self._versions.pop(v)
        self.words.pop(v, None)
        if buffer is self._shown:  # parameters may have been laid elsewhere: they are not in it
            self._shown = None
        buffer.let_go()

    def begin_update(self, v: int, oldest: int) -> None:
        """Let the parameters be version ``v``, still with the values of the one before.

        Args:
            v: the version that is about to be made.
            oldest: version that is read later.
        """
        if v - 1 >= oldest:
            self.drop_below(oldest)
            buffer = self._messages.room(self.layout)
            buffer.data.copy_(self._versions[v - 1].data)
            self.put(v, buffer)
        else:
            buffer = self._versions[v - 1]
            self._messages.join(buffer)  # it may still be on its way to others
            with self._changing:
                self._versions[v] = self._versions.pop(v - 1)
                self.words[v] = self.words.pop(v - 1)
        self.show(v)

    def end_update(self, v: int) -> None:
        """Take into version ``v`` what parameters were given as another ``.data``."""
        for p, view in zip(self.parameters, self._versions[v].tensors, strict=True):
            if not p.is_set_to(view):
                view.copy_(p.detach())
                p.data = view

    def write(self, v: int, values: Sequence[torch.Tensor]) -> None:
        buffer = self._messages.room(self.layout)
        buffer.write(list(values))
        self.put(v, buffer)
