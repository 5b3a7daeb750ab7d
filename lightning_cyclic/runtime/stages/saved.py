"""What autograd saves for a backward while a step runs, storage by storage, and where.

    stage 0          |  stage 1
    made 3  saved 4  |  saved 9      stage 0 keeps it; stage 1 is sent it
    made 5           |  saved 7      stage 1 alone needs it, and stage 0 keeps nothing

Storages are known without being kept alive. What a module has is there anyway, and none of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from lightning_cyclic.runtime.stages.ledger import num_bytes, storage_of


@dataclass(slots=True, eq=False)
class SavedStorage:
    """Hold what is known of one storage.

    Args:
        num_bytes: of what was given, those of the tensor, which may be a part of a batch.
        made: when it was; None: it was given.
        maker: what was told of who made it. [nothing: a kernel has, for its own backward]
        saves: when it was saved, in order.
    """

    num_bytes: int
    made: int | None
    maker: Any = None
    saves: list[int] = field(default_factory=list)


@final
class SavedStorages:
    """Note what autograd saves.

    Args:
        there: tensors that do not count: parameters, buffers and the like.
        now: the time, in what the caller counts by.
    """

    def __init__(self, there: Iterable[Tensor], now: Callable[[], int]) -> None:
        self._there = tuple(there)
        self._now = now
        self._all: list[SavedStorage] = []
        self._alive: dict[int, tuple[weakref.ref[Any], SavedStorage]] = {}  # by its place

    def found(self) -> list[SavedStorage]:
        """Return what was saved; lazy parameters have been made by now."""
        places = {storage_of(x) for x in self._there if not is_lazy(x)}
        theirs = {
            id(known)
            for place, (alive, known) in self._alive.items()
            if place in places and alive() is not None
        }
        return [x for x in self._all if x.saves and id(x) not in theirs]

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Take note of tensors that are about to be used: of those that nobody has made."""
        for x in tensors:
            self._of(x, None)

    def make(self, x: Tensor, maker: Any) -> None:
        """Take note of a tensor that was made, and by whom, if it is not known."""
        storage = self._of(x, self._now())
        if storage is not None and storage.maker is None:
            storage.maker = maker

    def save(self, x: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            storage, now = self._of(x, self._now()), self._now()
            if storage is not None and storage.saves[-1:] != [now]:
                storage.saves.append(now)

    @contextmanager
    def without_keeping(self) -> Iterator[None]:
        """Note what autograd saves in the body, whose graph keeps nothing, and is not used."""
        with torch.enable_grad(), saved_tensors_hooks(self.save, _nothing_kept):
            yield

    def _of(self, x: Tensor, made: int | None) -> SavedStorage | None:
        place = storage_of(x)
        if place is None:
            return None
        alive, known = self._alive.get(place, (None, None))
        if alive is None or alive() is None:  # another may have lain there before
            storage = x.untyped_storage()
            size = int(storage.nbytes())
            known = SavedStorage(min(size, num_bytes(x)) if made is None else size, made)
            self._all.append(known)
            # the storage's own object lives as long as its memory, whoever holds that
            self._alive[place] = weakref.ref(storage), known
        return known


def _nothing_kept(_: Any) -> NoReturn:
    raise RuntimeError("a graph was used that was made to see what it saves")
