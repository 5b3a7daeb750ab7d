"""A model of a device that its host runs ahead of, which finds what is in no order.

The host computes at once, as on a CPU, and every operation is noted as one of the current stream.
Streams have vector clocks: an operation knows of those of other streams that its stream has waited
for, and of those that the host has seen to be over. Two operations on the same memory, of which
one writes, must know of each other: else the device would do them in either order.

Nothing is over before the host has waited for it: the device is as slow as it can be.

Memory belongs to the stream on which it was made. Another stream that uses it must have kept it,
or it might be used again too early.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_cyclic.plan.passes.messages import Channel, Ring
from lightning_cyclic.runtime import moments
from lightning_cyclic.runtime.moments import AbstractMoment, AbstractStreams
from lightning_cyclic.runtime.transport.base import (
    AbstractPending,
    AbstractTransport,
    Named,
    Part,
)

Clock = dict[int, int]  # stream -> how many of its operations are known to come before

_MAIN = 0
_METADATA = ("set_", "resize_", "empty", "detach", "alias")  # which touch no content
_ASK = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")  # for which the host waits


class Memory:
    """Hold what is known of one storage.

    Args:
        owner: the stream on which it was made; None where that was before, or by no operation:
            words of the host.
    """

    def __init__(self, storage: torch.UntypedStorage, owner: int | None) -> None:
        self.is_there = StorageWeakRef(storage)
        self.owner = owner
        self.kept = {owner}
        self.written: tuple[int, int, str] | None = None  # stream, its operation, where
        self.read: dict[int, tuple[int, str]] = {}


@final
class Device:
    """Note what streams do; one for each process."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.operations = 0
        self.waited: list[str] = []  # for which receives the host has waited
        self.seen: Clock = {}  # by the host: what is launched from now on comes behind it
        self._clocks: dict[int, Clock] = {_MAIN: {}}
        self._memory: dict[int, Memory] = {}
        self._lock = threading.RLock()
        self._local = threading.local()

    # ------------------------------------------------------------------ streams

    @property
    def current(self) -> int:
        stream: int = getattr(self._local, "stream", _MAIN)
        return stream

    def new(self) -> int:
        with self._lock:
            self._clocks[len(self._clocks)] = {}
            return len(self._clocks) - 1

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def clock(self, stream: int) -> Clock:
        with self._lock:
            return merged(self._clocks[stream], self.seen)

    def know(self, stream: int, clock: Clock) -> None:
        with self._lock:
            self._clocks[stream] = merged(self._clocks[stream], clock)

    def see(self, clock: Clock) -> None:
        """Note that the host has waited for this."""
        with self._lock:
            self.seen = merged(self.seen, clock)

    # ------------------------------------------------------------------ operations

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let what the body does be no operation of the device."""
        before, self._local.aside = getattr(self._local, "aside", False), True
        try:
            yield
        finally:
            self._local.aside = before

    def do(self, reads: list[Tensor], writes: list[Tensor], made: list[Tensor], name: str) -> None:
        """Note an operation of the current stream."""
        if getattr(self._local, "aside", False):
            return
        with self._lock:
            stream, self.operations = self.current, self.operations + 1
            for x in made:
                self._memory_of(x, stream)
            clock = self._clocks[stream] = self.clock(stream)
            clock[stream] = clock.get(stream, 0) + 1
            for x in reads:
                self._note(x, clock, stream, name, writes=False)
            for x in writes:
                self._note(x, clock, stream, name, writes=True)

    def keep(self, x: Tensor) -> None:
        with self._lock:
            self._memory_of(x, None).kept.add(self.current)

    def sweep(self, *, all_of_it: bool = False) -> None:
        """Look at memory that is gone: whoever has used it must have kept it."""
        with self._lock:
            for at, memory in list(self._memory.items()):
                if all_of_it or memory.is_there.expired():
                    self._look_at_users(memory)
                    del self._memory[at]

    def check(self) -> None:
        """Check that nothing was in no order.

        Raises:
            AssertionError: with what was.
        """
        self.sweep(all_of_it=True)
        found = list(dict.fromkeys(self.faults))
        if found:
            raise AssertionError("\n".join([f"{len(found)} faults", *found[:20]]))

    def _memory_of(self, x: Tensor, owner: int | None) -> Memory:
        storage = x.untyped_storage()
        found = self._memory.get(storage._cdata)
        if found is not None and found.is_there.expired():
            self._look_at_users(found)
            found = None
        if found is None:
            found = self._memory[storage._cdata] = Memory(storage, owner)
        return found

    def _look_at_users(self, memory: Memory) -> None:
        used = [(s, where) for s, (_, where) in memory.read.items()]
        if memory.written is not None:
            used.append((memory.written[0], memory.written[2]))
        for stream, where in used:
            if memory.owner is not None and stream not in memory.kept:
                self._fault(f"memory of stream {memory.owner} used on {stream}, not kept: {where}")

    def _note(self, x: Tensor, clock: Clock, stream: int, name: str, *, writes: bool) -> None:
        memory, where = self._memory_of(x, None), f"{name} on stream {stream} {_place()}"
        if memory.written is not None:
            other, count, there = memory.written
            if clock.get(other, 0) < count:
                self._fault(f"{where} does not wait for {there}")
        if writes:
            for other, (count, there) in memory.read.items():
                if clock.get(other, 0) < count:
                    self._fault(f"{where} writes, and does not wait for {there}")
            memory.written, memory.read = (stream, clock[stream], where), {}
        else:
            memory.read[stream] = (clock[stream], where)

    def _fault(self, text: str) -> None:
        self.faults.append(text)


def merged(one: Clock, other: Clock) -> Clock:
    return {s: max(one.get(s, 0), other.get(s, 0)) for s in one.keys() | other.keys()}


def _place() -> str:
    stack = traceback.extract_stack(limit=30)
    own = [f for f in stack if "lightning_cyclic" in f.filename]
    return " < ".join(f"{f.name}:{f.lineno}" for f in own[-4:][::-1]) if own else "(user)"


@final
class _Noted(TorchDispatchMode):
    """Tell the device of each operation."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        given = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
        reads, writes, aliases = [], [], False
        for a in func._schema.arguments:
            tensors = _tensors(given.get(a.name))
            if a.alias_info is not None and a.alias_info.is_write:
                writes += tensors
            elif a.alias_info is not None:
                aliases = True  # a view: nothing is read
            else:
                reads += tensors
        inside = {x.untyped_storage()._cdata for x in (*reads, *writes)}
        made = [] if aliases else [
            x for x in _tensors(out) if x.untyped_storage()._cdata not in inside
        ]  # fmt: skip
        if name in _ASK:
            self._device.see(self._device.clock(self._device.current))
        elif name.startswith(_METADATA):
            self._device.do([], [], made, name)
        else:
            self._device.do(reads, [*writes, *made], made, name)
        return out


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x] if x.layout is torch.strided and x.device.type == "cpu" else []
    if isinstance(x, list | tuple):
        return [y for each in x for y in _tensors(each)]
    return []


