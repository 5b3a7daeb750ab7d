"""Optimizer state that is in memory only for its update; at other times it is at home.

    FETCH     takes room in memory; a lane reads into it what is at home
    UPDATE    shows the optimizer the tensors there
    EVICT     a lane writes them home
    FREE      shows the optimizer those at home, and gives the room back

So whoever looks into ``optimizer.state``, a checkpoint or a callback, finds the right values, in
memory or at home: in a home file, or beside a GPU in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.runtime.bits import version
from lightning_cyclic.runtime.buffers import views_of
from lightning_cyclic.runtime.moments import PAST, AbstractMoment, streams_of
from lightning_cyclic.runtime.state_homes import AbstractHome
from lightning_cyclic.runtime.state_layout import Chunk, Part, StateLayout


@final
class _Room:
    """Have room in memory for a chunk.

    Args:
        num_bytes: of any chunk.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.views: list[Tensor] = []  # of the chunk that is here
        self._num_users = self._count()  # who share the memory

    def show(self, chunk: Chunk) -> None:
        self.views = views_of(self.data, 0, [part.spec for part in chunk])

    def leave(self) -> bool:
        """Forget the chunk; say whether nobody else has its tensors, or parts of them."""
        self.views = []
        return self._count() <= self._num_users

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self.data.untyped_storage()._cdata))


