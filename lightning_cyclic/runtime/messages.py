"""Messages: tensors as bytes on the channels of a program.

    of one layout    [head | tensors]          S, T, P, N: what a stage has, known at both ends
    of any form      [head | content as described before]
                     [head | (unused)]   [description as JSON text]   [content]

The head says which tensors are there, and carries a word; or whether the form is a new one.
Sender and receiver remember, for each key, the last form; as long as nothing changes, a message
is one. Transports without names cannot tell heads and descriptions from content: there these go
by control, and content by itself. What goes by control stays in the host's memory, as gloo needs
it: no copy, and no stop of a GPU.

A receive is posted when the program says, and waited for when its message is read. A send is not
waited for, until as many of its ring are under way as the program was proved with. Where the host
runs ahead of the device, streams of the device wait for both; the host waits for heads, which
others' hosts send ahead, too, and for a send that is one further behind.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from struct import pack, unpack_from
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lightning_cyclic.plan.actions import Action, Kind, Lane, Payload
from lightning_cyclic.plan.passes.messages import Channel, Ring, ring_of
from lightning_cyclic.runtime.buffers import (
    NUM_WORDS,
    Buffer,
    Layout,
    Sent,
    aligned,
    sent_spec,
    total_bytes,
    views_of,
    write_into,
    write_words_to,
)
from lightning_cyclic.runtime.moments import streams_of
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport, Part
from lightning_cyclic.runtime.values.plain import TensorSpec, spec_from_data, spec_to_data

_MOST_FORMS = 256  # of one ring: inputs of many sizes must not fill the memory
_LEAST_DEPTH = 2  # one that is under way, and one that is made
_MOST_AHEAD = 1  # sends of a ring that streams have waited for, and that hosts need not have seen

Wait = Callable[[AbstractPending, Action], None]


class Message(NamedTuple):
    """Hold what travels.

    Args:
        facts: what else is to be said of them in terms of JSON; none in messages of one layout.
        there: marks, in messages of one layout: of tensors that have values, if nothing else is
            agreed on; None for all.
        buffer: in which the tensors lie, if they do.
        leaves: whether nobody here needs the buffer when it has been sent.
    """

    tensors: Sequence[Tensor]
    facts: Any = None
    word: int = 0
    there: Sequence[bool] | None = None
    buffer: Buffer | None = None
    leaves: bool = False


class _Form(NamedTuple):
    """Say what a message looks like."""

    text: bytes
    specs: tuple[TensorSpec, ...]
    facts: Any
    num_bytes: int


_NOTHING = _Form(b"", (), None, 0)


@final
class _Forms:
    """Remember the forms of few keys; both ends of a ring forget the same."""

    def __init__(self) -> None:
        self._forms: dict[Hashable, _Form] = {}

    def get(self, key: Hashable) -> _Form:
        if key not in self._forms:
            return _NOTHING
        form = self._forms[key] = self._forms.pop(key)  # the most recent comes last
        return form

    def is_still(self, key: Hashable, form: _Form) -> bool:
        """Say whether a key has the form that it had, and let it be as old as it is."""
        return self._forms.get(key, _NOTHING) is form

    def put(self, key: Hashable, form: _Form) -> None:
        self._forms.pop(key, None)
        self._forms[key] = form
        if len(self._forms) > _MOST_FORMS:
            del self._forms[next(iter(self._forms))]


@final
class _Port:
    """Hold this worker's end of a ring.

    Args:
        ring: whose messages leave here, or come.
        layout: of all of them, if they have one.
        is_apart: whether heads and descriptions travel by control, as content has no name.
        lane: whose thread uses it.
    """

    __slots__ = (
        "depth", "forms", "is_apart", "joined", "lane", "layout", "posted", "ring", "under_way",
    )  # fmt: skip

    def __init__(
        self, ring: Ring, layout: Layout | None, depth: int, *, is_apart: bool, lane: Lane
    ) -> None:
        self.lane = lane
        self.ring = ring
        self.layout = layout
        self.depth = depth
        self.is_apart = is_apart
        self.forms = _Forms()
        self.under_way: deque[Sent] = deque()
        self.joined: deque[Sent] = deque()  # for which a stream waits, ahead of which the host is
        self.posted: deque[Incoming] = deque()  # whose layout is not known


@final
class Incoming:
    """Be a receive that has been posted.

    Args:
        key: of its form; None where the layout is known.
    """

    __slots__ = (
        "action", "begun", "buffer", "content", "data", "form", "head", "key", "message", "port",
        "words",
    )  # fmt: skip

    def __init__(self, action: Action, port: _Port, key: Hashable) -> None:
        self.action = action
        self.port = port
        self.key = key
        self.buffer: Buffer | None = None  # into which it comes, where the layout is known
        self.data = torch.empty(0)
        self.form = _NOTHING
        self.content: AbstractPending | None = None  # None until it is known how large it is
        self.head: AbstractPending | None = None  # where it comes by itself, into words
        self.words: Tensor | None = None  # its head, where it does not come with the content
        self.begun: Future[None] | None = None  # where a thread begins it, in its turn
        self.message: Message | None = None  # that came while a later one was waited for


@final
class Messages:
    """Send and receive the messages of one worker.

    Args:
        transport: how bytes travel; None where nobody else is.
        depths: how many sends of a ring may be under way; two of one that is not named.
        wait: waits for bytes and names them if they do not come.
        join: lets the current stream of the device do so. [wait]
    """

    def __init__(
        self,
        transport: AbstractTransport | None,
        depths: Mapping[Ring, int],
        wait: Wait,
        device: torch.device,
        join: Wait | None = None,
    ) -> None:
        if transport is not None:
            self._transport = transport
        self._control = None if transport is None else transport.control
        self._depths = depths
        self._wait = wait
        self._join = join or wait
        self._device = device
        self.streams = streams_of(device)
        self._layouts: dict[tuple[Payload, int], Layout] = {}
        self._ports: dict[Hashable, _Port] = {}  # by what actions of a ring have in common
        # sends of one layout, whose memory is used again, or goes, as soon as they have left; and
        # threads that wait for that
        self._watched: dict[Lane, list[_Port]] = {}
        self._watches: dict[Lane, ThreadPoolExecutor] = {}
        self._dropping = threading.Lock()  # they let go what lanes let go, too
        # where messages have no names, each is received when it is known how large it is, in
        # the order of its channel: in a thread, so that nobody else waits for its head
        self._turns: dict[Channel, ThreadPoolExecutor] = {}
        self._last: dict[Channel, Future[None]] = {}

    def layout(
        self, tensors: Iterable[Tensor], num_marks: int | None = None, *, keeps: bool = True
    ) -> Layout:
        return Layout(tensors, self._device, num_marks, keeps=keeps)

    def know(self, payload: Payload, j: int, layout: Layout) -> None:
        """Let all messages of a payload and stage have one layout; both ends must say so first."""
        assert not self._ports, "a message has gone without the layout"
        self._layouts[payload, j] = layout

    def follow(self, depths: Mapping[Ring, int]) -> None:
        """Go on with another program, when nothing is under way.

        Args:
            depths: how many sends of each ring may be under way.
        """
        self._depths = depths
        for port in self._ports.values():
            port.depth = depths.get(port.ring, _LEAST_DEPTH)

    def close(self) -> None:
        """End what runs in the background; messages that have not come are dropped."""
        for threads in (*self._turns.values(), *self._watches.values()):
            threads.shutdown(wait=False, cancel_futures=True)

    def _port(self, a: Action) -> _Port:
        key = a.kind, a.payload, a.j, a.peer, a.lane
        port = self._ports.get(key)  # a key's actions all run on one lane
        if port is None:
            ring = ring_of(a, self._transport.worker)
            depth = self._depths.get(ring, _LEAST_DEPTH)
            is_apart = self._control is not None and not ring.channel.is_control
            layout = self._layouts.get((ring.payload, ring.j))
            port = self._ports[key] = _Port(ring, layout, depth, is_apart=is_apart, lane=a.lane)
            if a.kind is Kind.SEND and layout is not None:
                self._watched.setdefault(a.lane, []).append(port)
        return port

    # ------------------------------------------------------------------ sending

    def send(self, a: Action, key: Hashable, message: Message) -> None:
        """Begin to send a message.

        Args:
            a: the action that this carries out.
            key: what messages it is likely to look like; the receiver names the same.
            message: what is sent; its tensors may change as soon as this returns, unless they
                lie in a buffer, which is let go when it has left.
        """
        port = self._port(a)
        self._make_room(port)
        if port.layout is not None:
            self._send_laid_out(port, a, message, port.layout)
        else:
            self._send_described(port, a, key, message)

    def _send_laid_out(self, port: _Port, a: Action, message: Message, layout: Layout) -> None:
        buffer = message.buffer
        if buffer is None:
            buffer = self.room(layout)
            buffer.write(message.tensors)
        marks = b"\1" * layout.num_marks if message.there is None else bytes(message.there)
        words = pack("<qq", 0, message.word) + marks
        if port.is_apart:
            head = _words(buffer.head_bytes)
            write_words_to(head, words)
            self._begin(port, a, head, Part.HEAD, None)
        else:
            buffer.write_words(words)
        for content in layout.content(buffer, with_head=not port.is_apart):
            self._begin(port, a, content, Part.CONTENT, buffer)
        if message.buffer is None or message.leaves:
            buffer.let_go()

    def _send_described(self, port: _Port, a: Action, key: Hashable, message: Message) -> None:
        tensors = message.tensors
        known = port.forms.get(key)
        specs = tuple(map(sent_spec, tensors))
        is_new = known is _NOTHING or specs != known.specs or message.facts != known.facts
        form = _form_of(specs, message.facts) if is_new else known
        port.forms.put(key, form)
        apart, ring = port.is_apart, port.ring
        begins = aligned(NUM_WORDS)
        data = _words(begins) if apart else self._bytes(begins + known.num_bytes, ring)
        write_words_to(data, pack("<qq", is_new, len(form.text)))
        if not is_new and not apart:
            write_into(data, begins, specs, tensors)
        self._begin(port, a, data, Part.HEAD if apart else Part.CONTENT, None)
        if is_new:
            text = torch.frombuffer(bytearray(form.text), dtype=torch.uint8)
            text = text if apart else text.to(data.device)
            self._begin(port, a, text, Part.DESCRIPTION, None)
        if (is_new or apart) and form.num_bytes:
            content = self._bytes(form.num_bytes, ring)
            write_into(content, 0, specs, tensors)
            self._begin(port, a, content, Part.CONTENT if apart else Part.DESCRIBED, None)

    def room(self, layout: Layout) -> Buffer:
        """Return a buffer of a layout that nobody needs, or a new one.

        Never wait for one that is under way: what it waits for may wait for this worker. There
        are few, as sends of a ring are waited for where there are too many.
        """
        for _ in range(len(layout.spare)):
            try:
                buffer = layout.spare.popleft()  # the one that was let go first
            except IndexError:  # lanes ask from threads of their own
                break
            if buffer.is_free():
                buffer.sent, buffer.users = [], []
                self.streams.keep(buffer.data)
                return buffer
            layout.spare.append(buffer)
        return layout.new()

    def join(self, buffer: Buffer) -> None:
        """Let what follows wait until what is under way from a buffer has left."""
        for sent in buffer.sent:
            self._join(sent.pending, sent.action)
            self._drop_sent(sent.action.lane)
        buffer.sent = []

    def settle(self) -> None:
        """Wait on the host until what was sent has left, and what was received has come."""
        for port in list(self._ports.values()):
            under_way = self._under_way(port)
            for sent in under_way:  # all limits count from when the device comes to this
                self._join(sent.pending, sent.action)
            for sent in (*port.joined, *under_way):
                self._end(sent)
            port.under_way.clear()
            port.joined.clear()
        if self._ports:
            self._transport.settle()

    def _begin(
        self, port: _Port, a: Action, data: Tensor, part: Part, buffer: Buffer | None
    ) -> None:
        by_control = part is not Part.CONTENT and port.is_apart
        transport = self._control if by_control and self._control else self._transport
        sent = Sent(a, transport.isend(port.ring, data, part), data)
        if buffer is not None:
            # all of them: several workers get a version from one buffer, not in the order of sends
            buffer.sent = [*(x for x in buffer.sent if not x.pending.is_done()), sent]
        port.under_way.append(sent)
        if data.is_cpu and port in self._watched.get(port.lane, ()):
            self._watch(port, sent.pending)  # of GPUs streams tell, which are not to wait

    def _watch(self, port: _Port, pending: AbstractPending) -> None:
        """Wait in a thread until a message has left, as gloo knows no sooner; its memory goes."""
        if port.lane not in self._watches:
            name = f"cyclic-sent-{port.lane}"
            self._watches[port.lane] = ThreadPoolExecutor(1, thread_name_prefix=name)

        def wait() -> None:
            with suppress(OSError):  # who waits for it next hears of it
                pending.wait()
                with self._dropping:
                    if port.under_way and port.under_way[0].pending is pending:
                        port.under_way.popleft()

        self._watches[port.lane].submit(wait)

    def _make_room(self, port: _Port) -> None:
        """Wait for the oldest messages of a ring that is full: the proof knows of no more."""
        self._drop_sent(port.lane)
        if len(port.under_way) < port.depth:  # each action has sent one part or more
            return
        actions = list({id(x.action): x.action for x in self._under_way(port)}.values())
        for oldest in actions[: max(len(actions) - port.depth + 1, 0)]:  # equal ones may be two
            while (first := self._pop(port.under_way, oldest)) is not None:
                self._join(first.pending, oldest)
                port.joined.append(first)
        while len(port.joined) > _MOST_AHEAD or (port.joined and port.joined[0].pending.is_done()):
            self._end(port.joined.popleft())  # it was due before what streams wait for now

    def _under_way(self, port: _Port) -> list[Sent]:
        with self._dropping:
            return list(port.under_way)

    def _pop(self, sent: deque[Sent], action: Action) -> Sent | None:
        """Take the oldest away, if it is of an action and no thread has taken it."""
        with self._dropping:
            return sent.popleft() if sent and sent[0].action is action else None

    def _drop_sent(self, lane: Lane) -> None:
        for port in self._watched.get(lane, ()):  # which the thread of the lane alone looks at
            while (first := self._pop_done(port.under_way)) is not None:
                self._end(first)

    def _pop_done(self, sent: deque[Sent]) -> Sent | None:
        with self._dropping:
            return sent.popleft() if sent and sent[0].pending.is_done() else None

    def _end(self, sent: Sent) -> None:
        self._wait(sent.pending, sent.action)

    # ------------------------------------------------------------------ receiving

    def post(self, a: Action, key: Hashable) -> Incoming:
        """Be ready to receive, so that bytes travel while something else is computed.

        Args:
            a: the receive.
            key: as in :meth:`send`.

        Returns:
            What is to be taken.
        """
        port = self._port(a)
        incoming, posted = Incoming(a, port, key), port.posted
        if port.layout is None:
            posted.append(incoming)
        if port.is_apart:
            self._post_apart(incoming)
        elif port.layout or len(posted) == 1 or self._form(incoming) is not _NOTHING:
            self._receive(incoming)
        # else nobody knows how large it is before the first of its kind has been read
        return incoming

    def _post_apart(self, x: Incoming) -> None:
        """Begin to receive, now if it is known how large it is, or when it is its turn."""
        channel = x.port.ring.channel
        last = self._last.get(channel)
        if x.port.layout is not None and (last is None or last.done()):
            self._receive_apart(x)
            return
        if channel not in self._turns:
            name = f"cyclic-from-{channel.source}"
            self._turns[channel] = ThreadPoolExecutor(1, thread_name_prefix=name)
        x.begun = self._last[channel] = self._turns[channel].submit(self._receive_late, x)

    def take(self, x: Incoming) -> Message:
        """Wait for the message of a receive that was posted, and take it: once.

        Returns:
            What was sent; its tensors share the memory of one buffer that nobody else has.
        """
        if x.port.layout is not None:  # by itself, by whichever lane reads it
            return self._finished(x)
        posted = x.port.posted
        while x.message is None:  # descriptions come in the order of their messages
            first = posted.popleft()
            first.message = self._finished(first)
            if posted and posted[0].content is None and posted[0].begun is None:
                self._receive(posted[0])
        message, x.message = x.message, None
        return message

    def _form(self, x: Incoming) -> _Form:
        return x.port.forms.get(x.key)

    def _receive(self, x: Incoming) -> None:
        layout = x.port.layout
        if layout is None:
            x.form = self._form(x)
            x.data = self._bytes(aligned(NUM_WORDS) + x.form.num_bytes, x.port.ring)
            x.content = self._transport.irecv(x.port.ring, x.data, Part.CONTENT)
            return
        x.buffer = self.room(layout)
        for content in layout.content(x.buffer, with_head=True):
            x.content = self._transport.irecv(x.port.ring, content, Part.CONTENT)

    def _receive_late(self, x: Incoming) -> None:
        with self._transport.aside():
            self._receive_apart(x)

    def _receive_apart(self, x: Incoming) -> None:
        """Begin to receive the content of a message whose turn it is on its channel."""
        assert self._control is not None
        layout = x.port.layout
        if layout is not None:
            x.buffer = self.room(layout)
            x.words = _words(layout.head_bytes)
            x.head = self._control.irecv(x.port.ring, x.words, Part.HEAD)
            for content in layout.content(x.buffer):
                x.content = self._transport.irecv(x.port.ring, content, Part.CONTENT)
            return
        head = _words(aligned(NUM_WORDS))
        self._wait(self._control.irecv(x.port.ring, head, Part.HEAD), x.action)
        x.form = self._described(x, head, self._control)
        if x.form.num_bytes:
            x.data = self._bytes(x.form.num_bytes, x.port.ring)
            x.content = self._transport.irecv(x.port.ring, x.data, Part.CONTENT)

    def _finished(self, x: Incoming) -> Message:
        if x.begun is not None:
            x.begun.result()
        if x.head is not None:
            self._wait(x.head, x.action)
        if x.content is not None:
            self._join(x.content, x.action)
        if x.buffer is not None:
            words = x.buffer.words if x.words is None else x.words.numpy().data
            assert x.port.layout is not None
            return _laid_out(x.buffer, words, x.port.layout.num_marks)
        if x.begun is not None:
            return Message(self._read(x.data, 0, x.form.specs), x.form.facts)
        begins = aligned(NUM_WORDS)
        known = self._form(x)
        form = self._described(x, x.data[:begins], self._transport)
        if form is known:
            return Message(self._read(x.data, begins, form.specs), form.facts)
        data = self._bytes(form.num_bytes, x.port.ring)
        if form.num_bytes:
            self._wait(self._transport.irecv(x.port.ring, data, Part.DESCRIBED), x.action)
        return Message(self._read(data, 0, form.specs), form.facts)

    def _described(self, x: Incoming, head: Tensor, transport: AbstractTransport) -> _Form:
        """Return the form of a message: the last of its key, or the one that is described."""
        is_new, length = unpack_from("<qq", head.cpu().numpy().data)
        if not is_new:
            return self._form(x)
        text = torch.empty(length, dtype=torch.uint8, device=head.device)
        self._wait(transport.irecv(x.port.ring, text, Part.DESCRIPTION), x.action)
        form = _form_from(text.cpu().numpy().tobytes())
        forms = x.port.forms
        forms.put(x.key, form)
        begun = (other for other in x.port.posted if other.content is not None)
        assert all(forms.is_still(other.key, other.form) for other in begun), (
            f"{x.action} has a new form, and a receive behind it was posted with the size of the "
            "old one"
        )
        return form

    def _bytes(self, count: int, ring: Ring) -> Tensor:
        """Return room for a message: of words between hosts in their memory."""
        if ring.channel.is_control:
            return _words(count)
        return torch.empty(count, dtype=torch.uint8, device=self._device)

    def _read(self, data: Tensor, start: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Return the tensors of a message, each where it was on the device or on the host."""
        tensors = views_of(data, start, specs)
        return [
            x if x.is_cpu is s.on_host else x.to("cpu" if s.on_host else self._device)
            for x, s in zip(tensors, specs, strict=True)
        ]


def _words(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)


def _laid_out(buffer: Buffer, words: memoryview, num_marks: int) -> Message:
    """Read a message of one layout where it lies, its head in the host's memory or with it."""
    _, word = unpack_from("<qq", words)
    marks = words[NUM_WORDS : NUM_WORDS + num_marks].tobytes()
    there = list(map(bool, marks)) if b"\0" in marks else None
    return Message(buffer.tensors, None, word, there, buffer)


def _form_of(specs: tuple[TensorSpec, ...], facts: Any) -> _Form:
    text = json.dumps([[spec_to_data(s) for s in specs], facts]).encode()
    return _Form(text, specs, facts, total_bytes(specs))


def _form_from(text: bytes) -> _Form:
    data, facts = json.loads(text)
    specs = tuple(spec_from_data(d) for d in data)
    return _Form(text, specs, facts, total_bytes(specs))
