"""Lending: what is absent is here while it is used, and leaves again.

read in a module's call     leaves where that call ends
read elsewhere              leaves when others need its place
read for a graph            stays, as the graph holds the parameter itself
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_cyclic.runtime.absent import home_of
from lightning_cyclic.runtime.plain_copies import ours


@runtime_checkable
class Lender(Protocol):
    """Be a home that can have what it brings leave again."""

    def lending(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which a module is run; no backward follows it."""


@final
class Lending:
    """Have parameters of a module leave again, until it ends.

    Args:
        module: whose calls lend.
        leave: (parameter or buffer, name) lets one be absent again.
        most_bytes: of all that are lent at once; those of one operation may be more. [any number]
    """

    def __init__(
        self,
        module: nn.Module,
        leave: Callable[[Tensor, str], None],
        most_bytes: int | None = None,
    ) -> None:
        self._leave = leave
        self._most_bytes = most_bytes
        self._lent: dict[int, tuple[Tensor, str]] = {}  # the oldest first
        self._kept: set[int] = set()  # of them, by graphs
        self._hooks = [
            m.register_forward_hook(ours(lambda m, *_: self._end_call(m)), always_call=True)
            for m in module.modules()
            if not isinstance(m, torch.jit.ScriptModule)
        ]

    def lend(self, read: Mapping[str, Tensor], operands: Sequence[Tensor]) -> None:
        """Take what an operation reads; what it does not read makes room.

        Args:
            read: name -> parameter or buffer that has come, or was here.
            operands: all that the operation reads.
        """
        for name, x in read.items():
            self._lent.pop(id(x), None)  # the last to be read is the last to go
            self._lent[id(x)] = x, name
        if torch.is_grad_enabled():
            self._kept |= {id(x) for x in read.values() if isinstance(x, nn.Parameter)}
        if self._most_bytes is None:
            return
        excess = self._num_bytes(self._lent) - self._most_bytes
        stay = self._kept | {id(x) for x in operands}
        for key in [key for key in self._lent if key not in stay]:
            if excess <= 0:
                break
            excess -= num_bytes_of(self._lent[key][0])
            self._take_back(key)

    def num_bytes_kept(self, besides: Iterable[Tensor]) -> int:
        """Return how many bytes graphs hold, besides some."""
        return self._num_bytes(self._kept - set(map(id, besides)))

    def _num_bytes(self, keys: Collection[int]) -> int:
        return sum(num_bytes_of(self._lent[key][0]) for key in keys)

    def _end_call(self, m: nn.Module) -> None:
        for x in (*m._parameters.values(), *m._buffers.values()):
            self._take_back(id(x))

    def _take_back(self, key: int) -> None:
        if key in self._lent and key not in self._kept:
            x, name = self._lent.pop(key)
            self._leave(x, name)

    def end(self) -> None:
        """Take everything back."""
        for hook in self._hooks:
            hook.remove()
        self._kept.clear()
        for key in list(self._lent):
            self._take_back(key)


@contextmanager
def lending(module: nn.Module) -> Iterator[None]:
    """Run the body, which runs a module; what is absent is there while its module is called."""
    homes = {id(home): home for home in map(home_of, module.parameters())}
    with ExitStack() as stack:
        for home in homes.values():
            if isinstance(home, Lender):
                stack.enter_context(home.lending(module))
        yield


def num_bytes_of(x: Tensor) -> int:
    """Return how many bytes a tensor of its shape has."""
    return x.numel() * x.element_size()


def without_memory(x: Tensor) -> Tensor:
    """Return a tensor of the same shape whose elements share one place in memory."""
    return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