@final
class StateTier:
    """Move the state of a worker's stages.

    Args:
        layout: of all state.
        kept: how many chunks of each stage stay in memory, its first ones.
        parameters: own stage -> what the optimizer has of it.
        optimizer: returns that whose state it is.
        make_home: (bytes) -> where they lie.
        device: of the worker.
    """

    def __init__(
        self,
        layout: StateLayout,
        kept: Sequence[int],
        parameters: Mapping[int, Sequence[nn.Parameter]],
        optimizer: Callable[[], Optimizer],
        make_home: Callable[[int], AbstractHome],
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self._optimizer = optimizer
        self._device, self._streams = device, streams_of(device)
        self._moved = {j: layout.stages[j][kept[j] :] for j in parameters}
        self._spare: list[_Room] = []  # which spares the system to find their pages again
        self._coming = {j for j, each in self._moved.items() if each}  # yet, in this round
        self._rooms: dict[int, list[_Room]] = {}  # of the stages that are in memory
        chunks = [(j, k) for j, each in self._moved.items() for k in range(len(each))]
        self._begins = {at: n * layout.chunk_bytes for n, at in enumerate(chunks)}
        self._home = make_home(len(chunks) * layout.chunk_bytes)
        self._read: dict[int, int] = {}  # id of what is at home -> its version when it came
        self._gone: dict[int, int] = {}  # id of what is in memory -> its version when it went
        self._leaves: dict[int, int] = {}  # stage -> step of its last update
        self._written: dict[int, AbstractMoment] = {}  # of stages: when their home has it all
        self._at_home: dict[int, list[list[Tensor]]] = {j: [] for j in parameters}
        for j, k in chunks:
            self._at_home[j].append(self._home.views(self._begins[j, k], self._moved[j][k]))
        self._put_away()

    def _put_away(self) -> None:
        """Let state that was loaded go home."""
        for j in self._moved:
            for part, home, x in self._parts(j):
                if x is not None:
                    _check(part, x, j)
                    home.copy_(x)
                    self._put(part, home)

    # ------------------------------------------------------------------ on the main thread

    def hold(self, a: Action) -> None:
        """Prepare what a lane will do: take room for a FETCH, fill it for an EVICT."""
        if a.kind is Kind.FETCH:
            # before its first update a stage has no state, and the optimizer makes it
            if any(x is not None for _, _, x in self._parts(a.j)):
                self._rooms[a.j] = [self._room_for(chunk) for chunk in self._moved[a.j]]
                self._read.update((id(home), version(home)) for _, home, _ in self._parts(a.j))
        else:
            self._fill(a.j)
            views = (view for room in self._rooms[a.j] for view in room.views)
            self._gone.update((id(view), version(view)) for view in views)
            self._leaves[a.j] = a.t

    def install(self, j: int) -> None:
        """Show the optimizer what has come; it may have been given something else meanwhile."""
        if j in self._rooms:
            self._show(j, self._rooms[j])

    def check(self, j: int) -> None:
        """Refuse state that an update has made, and that was not known when the plan was."""
        state = self._optimizer().state
        known = {(part.p, part.key) for chunk in self._layout.stages[j] for part in chunk}
        for p in self._parameters[j]:
            for key, x in state.get(p, {}).items():
                if isinstance(x, Tensor) and x.dim() > 0 and (p, key) not in known:
                    name = type(self._optimizer()).__name__
                    raise StepError(
                        f"{name} has made {key!r}, which it does not make in its first step, of a "
                        f"parameter of stage {j}, so that memory_limit_bytes=... has no place for "
                        "it; allowed: parameters that the optimizer has from the first step on, "
                        "and optimizers that make all their state at once, with settings "
                        "(amsgrad, momentum) that stay; leave memory_limit_bytes out"
                    )

    def free(self, j: int) -> None:
        """Show the optimizer what is at home, and give back the room.

        Raises:
            StepError: somebody has kept tensors that were in it.
        """
        rooms = self._rooms.pop(j, None)
        if rooms is None:
            return
        self._written.pop(j, PAST).wait()  # as others read it on the host
        gone = {id(view): self._gone.pop(id(view)) for room in rooms for view in room.views}
        for part, home, x in self._parts(j):
            if id(x) in gone:
                if version(x) != gone[id(x)]:  # somebody has changed it meanwhile
                    home.copy_(x)
                self._put(part, home)
        x = None  # a name for a tensor is a user of it
        for room in rooms:
            if not room.leave():
                raise _kept(j)
        self._spare += rooms
        self._coming.discard(j)
        if not self._coming:  # what is spare until the next step is in no plan
            self._spare.clear()
            self._coming = {k for k, each in self._moved.items() if each}

    def leaving(self) -> list[tuple[int, int]]:
        """Return the stages whose state leaves, with the steps of their updates."""
        return [(j, self._leaves[j]) for j in self._rooms]

    # ------------------------------------------------------------------ on a lane

    def move(self, a: Action) -> None:
        """Carry out a FETCH or an EVICT, for which all is prepared."""
        act = self._home.read if a.kind is Kind.FETCH else self._home.write
        for k, room in enumerate(self._rooms.get(a.j, ())):
            self._streams.keep(room.data)
            try:
                act(self._begins[a.j, k], room.data)
            except OSError as error:
                raise StepError(
                    f"optimizer state of stage {a.j} was not "
                    f"{'read from' if a.kind is Kind.FETCH else 'written to'} {self._home.name} "
                    f"in step {a.t}: {error}; allowed: a folder that can be written and "
                    "read as long as the run lasts; go on from the newest checkpoint, with a "
                    "folder on a disk that works"
                ) from error
        if a.kind is Kind.EVICT:
            self._written[a.j] = self._streams.now()

    # ------------------------------------------------------------------ what is where

    def _parts(self, j: int) -> Iterator[tuple[Part, Tensor, Any]]:
        """Yield each part of a stage, where it is in the file, and what the optimizer has."""
        state = self._optimizer().state
        for chunk, home in zip(self._moved[j], self._at_home[j], strict=True):
            for part, view in zip(chunk, home, strict=True):
                yield part, view, state[part.p].get(part.key) if part.p in state else None

    def _put(self, part: Part, x: Tensor) -> None:
        self._optimizer().state[part.p][part.key] = x

    def _room_for(self, chunk: Chunk) -> _Room:
        room = self._spare.pop() if self._spare else _Room(self._layout.chunk_bytes, self._device)
        room.show(chunk)
        return room

    def _fill(self, j: int) -> None:
        """Have all state of a stage in its room, also what the optimizer has just made."""
        rooms = self._rooms.get(j)
        if rooms is None:  # chunk by chunk, as what the optimizer has made goes with each
            self._rooms[j] = rooms = []
            for k, chunk in enumerate(self._moved[j]):
                rooms.append(self._room_for(chunk))
                self._show_chunk(j, k, rooms[k])
        else:
            self._show(j, rooms)

    def _show(self, j: int, rooms: Sequence[_Room]) -> None:
        for k, room in enumerate(rooms):
            self._show_chunk(j, k, room)

    def _show_chunk(self, j: int, k: int, room: _Room) -> None:
        """Let the optimizer have the tensors of a room, with the values that it has now."""
        state = self._optimizer().state
        for part, home, view in zip(
            self._moved[j][k], self._at_home[j][k], room.views, strict=True
        ):
            x = state[part.p].get(part.key) if part.p in state else None
            if x is None or x is view:
                continue
            is_read = x is home and self._read.get(id(home)) == version(home)
            if not is_read:  # made just now, or loaded, or changed by a hook since
                _check(part, x, j)
                view.copy_(x)
            self._put(part, view)


def _check(part: Part, x: Any, j: int) -> None:
    spec = part.spec
    if not isinstance(x, Tensor) or x.size() != spec.size or x.dtype != spec.dtype:
        now = f"{tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise StepError(
            f"optimizer state {part.key!r} of a parameter of stage {j} is {now}, and not "
            f"{tuple(spec.size)}, {spec.dtype}, for which memory_limit_bytes=... has its place; "
            "allowed: state as the optimizer makes it in its first step; load such, or leave "
            "memory_limit_bytes out"
        )


def _kept(j: int) -> StepError:
    return StepError(
        f"optimizer state of stage {j} leaves memory behind its update, but a hook or a callback "
        "has kept tensors of it, which would show that of another stage; allowed: copies; keep "
        "x.clone() of what you read from optimizer.state, or leave memory_limit_bytes out"
    )
