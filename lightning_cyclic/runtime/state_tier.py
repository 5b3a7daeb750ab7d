"""Model state that is in memory only while it is used; at other times it is at home.

    FETCH     takes room in memory; a lane reads into it what is at home
    use       shows the optimizer, or the module, the tensors there
    EVICT     a lane writes them home
    FREE      shows those at home, and gives the room back

So whoever looks into ``optimizer.state`` or at weights, a checkpoint or a callback, finds the
right values, in memory or at home: in a home file, or beside a GPU in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.dataflow import IN_MEMORY, PUT_AWAY, Item
from lightning_cyclic.runtime.bits import version
from lightning_cyclic.runtime.buffers import views_of
from lightning_cyclic.runtime.moments import PAST, AbstractMoment, streams_of
from lightning_cyclic.runtime.saved_places import SavedPlaces
from lightning_cyclic.runtime.state_holders import Holder
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
    """Move what a worker's stages have.

    Args:
        layout: of all of it.
        kept: how many chunks of each stage stay in memory, its first ones.
        parameters: own stage -> its parameters.
        holder: who has the tensors.
        make_home: (bytes) -> where they lie.
        device: of the worker.
    """

    places: SavedPlaces | None = None
    """Is told where rooms are, where graphs are not to hold them."""

    def __init__(
        self,
        layout: StateLayout,
        kept: Sequence[int],
        parameters: Mapping[int, Sequence[nn.Parameter]],
        holder: Holder,
        make_home: Callable[[int], AbstractHome],
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self._holder = holder
        self._device, self._streams = device, streams_of(device)
        self._moved = {j: layout.stages[j][kept[j] :] for j in parameters}
        self._ids = {id(x.p) for each in self._moved.values() for chunk in each for x in chunk}
        self._spare: list[_Room] = []  # which spares the system to find their pages again
        self._rooms: dict[int, list[_Room]] = {}  # of the stages that are in memory
        self._shown: set[int] = set()
        self._given: set[tuple[int, int]] = set()  # chunks that hold what has been given meanwhile
        chunks = [(j, k) for j, each in self._moved.items() for k in range(len(each))]
        self._begins = {at: n * layout.chunk_bytes for n, at in enumerate(chunks)}
        self._home = make_home(len(chunks) * layout.chunk_bytes)
        self._read: dict[int, int] = {}  # id of what is at home -> its version when it came
        self._gone: dict[int, int] = {}  # id of what is in memory -> its version when it went
        self._goes: dict[int, list[int]] = {}  # stage -> the chunks that an EVICT writes
        self._leaves: dict[int, int] = {}  # stage -> step of its last update
        self._written: dict[int, AbstractMoment] = {}  # of stages: when their home has it all
        self._at_home: dict[int, list[list[Tensor]]] = {j: [] for j in parameters}
        for j, k in chunks:
            self._at_home[j].append(self._home.views(self._begins[j, k], self._moved[j][k]))
            self._put_away(j, k)
        self._spare.clear()

    def _put_away(self, j: int, k: int) -> None:
        """Let what is there go home, through a room: what is written to a map stays in memory."""
        chunk = self._moved[j][k]
        self._holder.begin(chunk)
        if all(self._holder.get(part) is None for part in chunk):
            return
        room = self._room_for(chunk)
        self._show_chunk(j, k, room)
        self._move(Kind.EVICT, j, k, room)
        self._streams.now().wait()
        self._given.discard((j, k))
        self._send_home(j, k, room)
        room.leave()
        self._spare.append(room)

    # ------------------------------------------------------------------ on the main thread

    def hold(self, a: Action) -> None:
        """Prepare what a lane will do: take room for a FETCH, fill it for an EVICT."""
        if a.kind is Kind.FETCH:
            # before its first update a stage has no state, and the optimizer makes it
            if any(self._holder.get(part) is not None for part, _ in self._parts(a.j)):
                self._rooms[a.j] = [self._room_for(chunk) for chunk in self._moved[a.j]]
                self._read.update((id(home), version(home)) for _, home in self._parts(a.j))
                for chunk in self._moved[a.j]:
                    self._holder.note(chunk)
        else:
            chunks = list(enumerate(self._moved[a.j]))
            changed = {k for k, _ in chunks if self._differs(a.j, k)}
            self._fill(a.j)
            changed |= {k for k, _ in chunks if (a.j, k) in self._given}
            self._given -= {(a.j, k) for k in changed}
            self._goes[a.j] = [k for k, c in chunks if k in changed or self._holder.changes(c)]
            views = (view for room in self._rooms[a.j] for view in room.views)
            self._gone.update((id(view), version(view)) for view in views)
            self._leaves[a.j] = a.t

    def moves(self, p: nn.Parameter) -> bool:
        """Say whether something of a parameter comes and goes."""
        return id(p) in self._ids

    @property
    def resting(self) -> frozenset[int]:
        """Return the stages that have something of parameters which are not trained."""
        each = self._moved.items()
        rests = (j for j, moved in each for c in moved if not all(x.p.requires_grad for x in c))
        return frozenset(rests)

    def is_here(self, j: int) -> bool:
        """Say whether all of a stage can be used."""
        return not self._moved.get(j) or j in self._shown

    def data(self, j: int, k: int) -> Tensor:
        """Return the room of a chunk of a stage that is here."""
        return self._rooms[j][k].data

    def copied(self, j: int, k: int) -> Tensor:
        """Return the bytes of a chunk of a stage, as it is at home."""
        begin, num_bytes = self._begins[j, k], self._layout.chunk_bytes
        at_home = torch.frombuffer(
            self._home.bytes, dtype=torch.uint8, count=num_bytes, offset=begin
        )
        return at_home.to(self._device)

    def install(self, j: int) -> None:
        """Show what has come; its holder may have been given something else meanwhile."""
        if j not in self._rooms or j in self._shown:
            return
        self._show(j, self._rooms[j])
        if self.places is not None:
            for k, room in enumerate(self._rooms[j]):
                self.places.note(room.data, (j, k))

    def check(self, j: int) -> None:
        """Refuse state that an update has made, and that was not known when the plan was."""
        parts = [part for chunk in self._layout.stages[j] for part in chunk]
        self._holder.check(j, self._parameters[j], parts)

    def free(self, j: int) -> None:
        """Show what is at home, and give back the room.

        Raises:
            StepError: somebody has kept tensors that were in it.
        """
        rooms = self._rooms.pop(j, None)
        if rooms is None:
            return
        is_written = j in self._written
        self._written.pop(j, PAST).wait()  # as others read it on the host
        for k, room in enumerate(rooms):
            again = self._differs(j, k)
            if is_written:  # and changed since it went
                gone = [self._gone.pop(id(view)) for view in room.views]
                again |= gone != list(map(version, room.views))
            if again:
                self._move(Kind.EVICT, j, k, room)
                self._streams.now().wait()
            self._given.discard((j, k))
            self._send_home(j, k, room)
            if self.places is not None:
                self.places.forget(room.data)
            if not room.leave():
                raise self._kept(j)
        self._shown.discard(j)
        self._spare += rooms

    def _differs(self, j: int, k: int) -> bool:
        """Say whether a chunk may be other than at home, where no update has made it so."""
        if (j, k) in self._given:
            return True
        return j in self._shown and self._holder.has_changed(self._moved[j][k])

    def _send_home(self, j: int, k: int, room: _Room) -> None:
        each = zip(self._moved[j][k], self._at_home[j][k], room.views, strict=True)
        for part, home, view in each:
            x = self._holder.get(part)
            if x is None or _is(x, home):
                continue
            if not _is(x, view):  # it has been given others meanwhile
                self._check(part, x, j)
                home.copy_(x)
            self._holder.put(part, home)

    def rest(self) -> None:
        """Let go of rooms between steps, where no plan has them."""
        self._spare.clear()

    def leaving(self) -> list[tuple[int, int]]:
        """Return the stages whose state leaves, with the steps of their updates."""
        return [(j, self._leaves[j]) for j in self._rooms]

    def close(self) -> None:
        self._holder.close()

    # ------------------------------------------------------------------ on a lane

    def move(self, a: Action) -> None:
        """Carry out a FETCH or an EVICT, for which all is prepared."""
        rooms = self._rooms.get(a.j, [])
        for k in range(len(rooms)) if a.kind is Kind.FETCH else self._goes[a.j]:
            self._move(a.kind, a.j, k, rooms[k], f" in step {a.t}")
        if a.kind is Kind.EVICT:
            self._written[a.j] = self._streams.now()

    def _move(self, kind: Kind, j: int, k: int, room: _Room, when: str = "") -> None:
        self._streams.keep(room.data)
        act = self._home.read if kind is Kind.FETCH else self._home.write
        try:
            act(self._begins[j, k], room.data)
        except OSError as error:
            raise StepError(
                f"{self._holder.what} of stage {j} "
                f"{'was' if self._holder.is_one else 'were'} not "
                f"{'read from' if kind is Kind.FETCH else 'written to'} {self._home.name}"
                f"{when}: {error}; allowed: a folder that can be written and "
                "read as long as the run lasts; go on from the newest checkpoint, with a "
                "folder on a disk that works"
            ) from error

    # ------------------------------------------------------------------ what is where

    def _parts(self, j: int) -> Iterator[tuple[Part, Tensor]]:
        """Yield each part of a stage, and where it is at home."""
        for chunk, home in zip(self._moved[j], self._at_home[j], strict=True):
            yield from zip(chunk, home, strict=True)

    def _room_for(self, chunk: Chunk) -> _Room:
        room = self._spare.pop() if self._spare else _Room(self._layout.chunk_bytes, self._device)
        room.show(chunk)
        return room

    def _fill(self, j: int) -> None:
        """Have all of a stage in its room, also what the optimizer has just made."""
        rooms = self._rooms.get(j)
        if rooms is None:  # chunk by chunk, as what the optimizer has made goes with each
            self._rooms[j] = rooms = []
            for k, chunk in enumerate(self._moved[j]):
                rooms.append(self._room_for(chunk))
                self._show_chunk(j, k, rooms[k])
            self._shown.add(j)
        else:
            self._show(j, rooms)

    def _show(self, j: int, rooms: Sequence[_Room]) -> None:
        for k, room in enumerate(rooms):
            self._show_chunk(j, k, room)
        self._shown.add(j)

    def _show_chunk(self, j: int, k: int, room: _Room) -> None:
        """Let the holder have the tensors of a room, with the values that it has now."""
        each = zip(self._moved[j][k], self._at_home[j][k], room.views, strict=True)
        is_old = self._holder.has_changed(self._moved[j][k])  # since it was to come
        for part, home, view in each:
            x = self._holder.get(part)
            if x is None or _is(x, view):
                continue
            at_home = version(home)
            is_read = _is(x, home) and self._read.get(id(home), at_home) == at_home
            if is_old or not is_read:  # made, loaded, or changed by a hook since it came
                self._check(part, x, j)
                view.copy_(x)
                self._given.add((j, k))
            self._holder.put(part, view)
        self._holder.note(self._moved[j][k])

    def _check(self, part: Part, x: Any, j: int) -> None:
        spec = part.spec
        if not isinstance(x, Tensor) or x.size() != spec.size or x.dtype != spec.dtype:
            now = f"{tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise StepError(
                f"{self._holder.words_of(part)} of stage {j} is {now}, and not "
                f"{tuple(spec.size)}, {spec.dtype}, for which memory_limit_bytes=... has its "
                f"place; allowed: {self._holder.allowed}, or leave memory_limit_bytes out"
            )

    def _kept(self, j: int) -> StepError:
        verb = "leaves" if self._holder.is_one else "leave"
        return StepError(
            f"{self._holder.what} of stage {j} {verb} memory behind {self._holder.use}, but a "
            "hook or a callback has kept tensors of it, which would show that of another stage; "
            f"allowed: copies; keep x.clone() of what you read from {self._holder.where}, or "
            "leave memory_limit_bytes out"
        )


def _is(x: Any, view: Tensor) -> bool:
    """Say whether something is a view, or a tensor that lies just as it does."""
    return isinstance(x, Tensor) and _place(x) == _place(view)


def _place(x: Tensor) -> tuple[object, ...]:
    return x.data_ptr(), x.device, x.dtype, x.size(), x.stride()


@final
class StateTiers:
    """Know all that comes and goes, by the payload of its actions.

    Args:
        tiers: of a worker; none where all stays.
    """

    def __init__(self, tiers: Mapping[Payload, StateTier] | None = None) -> None:
        self._tiers = dict(tiers or {})

    def of(self, payload: Payload | None) -> StateTier | None:
        return None if payload is None else self._tiers.get(payload)

    def moves(self, p: nn.Parameter) -> bool:
        """Say whether weights come and go."""
        tier = self.of(Payload.P)
        return tier is not None and tier.moves(p)

    def bring(self, j: int, t: int, fetch: Callable[[Item], None]) -> None:
        """Show what an update of a stage needs, when it has come.

        Args:
            fetch: waits for it.
        """
        for payload, tier in self._tiers.items():
            fetch((IN_MEMORY[payload], j, t))
            tier.install(j)

    def check(self, j: int) -> None:
        for tier in self._tiers.values():
            tier.check(j)

    def end_step(self, fetch: Callable[[Item], None], *, leave: bool) -> None:
        """Let go of rooms that no plan has between steps.

        Args:
            fetch: as above.
            leave: whether all that is on its way goes now.
        """
        for payload, tier in self._tiers.items():
            for j, t in tier.leaving() if leave else ():
                fetch((PUT_AWAY[payload], j, t + 1))
                tier.free(j)
            tier.rest()


ALL_STAYS = StateTiers()
