"""The mail of one worker: what comes from other stages and replicas, and what goes to them.

    A, G     packets to the next stage, gradients to the stage before
    W, S, T  gradients of tied parameters; sums over replicas
    R        buffers that training changes
    P, V     new parameters, to replicas and to the stages that share them

What passes between two stages of one worker lies in the same places, without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.partial_step.ghosts import Handle
from lightning_cyclic.runtime.partial_step.holdings import Holdings
from lightning_cyclic.runtime.partial_step.packets import Packet
from lightning_cyclic.runtime.partial_step.parcels import Parcel, ParcelPost
from lightning_cyclic.runtime.partial_step.tape import Tape

Key = tuple[int, int, int]  # step, micro-batch, stage
ReadState = Callable[[Sequence[nn.Parameter]], tuple[list[Tensor], Any]]
WriteState = Callable[[Sequence[nn.Parameter], Sequence[Tensor], Any], None]
_MOST_KINDS = 256  # of batches, whose descriptions are kept


@final
class Mail:
    """Hold what has come, and send and receive.

    Args:
        post: how parcels travel.
        holdings: the parameters that this worker has.
        plan: says who runs what.
        kind_of: what the batch of an action's micro-batch looks like.
    """

    def __init__(
        self, post: ParcelPost, holdings: Holdings, plan: Plan, kind_of: Callable[[Action], str]
    ) -> None:
        self.packets: dict[Key, Packet] = {}  # by the stage that takes them
        self.grads: dict[Key, Mapping[Handle, Tensor]] = {}  # by the stage that takes them
        self.tied: dict[tuple[int, int, str], Tensor] = {}  # step, micro-batch, parameter
        self.read_state: ReadState | None = None  # what goes with parameters to replicas
        self.write_state: WriteState | None = None
        self._post = post
        self._holdings = holdings
        self._plan = plan
        self._kind = kind_of
        self._tapes: dict[tuple[str, int], tuple[Tape, ...]] = {}
        self._facts: dict[tuple[str, int], tuple[Any, Any]] = {}

    def send(self, a: Action) -> None:
        """Begin to send what an action says."""
        _SENDS[_payload(a)](self, a)

    def receive(self, actions: Sequence[Action], n: int) -> None:
        """Take in the message of an action, and post the next of the kind.

        Args:
            actions: that are carried out.
            n: place of the action among them.
        """
        _RECEIVES[_payload(actions[n])](self, actions[n])
        done = actions[n]
        if done.payload in (Payload.A, Payload.G):
            like = (Kind.RECV, done.payload, done.peer, done.j)
            after = (a for a in actions[n + 1 :] if (a.kind, a.payload, a.peer, a.j) == like)
            if (a := next(after, None)) is not None:
                self._post.post(a, self._kind(a))

    def remembered(self, a: Action, tapes: tuple[Tape, ...]) -> tuple[Tape, ...]:
        """Return the same object for equal tapes, so that comparing them costs nothing."""
        key = (self._kind(a), a.j)
        if self._tapes.get(key) != tapes:
            _keep_few(self._tapes)
            self._tapes[key] = tapes
        return self._tapes[key]

    def keep_tied(self, t: int, i: int, taken: Mapping[str, Tensor]) -> None:
        """Add gradients of tied parameters: those of later stages come first in the sum."""
        for name, grad in taken.items():
            sofar = self.tied.get((t, i, name))
            self.tied[t, i, name] = grad if sofar is None else sofar + grad

    def _send_packet(self, a: Action) -> None:
        assert a.i is not None
        packet = self.packets.pop((a.t, a.i, a.j))
        key = self._kind(a)
        known = self._facts.get((key, a.j))
        tag = (
            tuple(packet.tensors), packet.with_grad, packet.tapes, packet.used, packet.learning,
            packet.shared, packet.stale,
        )  # fmt: skip
        if known is None or known[0] != tag:
            _keep_few(self._facts)
            known = self._facts[key, a.j] = (tag, packet.facts())
        self._post.send(a, key, Parcel(list(packet.tensors.values()), known[1]))

    def _receive_packet(self, a: Action) -> None:
        assert a.i is not None
        key = self._kind(a)
        parcel = self._post.receive(a, key)
        known = self._facts.get((key, a.j))
        tapes = self._tapes.get((key, a.j - 1)) if known and known[0] is parcel.facts else None
        packet = Packet.of(parcel.tensors, parcel.facts, tapes)
        _keep_few(self._facts)
        _keep_few(self._tapes)
        self._facts[key, a.j] = (parcel.facts, None)
        self._tapes[key, a.j - 1] = packet.tapes
        self.packets[a.t, a.i, a.j] = packet

    def _send_grads(self, a: Action) -> None:
        assert a.i is not None
        grads = self.grads.pop((a.t, a.i, a.j))
        handles = sorted(grads)
        facts = [list(h) for h in handles]
        self._post.send(a, self._kind(a), Parcel([grads[h] for h in handles], facts))

    def _receive_grads(self, a: Action) -> None:
        assert a.i is not None
        parcel = self._post.receive(a, self._kind(a))
        handles = [(h[0], h[1], h[2]) for h in parcel.facts]
        self.grads[a.t, a.i, a.j] = dict(zip(handles, parcel.tensors, strict=True))
        behind = (a.t, a.i)  # its activations and all before them have been used there
        self._post.settle(
            lambda b: b.payload is Payload.A and b.i is not None and (b.t, b.i) <= behind
        )

    def _send_tied(self, a: Action) -> None:
        assert a.i is not None
        lent = [n for n, _ in self._holdings.lent(a.j) if (a.t, a.i, n) in self.tied]
        tensors = [self.tied.pop((a.t, a.i, n)) for n in lent]
        self._post.send(a, None, Parcel(tensors, lent))

    def _receive_tied(self, a: Action) -> None:
        assert a.i is not None
        parcel = self._post.receive(a, None)
        taken = dict(zip(parcel.facts, parcel.tensors, strict=True))
        self.keep_tied(a.t, a.i, taken)

    def _send_sum(self, a: Action) -> None:
        facts, tensors = self._holdings.take_sum(a.j)
        self._post.send(a, None, Parcel(tensors, facts))

    def _receive_sum(self, a: Action) -> None:
        parcel = self._post.receive(a, None)
        self._holdings.add_to(a.j, parcel.facts, parcel.tensors)

    def _send_parameters(self, a: Action) -> None:
        stage = self._holdings.owned(a.j)
        state, facts = self.read_state(stage) if self.read_state else ([], None)
        self._post.send(a, None, Parcel([*(p.detach() for p in stage), *state], facts))

    def _receive_parameters(self, a: Action) -> None:
        stage = self._holdings.owned(a.j)
        parcel = self._post.receive(a, None)
        _copy(stage, parcel.tensors[: len(stage)])
        if self.write_state is not None:
            self.write_state(stage, parcel.tensors[len(stage) :], parcel.facts)

    def _send_buffers(self, a: Action) -> None:
        self._post.send(a, None, Parcel(self._holdings.changing(a.j)))

    def _receive_buffers(self, a: Action) -> None:
        _copy(self._holdings.changing(a.j), self._post.receive(a, None).tensors)

    def _send_tied_values(self, a: Action) -> None:
        assert a.peer is not None
        shared = self._holdings.shared(a.j, stages_of(self._plan, a.peer))
        self._post.send(a, None, Parcel([p.detach() for p in shared]))

    def _receive_tied_values(self, a: Action) -> None:
        shared = self._holdings.shared(a.j, self._holdings.stages)
        _copy(shared, self._post.receive(a, None).tensors)


def stages_of(plan: Plan, worker: int) -> tuple[int, ...]:
    """List the stages that a worker runs."""
    workers_of = plan.axes.placement.workers_of
    return tuple(j for j in range(plan.num_stages) if worker in workers_of(j))


def _copy(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    # graphs that hold them are over, or do not look at them (statistics)
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(parameters)):
        for p, x in zip(parameters, values, strict=True):
            p.copy_(x)


def _keep_few(found: dict[Any, Any]) -> None:
    """Forget the oldest entry where there are many: inputs of many sizes must not fill memory."""
    if len(found) >= _MOST_KINDS:
        del found[next(iter(found))]


def _payload(a: Action) -> Payload:
    assert a.payload is not None
    return a.payload


_Step = Callable[[Mail, Action], None]
_SENDS: dict[Payload, _Step] = {
    Payload.A: Mail._send_packet,
    Payload.G: Mail._send_grads,
    Payload.W: Mail._send_tied,
    Payload.S: Mail._send_sum,
    Payload.T: Mail._send_sum,
    Payload.R: Mail._send_buffers,
    Payload.P: Mail._send_parameters,
    Payload.V: Mail._send_tied_values,
}
_RECEIVES: dict[Payload, _Step] = {
    Payload.A: Mail._receive_packet,
    Payload.G: Mail._receive_grads,
    Payload.W: Mail._receive_tied,
    Payload.S: Mail._receive_sum,
    Payload.T: Mail._receive_sum,
    Payload.R: Mail._receive_buffers,
    Payload.P: Mail._receive_parameters,
    Payload.V: Mail._receive_tied_values,
}
