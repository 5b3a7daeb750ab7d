"""What a forward saves for its backward, which leaves memory between the two.

    F        autograd hands over each tensor that it saves: a storage is noted once, with the views
    EVICT    a lane writes the storages home
    FREE     lets go of those that nobody else has
    FETCH    takes room for what has gone; a lane reads it into there
    B        autograd is given views of the same sizes, strides and places in their storage

So kernels find what they would have found: the same bytes, as well aligned. What somebody else has
(parameters, buffers, what is still to be sent, what the user's code keeps) stays where it is, as
nothing would be gained, and it might be changed in place. Autograd counts such changes, but asks
nobody whom it hands its tensors to; so that is asked here, with its own words.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, NoReturn, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_cyclic.errors import ConfigurationError, StepError
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.program import Program
from lightning_cyclic.runtime.bits import version
from lightning_cyclic.runtime.buffers import aligned
from lightning_cyclic.runtime.cast_copies import CastCopies, View, refusing_transforms
from lightning_cyclic.runtime.moments import streams_of
from lightning_cyclic.runtime.state_homes import AbstractHome

_Key = tuple[int, int | None, int]  # step, micro-batch, stage


# ---------------------------------------------------------------------- what autograd holds


@final
class _Kept(NamedTuple):
    """Hold a saved tensor that stays where it is."""

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        if version(self.tensor) != self.version:
            _refuse_change(self.tensor, self.version)
        return self.tensor


@final
class _Saved:
    """Hold a saved tensor as a view of its storage.

    Args:
        x: the tensor, as long as its storage has not left.
    """

    __slots__ = ("__weakref__", "_block", "_dtype", "_offset", "_size", "_stride", "kept")

    def __init__(self, block: _Block, x: Tensor) -> None:
        self._block = block
        self._dtype, self._offset = x.dtype, x.storage_offset()
        self._size, self._stride = x.size(), x.stride()
        self.kept: _Kept | None = _Kept(x.detach(), version(x))  # x itself may have the graph

    @property
    def is_unchanged(self) -> bool:
        return self.kept is None or version(self.kept.tensor) == self.kept.version

    def value(self) -> Tensor:
        if self.kept is not None:
            return self.kept.value()
        data = self._block.data
        if data is None:
            raise StepError(
                "a graph was used whose saved tensors are not in memory (activation_checkpointing="
                '"offload"), as it is not the turn of its backward; allowed: one backward for '
                "each micro-batch, which comes when the plan says; detach what a later step "
                'uses, or use activation_checkpointing="never"'
            )
        x = torch.empty(0, dtype=self._dtype, device=data.device)
        return x.set_(data.untyped_storage(), self._offset, self._size, self._stride)


@final
class _Block:
    """Hold the bytes of one storage, of which tensors were saved; None while they are at home."""

    __slots__ = ("__weakref__", "_saved", "data", "num_bytes")

    def __init__(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self.num_bytes = storage.nbytes()
        data = torch.empty(0, dtype=torch.uint8, device=x.device)
        self.data: Tensor | None = data.set_(storage, 0, (self.num_bytes,), (1,))
        self._saved: list[weakref.ref[_Saved]] = []  # nodes that are done with theirs let them go

    def save(self, x: Tensor) -> _Saved:
        saved = _Saved(self, x)
        self._saved.append(weakref.ref(saved))
        return saved

    def leave(self) -> bool:
        """Let go of the bytes, if nobody else has them, and they are those that were saved."""
        assert self.data is not None
        saved = [x for made in self._saved if (x := made()) is not None]
        if not all(x.is_unchanged for x in saved) or _num_users(self.data) > 1 + len(saved):
            return False
        self.data = None
        for x in saved:
            x.kept = None
        return True


def _num_users(x: Tensor) -> int:
    """Count the tensors of a storage."""
    return _use_count(x) - _own_uses()


def _use_count(x: Tensor) -> int:
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


@cache
def _own_uses() -> int:
    """Return how many there are by asking, which differs between versions of torch."""
    return _use_count(torch.empty(1)) - 1


def _refuse_change(x: Tensor, saved: int) -> NoReturn:
    kind, size = x.type(), list(x.size())
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{kind} {size}] is at version {version(x)}; expected version {saved} "
        'instead. (It was saved with activation_checkpointing="offload"; change a copy: '
        "x = x + y, not x += y.)"
    )


# ---------------------------------------------------------------------- one micro-batch


@final
class _Graph:
    """Hold what one forward of a stage saves.

    Args:
        stays: storages of which nothing moves.
        device: of those that do.
        casts: of weights, which graphs share. [there are none]
    """

    def __init__(
        self, stays: frozenset[int], device: torch.device, casts: CastCopies | None
    ) -> None:
        self.home: AbstractHome | None = None
        self.moved: list[tuple[_Block, int]] = []  # with the first byte at home
        self.rooms: list[Tensor] = []  # into which they come back
        self._stays = stays
        self._device = device
        self._casts = casts
        # weakly: what a run that began anew has saved, or code without a loss, is not needed
        self._blocks: dict[int, weakref.ref[_Block]] = {}

    def pack(self, x: Tensor) -> View | _Kept | _Saved:
        with torch._C.DisableTorchFunction():
            if self._casts is not None and isinstance(view := self._casts.pack(x), View):
                return view
            if not self._moves(x):
                return _Kept(x if x.is_leaf else x.detach(), version(x))
            key = x.untyped_storage()._cdata
            block = made() if (made := self._blocks.get(key)) is not None else None
            if block is None:  # another storage may have had this place before
                block = _Block(x)
                self._blocks[key] = weakref.ref(block)
            return block.save(x)

    def _moves(self, x: Tensor) -> bool:
        is_here = x.device.type == self._device.type
        return is_here and _is_movable(x) and x.untyped_storage()._cdata not in self._stays

    def unpack(self, saved: View | _Kept | _Saved) -> Tensor:
        with torch._C.DisableTorchFunction():
            return saved.value()

    def lay_out(self) -> int:
        """Give each storage its place at home; return the bytes of all."""
        end = 0
        for made in self._blocks.values():
            if (block := made()) is not None and block.data is not None:
                self.moved.append((block, end))
                end = aligned(end + block.num_bytes)
        self._blocks.clear()
        return end


def _is_movable(x: Tensor) -> bool:
    """Say whether a tensor is no more than a view of bytes, and not of a weight."""
    return (
        type(x) is Tensor
        and x.layout is torch.strided
        and type(x._base) in (Tensor, type(None))
        and not (x.is_conj() or x.is_neg() or x.is_quantized or x.is_inference())
        and x.untyped_storage().nbytes() > 0
    )


# ---------------------------------------------------------------------- all of a worker


@final
class GraphTier:
    """Move what forwards of a worker save.

    Args:
        make_home: (bytes) -> where they lie.
        device: of the worker.
        buffers: returns those of the module, which stay.
    """

    def __init__(
        self,
        make_home: Callable[[int], AbstractHome],
        device: torch.device,
        buffers: Callable[[], Iterable[Tensor]],
    ) -> None:
        self._make_home = make_home
        self._device, self._streams = device, streams_of(device)
        self._buffers = buffers
        self._spare: list[AbstractHome] = []
        self._expected: set[_Key] = set()
        self._stays: frozenset[int] = frozenset()
        self._graphs: dict[_Key, _Graph] = {}

    # ------------------------------------------------------------------ on the main thread

    def expect(self, actions: Iterable[Action]) -> None:
        """Take note of which forwards leave something that moves."""
        self._expected = {_key(a) for a in actions if a.kind is Kind.EVICT}
        self._stays = frozenset(b.untyped_storage()._cdata for b in self._buffers())

    def moves(self, a: Action) -> bool:
        return _key(a) in self._expected

    @contextmanager
    def saving(self, a: Action, casts: CastCopies | None) -> Iterator[None]:
        """Take what autograd saves in the body, which runs a forward.

        Raises:
            StepError: the body calls torch.func or torch.vmap, which refuse such hooks.
        """
        graph = self._graphs[_key(a)] = _Graph(self._stays, self._device, casts)
        refusing = refusing_transforms(
            'with activation_checkpointing="offload"', "torch.autograd.grad, or torch.func with "
            'other values', 'activation_checkpointing="always"'
        )  # fmt: skip
        with refusing, saved_tensors_hooks(graph.pack, graph.unpack):
            yield

    def hold(self, a: Action) -> None:
        """Prepare what a lane will do: a home for an EVICT, room for a FETCH."""
        graph = self._graphs.get(_key(a))
        if graph is None:  # it is run again instead, for once
            return
        if a.kind is Kind.EVICT:
            num_bytes = graph.lay_out()
            graph.home = self._home_for(a, num_bytes) if num_bytes else None
        else:
            graph.rooms = [  # each by itself, as aligned as what has gone
                torch.empty(block.num_bytes, dtype=torch.uint8, device=self._device)
                for block, _ in graph.moved
            ]

    def free(self, a: Action) -> None:
        """Let go of what is at home."""
        graph = self._graphs.get(_key(a))
        if graph is not None:
            graph.moved = [(block, begin) for block, begin in graph.moved if block.leave()]

    def take(self, a: Action) -> None:
        """Let a backward have what its forward has saved."""
        graph = self._graphs.pop(_key(a), None)
        if graph is None:
            return
        for (block, _), room in zip(graph.moved, graph.rooms, strict=True):
            block.data = room
        graph.moved, graph.rooms = [], []  # nodes have the graph, and let go one by one
        if graph.home is not None:
            self._spare.append(graph.home)
            graph.home = None

    def _home_for(self, a: Action, num_bytes: int) -> AbstractHome:
        """Return a home with enough room: as many are made as graphs are away at once."""
        spare = sorted(self._spare, key=_size)
        found = next((home for home in spare if _size(home) >= num_bytes), None)
        if found is None and spare:  # a larger one takes its place
            self._spare.remove(spare[0])
        if found is not None:
            self._spare.remove(found)
            return found
        try:
            return self._make_home(num_bytes)
        except ConfigurationError as error:
            raise StepError(
                f"there is no room for activations of stage {a.j} in step {a.t}: {error}"
            ) from error

    # ------------------------------------------------------------------ on a lane

    def move(self, a: Action) -> None:
        """Carry out a FETCH or an EVICT, for which all is prepared.

        Raises:
            StepError: where they lie does not work.
        """
        graph = self._graphs.get(_key(a))
        if graph is None or graph.home is None:
            return
        is_back = a.kind is Kind.FETCH
        act = graph.home.read if is_back else graph.home.write
        try:
            for n, (block, begin) in enumerate(graph.moved):
                data = graph.rooms[n] if is_back else block.data
                assert data is not None
                self._streams.keep(data)
                act(begin, data)
        except OSError as error:
            raise StepError(
                f"activations of stage {a.j}, micro-batch {a.i}, were not "
                f"{'read from' if is_back else 'written to'} {graph.home.name} in step {a.t}: "
                f"{error}; allowed: a folder that can be written and read as long as the run "
                "lasts; go on from the newest checkpoint, with a folder on a disk that works"
            ) from error


def words_of_moves(program: Program) -> str:
    """Say how much of what forwards leave is away meanwhile, of all workers."""
    steady = [a for w in range(program.num_workers) for a in program.step(w, program.steady)]
    num_moved = sum(a.kind is Kind.EVICT and a.payload is Payload.A for a in steady)
    num_all = sum(a.kind is Kind.F for a in steady)
    if num_moved:
        return f"Activations of {num_moved} of {num_all} forwards are away until their backward"
    return (
        'activation_checkpointing="offload" moves nothing here, as fewer than three forwards and '
        "backwards run between any forward and its own backward: more micro-batches of gpipe, or "
        "more stages, would leave time for it"
    )


def _key(a: Action) -> _Key:
    return a.t, a.i, a.j


def _size(home: AbstractHome) -> int:
    return len(home.bytes)
