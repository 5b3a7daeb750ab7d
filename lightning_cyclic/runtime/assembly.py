"""The assembly: all ranks, and what they say together beside the messages of the program.

    share        plain values    of every rank   to every rank
    collect      the same        of every rank   to rank 0
    ask_first    the same        of rank 0       to every rank, or the error that it met
    spread       tensors         of any rank     to every rank, in the host's memory
    copy_first   their values    of rank 0       to every rank, where they are
    meet         nothing

All ranks call each of them at the same time, with what they come for: where some do not come in
time, whoever waits says for whom, and for what. One process says everything to itself.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Number
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_cyclic import errors
from lightning_cyclic.errors import ConfigurationError, CyclicError
from lightning_cyclic.runtime.transport.base import Line
from lightning_cyclic.runtime.transport.crew import Crew, is_of_groups

T = TypeVar("T")


def _at_the_start() -> str:
    return "at the start"


@final
class Assembly:
    """Be all ranks of the default process group; every rank must make it at the same time.

    It has one group of gloo, for what is in the host's memory, that breaks when a rank fails.

    Args:
        crew: of these ranks. [there is but one rank]
        when: says where this rank is, as "in step 12".
    """

    def __init__(self, crew: Crew | None = None, when: Callable[[], str] = _at_the_start) -> None:
        self.crew = crew  # until the end
        self.rank = 0 if crew is None else crew.names.rank
        self.num_ranks = 1 if crew is None else dist.get_world_size()
        self._when = when
        self._limit_s = 0.0 if crew is None else crew.timeout_s
        self._lines: list[Line] = []
        self._whole: Line | None = None  # that of all ranks
        if crew is not None:  # now, when all have met
            self._whole = self.line()
            crew.hang_ups.append(self._whole.hang_up)

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    @property
    def group(self) -> Any:
        """Return the process group; None where there is none at all."""
        if self._whole is None and self._limit_s:  # for a checkpoint behind the end
            self._whole = self.line()
        return None if self._whole is None else self._whole.group

    def line(
        self, backend: str | None = "gloo", ranks: Sequence[int] | None = None,
        *, by_members: bool = False,
    ) -> Line:  # fmt: skip
        """Make a process group as :class:`Line` does; it ends with this."""
        self._lines.append(Line(self._limit_s, backend, ranks, by_members=by_members))
        return self._lines[-1]

    def close(self) -> None:
        """End all groups, and look for the words of ranks that fail no more."""
        crew, self.crew = self.crew, None
        lines, self._lines = self._lines, []
        whole, self._whole = self._whole, None
        if crew is not None and whole is not None:
            crew.close()
            if crew.failure() is not None:  # its thread may be about to hang up
                return
            crew.hang_ups.remove(whole.hang_up)
        for line in lines:
            with suppress(ValueError):  # the default group has ended, and all others with it
                line.disconnect()

    # ------------------------------------------------------------------ what all call

    @contextmanager
    def waiting(self, what: str, peer: int | None = None) -> Iterator[None]:
        """Run the body, in which this rank waits for others; name them if they do not come.

        Args:
            what: they were to do, as "to finish".
            peer: the worker that is waited for. [all ranks, which all run the body]

        Raises:
            WaitTimeoutError: they did not come in time.
            PeerError: the connection is gone, or another rank has failed.
        """
        if (crew := self.crew) is None:
            yield
            return
        before, when = crew.waits, self._when()
        crew.waits = what if peer is None else before
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CyclicError) or not is_of_groups(error):
                raise
            rank = None if peer is None else crew.names.rank_of(peer)
            raise crew.failed(f"{what}, {when}", error, rank) from None
        finally:
            crew.waits = before

    def meet(self, what: str) -> None:
        if not self.is_alone:
            with self.waiting(what):
                dist.barrier(group=self.group)

    def share(self, mine: T, what: str) -> list[T]:
        """Return what every rank has, in the order of ranks."""
        if self.is_alone:
            return [mine]
        packed = self._packed(mine)
        size = torch.tensor([packed.numel()])
        with self.waiting(what):
            sizes = [torch.zeros_like(size) for _ in range(self.num_ranks)]
            dist.all_gather(sizes, size, group=self.group)
            padded = packed.new_zeros(int(max(sizes)))
            padded[: packed.numel()] = packed
            parts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(parts, padded, group=self.group)
        return [_unpacked(part[: int(n)]) for part, n in zip(parts, sizes, strict=True)]

    def collect(self, mine: T, what: str) -> list[T] | None:
        """Return on rank 0 what every rank has, in the order of ranks; None elsewhere."""
        if self.is_alone:
            return [mine]
        if self.rank > 0:
            self._send(self._packed(mine), what)
            return None
        parts, size = [mine], torch.zeros(1, dtype=torch.int64)
        with self.waiting(what):
            for rank in range(1, self.num_ranks):
                dist.recv(size, rank, group=self.group)
                packed = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(packed, rank, group=self.group)
                parts.append(_unpacked(packed))
        return parts

    def _send(self, packed: Tensor, what: str) -> None:
        with self.waiting(what):
            for x in (torch.tensor([packed.numel()]), packed):
                dist.send(x, 0, group=self.group)

    def ask_first(self, find: Callable[[], T], what: str) -> T:
        """Return on every rank what rank 0 finds.

        Args:
            find: called on rank 0 alone.
            what: rank 0 is to do.

        Raises:
            CyclicError: on every rank, what rank 0 met.
        """
        if self.is_alone:
            return find()
        if self.rank > 0:
            kind, found = _unpacked(self._from_first(torch.empty(0), what))
            if kind:
                raise getattr(errors, kind)(found)
            return found  # type: ignore[no-any-return]
        try:
            found = find()
        except CyclicError as error:
            self._from_first(self._packed((type(error).__name__, str(error))), what)
            raise
        self._from_first(self._packed(("", found)), what)
        return found

    def _from_first(self, packed: Tensor, what: str) -> Tensor:
        size = torch.tensor([packed.numel()])
        with self.waiting(what):
            dist.broadcast(size, 0, group=self.group)
            if self.rank > 0:
                packed = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(packed, 0, group=self.group)
        return packed

    def spread(self, tensors: Mapping[str, Tensor], source: int, what: str) -> dict[str, Tensor]:
        """Return tensors that a rank has on every rank, by one message for each dtype.

        Args:
            tensors: on other ranks of the same names, shapes and dtypes.
            source: the rank.
            what: it is to do.
        """
        found = {n: x.detach() for n, x in tensors.items()} if source == self.rank else {}
        if self.is_alone:
            return found
        for dtype in dict.fromkeys(x.dtype for x in tensors.values()):
            names = [n for n, x in tensors.items() if x.dtype == dtype]
            sizes = [tensors[n].numel() for n in names]
            if source == self.rank:
                flat = torch.cat([found[n].reshape(-1).cpu() for n in names])
            else:
                flat = torch.empty(sum(sizes), dtype=dtype)
            with self.waiting(what):
                dist.broadcast(flat, source, group=self.group)
            if source != self.rank:
                parts = zip(names, torch.split(flat, sizes), strict=True)
                found |= {n: part.view(tensors[n].shape) for n, part in parts}
        return found

    @torch.no_grad()
    def copy_first(self, tensors: Iterable[Tensor], what: str) -> None:
        """Give tensors the values that they have on rank 0, by the default process group."""
        if not self.is_alone:
            with self.waiting(what):
                for x in tensors:
                    dist.broadcast(x, 0)

    def _packed(self, mine: Any) -> Tensor:
        """Return values as bytes of a file, from which nothing but such values can be read.

        Raises:
            ConfigurationError: for a kind of values that no checkpoint could be read with.
        """
        file = io.BytesIO()
        torch.save(tree_map(_plain, mine), file)
        file.seek(0)  # others could not read them, and would be waited for
        if kinds := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            raise ConfigurationError(
                f"rank {self.rank} has values of {', '.join(sorted(kinds))} in what a checkpoint "
                "keeps; allowed: tensors, numbers, strings, and dictionaries, lists and tuples of "
                "them; keep others out of the optimizer's state, or name their class to "
                "torch.serialization.add_safe_globals on every rank"
            )
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    return torch.load(io.BytesIO(packed.numpy().data), weights_only=True)


def _plain(x: Any) -> Any:
    if type(x) is Tensor and x.layout is torch.strided:
        return x.detach().cpu().clone()  # a file has all of the storage in which a tensor lies
    if isinstance(x, Tensor):
        return x.cpu()
    return x.item() if isinstance(x, Number) and hasattr(x, "item") else x  # numpy's, as Python's