# ---------------------------------------------------------------------- what the package is given


@final
class _Moment(AbstractMoment):
    def __init__(self, device: Device, stream: int) -> None:
        self._device, self._stream, self._clock = device, stream, device.clock(stream)

    @override
    def join(self) -> None:
        self._device.know(self._device.current, self._clock)

    @override
    def wait(self) -> None:
        self._device.see(self._clock)

    @override
    def is_here(self) -> bool:
        return self._device.current == self._stream

    @override
    def is_over(self) -> bool:
        seen = self._device.seen
        return all(seen.get(s, 0) >= count for s, count in self._clock.items())


@final
class Streams(AbstractStreams):
    """Be the streams of the model."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @override
    def new(self) -> int:
        return self._device.new()

    @override
    def on(self, stream: int) -> AbstractContextManager[None]:
        return self._device.on(stream)

    @override
    def now(self) -> AbstractMoment:
        return _Moment(self._device, self._device.current)

    @override
    def keep(self, x: Tensor) -> None:
        self._device.keep(x)


@final
class Watched(AbstractTransport):
    """Carry messages by another transport, as operations of a stream for each channel."""

    def __init__(self, inner: AbstractTransport, device: Device) -> None:
        super().__init__(inner.worker, inner.num_workers, inner.crew)
        self.inner = inner
        self._device = device
        self._streams: dict[Channel, int] = {}
        self._aside = device.new()
        self._lock = threading.Lock()

    @property
    @override
    def control(self) -> AbstractTransport | None:
        return self.inner.control

    @override
    def isend(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        with self._device.aside():
            if ring.channel.is_control:
                return self.inner.isend(ring, data, part)
            return self._sent(ring, data, self.inner.isend(ring, data, part), "send")

    @override
    def irecv(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        with self._device.aside():
            if ring.channel.is_control:
                return self.inner.irecv(ring, data, part)
            return self._sent(ring, data, self.inner.irecv(ring, data, part), "receive")

    def _sent(
        self, ring: Ring, data: Tensor, pending: AbstractPending, way: str
    ) -> AbstractPending:
        stream = self._stream(ring.channel)
        self._device.know(stream, self._device.clock(self._device.current))
        with self._device.on(stream):
            self._device._local.aside = False
            one = [data]
            is_send = way == "send"
            name = f"{way} of {ring.payload}{ring.j}"
            self._device.do(one if is_send else [], [] if is_send else one, [], name)
            self._device.keep(data)
            self._device._local.aside = True
        received = "" if is_send else f"{ring.payload} of stage {ring.j}"
        return _Pending(pending, self._device, data, self._device.clock(stream), received)

    def _stream(self, channel: Channel) -> int:
        with self._lock:
            if channel not in self._streams:
                self._streams[channel] = self._device.new()
            return self._streams[channel]

    @override
    def aside(self) -> AbstractContextManager[None]:
        return self._device.on(self._aside)

    @override
    def close(self) -> None:
        self.inner.close()

    @override
    def disconnect(self) -> None:
        self.inner.disconnect()


@final
class _Pending(AbstractPending):
    def __init__(
        self, inner: AbstractPending, device: Device, data: Tensor, clock: Clock, received: str
    ) -> None:
        self._inner, self._device, self._data, self._clock = inner, device, data, clock
        self._received = received
        self._is_seen = False

    @override
    def wait(self) -> None:
        if self._received:
            self._device.waited.append(self._received)
        with self._device.aside():
            self._inner.wait()
        self._device.see(self._clock)
        self._is_seen = True

    @override
    def join(self, named: Named) -> None:
        with self._device.aside():
            self._inner.wait()  # as the host computes at once
        self._device.know(self._device.current, self._clock)
        self._device.keep(self._data)

    @override
    def is_done(self) -> bool:
        return self._is_seen


@contextmanager
def noted(device: Device) -> Iterator[None]:
    """Run the body, and what threads it starts, on the model."""

    def watching(run: Callable[..., None]) -> Callable[..., None]:
        def watched(thread: threading.Thread) -> None:
            target = getattr(thread, "_target", None)
            # threads of the transport are not of the package
            is_of_model = getattr(target, "__qualname__", "").startswith("GlooModel")
            with nullcontext() if is_of_model else _Noted(device):
                run(thread)

        return watched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "HOST", Streams(device))
        patch.setattr(threading.Thread, "run", watching(threading.Thread.run))
        with _Noted(device):
            yield
