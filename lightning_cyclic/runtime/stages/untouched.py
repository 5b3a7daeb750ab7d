"""Leave a module and its batch as they were, whatever a step does to them meanwhile."""

from __future__ import annotations

import functools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set, deque, OrderedDict)
_DEPTH = 3  # of containers in containers: torchmetrics' groups of names need two
_MANY = 10_000  # containers with more items are restored, but not searched for others


@contextmanager
def untouched(module: nn.Module) -> Iterator[Keeper]:
    """Restore random states, attributes, buffers and what the keeper keeps, behind the body."""
    keeper = Keeper(module)
    try:
        yield keeper
    finally:
        keeper.restore()


@final
class Keeper:
    """Know how a module was.

    Args:
        module: the whole module; its buffers are copied, its parameters only when
            :meth:`keep` is told that they are about to change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._random = list(_random_states(module))
        self._containers: list[tuple[Any, Any]] = []
        for m in module.modules():
            self._note(m.__dict__, _DEPTH)
        self._buffers = {name: (b, b.detach().clone()) for name, b in module.named_buffers()}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, tensor: Tensor) -> None:
        """Copy a tensor that is about to change in place."""
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = (tensor, tensor.detach().clone())

    def changed_buffers(self) -> list[str]:
        """Return the names of the buffers whose values differ from those at the beginning."""
        now = dict(self._module.named_buffers())
        return [
            name
            for name, (_, before) in self._buffers.items()
            if name not in now or not _same(before, now[name])
        ]

    def restore(self) -> None:
        """Put everything back."""
        for container, items in self._containers:
            _refill(container, items)
        for tensor, before in (*self._buffers.values(), *self._kept.values()):
            if not _same(before, tensor):
                tensor.detach().copy_(before)
        for put, state in self._random:
            put(state)

    def _note(self, container: Any, depth: int) -> None:
        self._containers.append((container, type(container)(container)))
        if depth and len(container) <= _MANY:
            for item in _items(container):
                if type(item) in _CONTAINERS:
                    self._note(item, depth - 1)


def _random_states(module: nn.Module) -> Iterator[tuple[Callable[[Any], object], Any]]:
    yield random.setstate, random.getstate()
    yield torch.set_rng_state, torch.get_rng_state()
    for device in {p.device for p in module.parameters() if p.is_cuda}:
        put = functools.partial(torch.cuda.set_rng_state, device=device)
        yield put, torch.cuda.get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.random.set_state, numpy.random.get_state()


def _items(container: Any) -> Iterable[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _refill(container: Any, items: Any) -> None:
    if isinstance(container, dict):
        same = list(container) == list(items) and all(container[k] is items[k] for k in items)
    else:
        same = len(container) == len(items) and all(
            a is b for a, b in zip(container, items, strict=True)
        )
    if same:
        return
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(items)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.detach())
