"""Parcels: tensors of sizes that may change, as messages of bytes.

Sender and receiver remember, for each key, what the last parcel looked like. As long as nothing
changes, a parcel is one message. When something does, that message says so, and two more bring
the description and the content.

    unchanged   [0, - | content as described before]
    changed     [1, length | (unused)]   [description as JSON text]   [content]
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lightning_cyclic.plan.actions import Action, Payload
from lightning_cyclic.runtime.partial_step.ghosts import TensorSpec
from lightning_cyclic.runtime.partial_step.tape import spec_from_data, spec_to_data
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport

_HEAD_BYTES = 64  # two numbers; the content behind them stays aligned
_ALIGNMENT = 64  # kernels may take another way on unaligned memory
_MOST_SPREAD = 2  # a tensor that spans more of its storage than this is packed densely
_MOST_FORMS = 256  # of one edge: inputs of many sizes must not fill the memory
_DESCRIPTION = 1 << 18  # added to the channel of the second and third message

Wait = Callable[[AbstractPending, Action], None]


class Parcel(NamedTuple):
    """Hold tensors, and what else is to be said of them in terms of JSON."""

    tensors: Sequence[Tensor]
    facts: Any = None


class _Form(NamedTuple):
    """Say what a parcel looks like."""

    text: bytes
    specs: tuple[TensorSpec, ...]
    facts: Any
    num_bytes: int


_NOTHING = _Form(b"", (), None, 0)


@final
class _Forms:
    """Remember the forms of few keys; both ends of an edge forget the same."""

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


@final
class ParcelPost:
    """Send and receive the parcels of one worker.

    Args:
        transport: how bytes travel.
        wait: waits for a message and names it if it does not come.
        device: where received tensors live.
    """

    def __init__(self, transport: AbstractTransport, wait: Wait, device: torch.device) -> None:
        self._transport = transport
        self._wait = wait
        self._device = device
        self._sent: dict[Hashable, _Forms] = defaultdict(_Forms)
        self._received: dict[Hashable, _Forms] = defaultdict(_Forms)
        self._under_way: list[tuple[AbstractPending, Tensor, Action]] = []
        self._posted: dict[
            tuple[Payload | None, int, int | None], tuple[Hashable, Any, Tensor]
        ] = {}

    def send(self, a: Action, key: Hashable, parcel: Parcel) -> None:
        """Begin to send.

        Args:
            a: the action that this carries out.
            key: what parcels it is likely to look like; the receiver names the same.
            parcel: what is sent; its tensors may change as soon as this returns.
        """
        forms = self._sent[a.payload, a.peer, a.j]
        known = forms.get(key)
        specs = tuple(_sent_spec(x) for x in parcel.tensors)
        is_new = known is _NOTHING or specs != known.specs or parcel.facts != known.facts
        form = _form_of(specs, parcel.facts) if is_new else known
        head = torch.empty(_HEAD_BYTES + known.num_bytes, dtype=torch.uint8, device=self._device)
        numbers = torch.tensor([int(is_new), len(form.text)]).view(torch.uint8)
        head[: len(numbers)].copy_(numbers)
        if not is_new:
            _write(head, _HEAD_BYTES, form.specs, parcel.tensors)
        self._begin(a, a.j, head)
        if is_new:
            forms.put(key, form)
            text = torch.frombuffer(bytearray(form.text), dtype=torch.uint8).to(self._device)
            self._begin(a, a.j + _DESCRIPTION, text)
            if form.num_bytes:
                data = torch.empty(form.num_bytes, dtype=torch.uint8, device=self._device)
                _write(data, 0, form.specs, parcel.tensors)
                self._begin(a, a.j + _DESCRIPTION, data)

    def post(self, a: Action, key: Hashable) -> None:
        """Be ready to receive, so that bytes travel while something else is computed."""
        place = (a.payload, a.j, a.peer)
        if place not in self._posted:
            known = self._received[a.payload, a.peer, a.j].get(key)
            size = _HEAD_BYTES + known.num_bytes
            data = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._posted[place] = (key, self._receive(a, a.j, data), data)

    def receive(self, a: Action, key: Hashable) -> Parcel:
        """Wait for a parcel.

        Returns:
            What was sent; its tensors share the memory of one buffer that nobody else has.
        """
        self.post(a, key)
        _, pending, data = self._posted.pop((a.payload, a.j, a.peer))
        self._wait(pending, a)
        is_new, length = data[:16].cpu().view(torch.int64).tolist()
        forms = self._received[a.payload, a.peer, a.j]
        if not is_new:
            form = forms.get(key)
            return Parcel(_read(data, _HEAD_BYTES, form.specs), form.facts)
        text = torch.empty(length, dtype=torch.uint8, device=self._device)
        self._wait(self._receive(a, a.j + _DESCRIPTION, text), a)
        form = _form_from(text.cpu().numpy().tobytes())
        forms.put(key, form)
        data = torch.empty(form.num_bytes, dtype=torch.uint8, device=self._device)
        if form.num_bytes:
            self._wait(self._receive(a, a.j + _DESCRIPTION, data), a)
        return Parcel(_read(data, 0, form.specs), form.facts)

    def settle(self, must_have_arrived: Callable[[Action], bool] | None = None) -> None:
        """Wait for sends: for those that must have arrived by now, or all."""
        still = []
        for pending, data, a in self._under_way:
            if must_have_arrived is None or must_have_arrived(a):
                self._wait(pending, a)
            else:
                still.append((pending, data, a))
        self._under_way = still

    def _begin(self, a: Action, channel: int, data: Tensor) -> None:
        assert a.payload is not None
        assert a.peer is not None
        pending = self._transport.isend(a.payload, channel, a.peer, data)
        self._under_way.append((pending, data, a))

    def _receive(self, a: Action, channel: int, data: Tensor) -> AbstractPending:
        assert a.payload is not None
        assert a.peer is not None
        return self._transport.irecv(a.payload, channel, a.peer, data)


def _form_of(specs: tuple[TensorSpec, ...], facts: Any) -> _Form:
    text = json.dumps([[spec_to_data(s) for s in specs], facts]).encode()
    return _Form(text, specs, facts, _total_bytes(specs))


def _form_from(text: bytes) -> _Form:
    data, facts = json.loads(text)
    specs = tuple(spec_from_data(d) for d in data)
    return _Form(text, specs, facts, _total_bytes(specs))


def _sent_spec(x: Tensor) -> TensorSpec:
    """Describe the tensor that the receiver makes: with the same strides, where not wasteful."""
    spec = TensorSpec.of(x)
    if _span(spec) <= _MOST_SPREAD * x.numel():
        return spec
    return spec._replace(stride=torch.empty_like(x, device="meta").stride())


def _span(spec: TensorSpec) -> int:
    """Count the elements of storage from a tensor's first to its last."""
    if 0 in spec.size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(spec.size, spec.stride, strict=True))


def _num_bytes(spec: TensorSpec) -> int:
    return -(-_span(spec) * spec.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _total_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(map(_num_bytes, specs))


def _views(data: Tensor, start: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Lay tensors into a buffer; they are no views of it in autograd's eyes."""
    made = []
    for spec in specs:
        x = torch.empty(0, dtype=spec.dtype, device=data.device)
        offset = start // spec.dtype.itemsize
        made.append(x.set_(data.untyped_storage(), offset, spec.size, spec.stride))
        start += _num_bytes(spec)
    return made


def _write(
    data: Tensor, start: int, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]
) -> None:
    with torch.no_grad():
        for view, spec, x in zip(_views(data, start, specs), specs, tensors, strict=True):
            if _overlaps(spec):  # an expanded tensor: its span of storage, once
                span = (_span(spec),)
                view.as_strided(span, (1,)).copy_(x.as_strided(span, (1,)))
            else:
                view.copy_(x)


def _overlaps(spec: TensorSpec) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(spec.size, spec.stride, strict=True))


def _read(data: Tensor, start: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
    tensors = _views(data, start, specs)
    return [
        x.cpu() if s.on_host and x.device.type != "cpu" else x
        for x, s in zip(tensors, specs, strict=True)
    ]
