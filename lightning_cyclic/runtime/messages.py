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
waited for, until as many of its ring are under way as the program was proved with.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from struct import pack, unpack_from
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lightning_cyclic.plan.actions import Action, Payload
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
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport, Part
from lightning_cyclic.runtime.values.specs import TensorSpec, spec_from_data, spec_to_data

_MOST_FORMS = 256  # of one ring: inputs of many sizes must not fill the memory
_LEAST_DEPTH = 2  # one that is under way, and one that is made

Wait = Callable[[AbstractPending, Action], None]


class Message(NamedTuple):
    """Hold what travels.

    Args:
        tensors: in their order.
        facts: what else is to be said of them in terms of JSON; none in messages of one layout.
        word: bits, in messages of one layout.
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

    def put(self, key: Hashable, form: _Form) -> None:
        self._forms.pop(key, None)
        self._forms[key] = form
        if len(self._forms) > _MOST_FORMS:
            del self._forms[next(iter(self._forms))]


class _Incoming:
    """Hold a receive that the program has posted.

    Args:
        action: that posted it.
        ring: on which it comes.
        key: of its form; None where the layout is known.
        buffer: into which it comes, where the layout is known.
    """

    __slots__ = (
        "action", "begun", "buffer", "content", "data", "form", "head", "key", "ring", "words",
    )  # fmt: skip

    def __init__(self, action: Action, ring: Ring, key: Hashable, buffer: Buffer | None) -> None:
        self.action = action
        self.ring = ring
        self.key = key
        self.buffer = buffer
        self.data = torch.empty(0) if buffer is None else buffer.data
        self.form = _NOTHING
        self.content: AbstractPending | None = None  # None until it is known how large it is
        self.head: AbstractPending | None = None  # where it comes by itself, into words
        self.words: Tensor | None = None  # its head, where it does not come with the content
        self.begun: Future[None] | None = None  # where a thread begins it, in its turn


@final
class Messages:
    """Send and receive the messages of one worker.

    Args:
        transport: how bytes travel; None where nobody else is.
        depths: how many sends of a ring may be under way; two of one that is not named.
        wait: waits for bytes and names them if they do not come.
        device: where received tensors live.
    """

    def __init__(
        self,
        transport: AbstractTransport | None,
        depths: Mapping[Ring, int],
        wait: Wait,
        device: torch.device,
    ) -> None:
        if transport is not None:
            self._transport = transport
        self._control = None if transport is None else transport.control
        self._depths = depths
        self._wait = wait
        self._device = device
        self._layouts: dict[tuple[Payload, int], Layout] = {}
        self._sent_forms: dict[Ring, _Forms] = defaultdict(_Forms)
        self._received_forms: dict[Ring, _Forms] = defaultdict(_Forms)
        self._under_way: dict[Ring, deque[Sent]] = defaultdict(deque)
        self._posted: dict[Ring, deque[_Incoming]] = defaultdict(deque)
        # of one layout: each is waited for by itself, by whichever lane reads it
        self._laid_out: dict[Action, _Incoming] = {}
        self._come: dict[Action, Message] = {}  # behind which others of their ring were read
        # where messages have no names, each is received when it is known how large it is, in
        # the order of its channel: in a thread, so that nobody else waits for its head
        self._turns: dict[Channel, ThreadPoolExecutor] = {}

    def layout(self, tensors: Iterable[Tensor], num_marks: int | None = None) -> Layout:
        """Return a layout of buffers on this worker's device."""
        return Layout(tensors, self._device, num_marks)

    def know(self, payload: Payload, j: int, layout: Layout) -> None:
        """Let all messages of a payload and stage have one layout; both ends must say so."""
        self._layouts[payload, j] = layout

    def close(self) -> None:
        """End what runs in the background; messages that have not come are dropped."""
        for turns in self._turns.values():
            turns.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ sending

    def send(self, a: Action, key: Hashable, message: Message) -> None:
        """Begin to send.

        Args:
            a: the action that this carries out.
            key: what messages it is likely to look like; the receiver names the same.
            message: what is sent; its tensors may change as soon as this returns, unless they
                lie in a buffer, which is let go when it has left.
        """
        ring = ring_of(a, self._transport.worker)
        self._make_room(ring)
        if (layout := self._layouts.get((ring.payload, ring.j))) is not None:
            self._send_laid_out(ring, a, message, layout)
        else:
            self._send_described(ring, a, key, message)

    def _send_laid_out(self, ring: Ring, a: Action, message: Message, layout: Layout) -> None:
        buffer = message.buffer
        if buffer is None:
            buffer = self.room(layout)
            buffer.write(message.tensors)
        marks = bytes(message.there) if message.there is not None else b"\1" * layout.num_marks
        words = pack("<qq", 0, message.word) + marks
        if self._is_apart(ring):
            head = _words(buffer.head_bytes)
            write_words_to(head, words)
            self._begin(ring, a, head, Part.HEAD, None)
            if content := buffer.content:
                self._begin(ring, a, content[0], Part.CONTENT, buffer)
        else:
            buffer.write_words(words)
            self._begin(ring, a, buffer.data, Part.CONTENT, buffer)
        if message.buffer is None or message.leaves:
            buffer.let_go()

    def _send_described(self, ring: Ring, a: Action, key: Hashable, message: Message) -> None:
        tensors = message.tensors
        known = self._sent_forms[ring].get(key)
        specs = tuple(map(sent_spec, tensors))
        is_new = known is _NOTHING or specs != known.specs or message.facts != known.facts
        form = _form_of(specs, message.facts) if is_new else known
        self._sent_forms[ring].put(key, form)
        apart = self._is_apart(ring)
        begins = aligned(NUM_WORDS)
        data = _words(begins) if apart else self._bytes(begins + known.num_bytes, ring)
        write_words_to(data, pack("<qq", is_new, len(form.text)))
        if not is_new and not apart:
            write_into(data, begins, specs, tensors)
        self._begin(ring, a, data, Part.HEAD if apart else Part.CONTENT, None)
        if is_new:
            text = torch.frombuffer(bytearray(form.text), dtype=torch.uint8)
            text = text if apart else text.to(data.device)
            self._begin(ring, a, text, Part.DESCRIPTION, None)
        if (is_new or apart) and form.num_bytes:
            content = self._bytes(form.num_bytes, ring)
            write_into(content, 0, specs, tensors)
            self._begin(ring, a, content, Part.CONTENT if apart else Part.DESCRIBED, None)

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
            if all(sent.pending.is_done() for sent in buffer.sent):
                buffer.sent = []
                return buffer
            layout.spare.append(buffer)
        return layout.new()

    def wait_for(self, buffer: Buffer) -> None:
        """Wait until what is under way from a buffer has left."""
        for sent in buffer.sent:
            self._end(sent)
        buffer.sent = []

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        for sent in list(self._under_way.values()):
            while sent:
                self._end(sent.popleft())

    def _begin(
        self, ring: Ring, a: Action, data: Tensor, part: Part, buffer: Buffer | None
    ) -> None:
        by_control = part is not Part.CONTENT and self._is_apart(ring)
        transport = self._control if by_control and self._control else self._transport
        sent = Sent(a, transport.isend(ring, data, part), data)
        if buffer is not None:
            buffer.sent = [*buffer.sent[-1:], sent]
        self._under_way[ring].append(sent)

    def _make_room(self, ring: Ring) -> None:
        """Wait for the oldest messages of a ring that is full: the proof knows of no more."""
        sent, most = self._under_way[ring], self._depths.get(ring, _LEAST_DEPTH)
        if len(sent) < most:  # each action has sent one part or more
            return
        actions = list(dict.fromkeys([x.action for x in sent]))
        for oldest in actions[: max(len(actions) - most + 1, 0)]:
            while sent and sent[0].action is oldest:
                self._end(sent.popleft())

    def _end(self, sent: Sent) -> None:
        self._wait(sent.pending, sent.action)

    def _is_apart(self, ring: Ring) -> bool:
        """Say whether heads and descriptions travel by control, as content has no name."""
        return self._control is not None and not ring.channel.is_control

    # ------------------------------------------------------------------ receiving

    def post(self, a: Action, key: Hashable) -> None:
        """Be ready to receive, so that bytes travel while something else is computed.

        Args:
            a: the receive.
            key: as in :meth:`send`.
        """
        ring = ring_of(a, self._transport.worker)
        layout = self._layouts.get((ring.payload, ring.j))
        buffer = None if layout is None else self.room(layout)
        incoming, posted = _Incoming(a, ring, key, buffer), self._posted[ring]
        if buffer is None:
            posted.append(incoming)
        else:
            self._laid_out[a] = incoming
        if self._is_apart(ring):
            if ring.channel not in self._turns:
                name = f"cyclic-from-{ring.channel.source}"
                self._turns[ring.channel] = ThreadPoolExecutor(1, thread_name_prefix=name)
            incoming.begun = self._turns[ring.channel].submit(self._receive_apart, incoming)
        elif buffer is not None or len(posted) == 1 or self._form(incoming) is not _NOTHING:
            self._receive(incoming)
        # else nobody knows how large it is before the first of its kind has been read

    def take(self, a: Action) -> Message:
        """Wait for the message of a receive that was posted.

        Returns:
            What was sent; its tensors share the memory of one buffer that nobody else has.
        """
        if (incoming := self._laid_out.pop(a, None)) is not None:
            return self._finished(incoming)
        posted = self._posted[ring_of(a, self._transport.worker)]
        while a not in self._come:  # descriptions come in the order of their messages
            first = posted.popleft()
            self._come[first.action] = self._finished(first)
            if posted and posted[0].content is None and posted[0].begun is None:
                self._receive(posted[0])
        return self._come.pop(a)

    def _form(self, x: _Incoming) -> _Form:
        return self._received_forms[x.ring].get(x.key)

    def _receive(self, x: _Incoming) -> None:
        if x.buffer is None:
            x.data = self._bytes(aligned(NUM_WORDS) + self._form(x).num_bytes, x.ring)
        x.content = self._transport.irecv(x.ring, x.data, Part.CONTENT)

    def _receive_apart(self, x: _Incoming) -> None:
        """Begin to receive the content of a message whose turn it is on its channel."""
        assert self._control is not None
        if x.buffer is not None:
            x.words = _words(x.buffer.head_bytes)
            x.head = self._control.irecv(x.ring, x.words, Part.HEAD)
            if content := x.buffer.content:
                x.content = self._transport.irecv(x.ring, content[0], Part.CONTENT)
            return
        head = _words(aligned(NUM_WORDS))
        self._wait(self._control.irecv(x.ring, head, Part.HEAD), x.action)
        x.form = self._described(x, head, self._control)
        if x.form.num_bytes:
            x.data = self._bytes(x.form.num_bytes, x.ring)
            x.content = self._transport.irecv(x.ring, x.data, Part.CONTENT)

    def _finished(self, x: _Incoming) -> Message:
        if x.begun is not None:
            x.begun.result()
        for pending in (x.head, x.content):
            if pending is not None:
                self._wait(pending, x.action)
        if x.buffer is not None:
            words = x.buffer.words if x.words is None else x.words.numpy().data
            return _laid_out(x.buffer, words, self._layouts[x.ring.payload, x.ring.j].num_marks)
        if x.begun is not None:
            return Message(self._read(x.data, 0, x.form.specs), x.form.facts)
        begins = aligned(NUM_WORDS)
        known = self._form(x)
        form = self._described(x, x.data[:begins], self._transport)
        if form is known:
            return Message(self._read(x.data, begins, form.specs), form.facts)
        data = self._bytes(form.num_bytes, x.ring)
        if form.num_bytes:
            self._wait(self._transport.irecv(x.ring, data, Part.DESCRIBED), x.action)
        return Message(self._read(data, 0, form.specs), form.facts)

    def _described(self, x: _Incoming, head: Tensor, transport: AbstractTransport) -> _Form:
        """Return the form of a message: the last of its key, or the one that is described."""
        is_new, length = unpack_from("<qq", head.cpu().numpy().data)
        if not is_new:
            return self._form(x)
        text = torch.empty(length, dtype=torch.uint8, device=head.device)
        self._wait(transport.irecv(x.ring, text, Part.DESCRIPTION), x.action)
        form = _form_from(text.cpu().numpy().tobytes())
        self._received_forms[x.ring].put(x.key, form)
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
