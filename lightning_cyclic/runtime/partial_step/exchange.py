"""What the stages of one worker exchange, with each other and with those of other workers.

    A, G      what crosses from a stage to the next one, and its gradients
    W, S, T   gradients of tied parameters; sums over micro-batches and replicas
    R, C      module buffers that training changes
    P, V      new parameters, to replicas and to the stages that share them
    D, L      the batch of a step, and what came out of it
    N         norms of gradients

What passes between two stages of one worker lies in the same places, without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from lightning_cyclic.plan.actions import GO_BACK, MAKE_GRADIENTS, Action, Kind, Payload
from lightning_cyclic.plan.roles import completes, gradient_sources
from lightning_cyclic.runtime.bits import put, unseen
from lightning_cyclic.runtime.codecs.coded import Codes
from lightning_cyclic.runtime.gradient_store import Sum, refuse_sparse
from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.partial_step.batches import Batches
from lightning_cyclic.runtime.partial_step.coded_crossings import CodedCrossings, Sent
from lightning_cyclic.runtime.partial_step.ghosts import Handle
from lightning_cyclic.runtime.partial_step.graph_tier import GraphTier
from lightning_cyclic.runtime.partial_step.own_stages import OwnStages
from lightning_cyclic.runtime.partial_step.packets import Gradients, Packet
from lightning_cyclic.runtime.partial_step.stage_step import StageStep
from lightning_cyclic.runtime.partial_step.tape import Tape
from lightning_cyclic.runtime.partial_step.updates import Updates
from lightning_cyclic.runtime.state_tier import StateTier

Key = tuple[int, int, int]  # step, micro-batch, stage
_MOST_KINDS = 256  # of batches, whose descriptions are kept


@final
class Exchange:
    """Run the stages of one worker on what has come, and keep what goes to others."""

    def __init__(
        self,
        own: OwnStages,
        step: StageStep,
        updates: Updates,
        batches: Batches,
    ) -> None:
        plan, config = own.plan, own.config
        self._batches = batches
        self._updates = updates
        self._conclusions = updates.conclusions
        self._tells_norms = own.flows and plan.norms != "none"
        self._read_state = config.read_state if own.shares_state else None
        self._write_state = config.write_state if own.shares_state else None
        self._forms = config.forms
        self._plan = plan
        self._own = own
        self._worker = own.worker
        self._step = step
        self._ownership = own.ownership
        self._codes = config.codes
        codec = config.activations
        say = config.say
        self._crossings = None if codec is None else CodedCrossings(codec, own.device, say)
        self._grads = updates.grads
        self._norms = updates.norms
        self._packets: dict[Key, Packet] = {}  # by the stage that takes them
        self._crossed: dict[Key, Sent] = {}  # by the stage that takes them
        # of parameters of earlier stages: step, micro-batch, name; or what came from a worker
        self._tied: dict[tuple[int, int, str], Tensor] = {}
        self._tied_from: dict[tuple[int, int, int, int], dict[str, Tensor]] = {}
        self._tapes: dict[tuple[str, int], tuple[Tape, ...]] = {}
        self._facts: dict[tuple[str, int], tuple[Any, Any]] = {}

    # ------------------------------------------------------------------ F, B, ADD

    def forward(self, a: Action) -> None:
        assert a.i is not None
        packet = self._step.forward(a, lambda: self._packet_for(a))
        if packet is not None:
            packet.tapes = self._remembered(a, packet.tapes)
            if self._crossings is not None and a.t >= 0:  # and not in an evaluation
                self._crossings.encode(_key(a), packet, self._step.size_of(a))
            self._packets[a.t, a.i, a.j + 1] = packet

    def _packet_for(self, a: Action) -> Packet:
        packet = self._packets.pop(_key(a), None) or Packet()
        if self._crossings is None or a.t < 0 or a.j == 0:
            return packet
        return self._crossings.decode(_key(a), packet)

    def backward(self, a: Action) -> None:
        """Run B, I or W, and add what gradients it makes of weights to the sum of the step."""
        assert a.i is not None
        grads = self._grads
        if self._codes is not None:
            self._codes.begin(a.i)
        adding = grads.adding if self._codes is None else grads.apart  # which ADD encodes
        with adding(a.t, a.j):
            if a.kind is Kind.W:
                gone = self._step.weight_gradients(a, self._tied_gradients(a))
            else:
                gone = self._step.backward(a, lambda: self._gradients_for(a))
        if a.kind in GO_BACK and a.j > 0:
            self._crossed[a.t, a.i, a.j - 1] = self._sent_of(a, gone.crossed)
        if a.kind in MAKE_GRADIENTS:
            self._keep_tied(a, gone.tied)
            self._look_if_complete(a)

    def add(self, a: Action) -> None:
        """Add the own gradients to the sum that came, which comes first in the addition."""
        self._grads.add(a.t, a.j, None if self._codes is None else self._coded(self._codes, a))
        self._look_if_complete(a)

    def _coded(self, codes: Codes, a: Action) -> Sum:
        """Return the gradients of a micro-batch as its owner would have them of a worker."""
        assert a.i is not None
        own = self._grads.take_own(a.t, a.j)
        refuse_sparse(a.j, *own.grads)
        named = zip(self._own.cuts.parameters[a.j], own.grads, strict=True)
        return own._replace(
            grads=[None if x is None else codes.through(a.i, n, x) for n, x in named]
        )

    def _look_if_complete(self, a: Action) -> None:
        if self._tells_norms and completes(self._plan, a, self._worker):
            self._updates.complete(a.t, a.j)

    def _gradients_for(self, a: Action) -> Gradients:
        sent = self._crossed.pop(_key(a), {})
        if self._crossings is None or a.j == self._plan.num_stages - 1:
            crossed = {h: x for h, (x,) in sent.items()}
        else:
            crossed = self._crossings.decode_gradients(_key(a), sent)
        return Gradients(crossed, self._tied_gradients(a) if a.kind is Kind.B else {})

    def _sent_of(self, a: Action, crossed: Mapping[Handle, Tensor]) -> Sent:
        if self._crossings is None:
            return {h: (x,) for h, x in crossed.items()}
        return self._crossings.encode_gradients(_key(a), crossed)

    def _tied_gradients(self, a: Action) -> dict[str, Tensor]:
        """Take what later stages have for the parameters of a stage, own ones and others'."""
        assert a.i is not None
        if not self._ownership.has_ties:
            return {}
        for source in gradient_sources(self._plan, a, self._worker):
            self._keep_tied(a, self._tied_from.pop((a.t, a.i, a.j, source), {}))
        return self._lent_gradients(a)

    def _lent_gradients(self, a: Action) -> dict[str, Tensor]:
        """Take what later stages have for the parameters of a stage, as autograd adds to it."""
        assert a.i is not None
        lent = [(n, p) for n, p in self._ownership.lent(a.j) if (a.t, a.i, n) in self._tied]
        return {n: self._forms.as_weight(p, self._tied.pop((a.t, a.i, n))) for n, p in lent}

    def _keep_tied(self, a: Action, taken: Mapping[str, Tensor]) -> None:
        """Add gradients of tied parameters: those of later stages come first in the sum."""
        assert a.i is not None
        for name, grad in taken.items():
            sofar = self._tied.get((a.t, a.i, name))
            self._tied[a.t, a.i, name] = grad if sofar is None else sofar + grad

    # ------------------------------------------------------------------ messages

    def key(self, a: Action) -> Hashable:
        """Return what the messages of an action are likely to look like."""
        return self._step.kind_of(a) if a.payload in (Payload.A, Payload.G) else None

    def give(self, a: Action) -> Message:
        assert a.payload is not None
        give, _ = _WAYS[a.payload]
        return give(self, a)

    def free(self, a: Action) -> None:
        """Drop what is at home; weights of a pipeline are where they are used."""
        if (tier := self._updates.tiers.of(a.payload)) is not None:
            tier.free(a.j)
            if not tier.leaving():  # then rooms are in no plan until the next update
                tier.rest()
        elif self._step.graphs is not None:
            self._step.graphs.free(a)

    def move(self, a: Action) -> None:
        if (tier := self._tier_of(a)) is not None:
            tier.move(a)

    def hold(self, a: Action) -> None:
        if (tier := self._tier_of(a)) is not None:
            tier.hold(a)

    def _tier_of(self, a: Action) -> GraphTier | StateTier | None:
        """Return what moves optimizer state, or what forwards leave."""
        return self._updates.tiers.of(a.payload) or self._step.graphs

    def let_go(self, a: Action) -> None:
        """Have no lanes that send."""

    def take(self, a: Action, message: Message) -> None:
        assert a.payload is not None
        _, take = _WAYS[a.payload]
        take(self, a, message)

    def _give_packet(self, a: Action) -> Message:
        assert a.i is not None
        packet = self._packets.pop((a.t, a.i, a.j))
        key = self._step.kind_of(a)
        known = self._facts.get((key, a.j))
        packet.note_spread()
        tag = packet.tag()
        if known is None or known[0] != tag:
            _keep_few(self._facts)
            known = self._facts[key, a.j] = (tag, packet.facts())
        return Message(packet.sent(), known[1])

    def _take_packet(self, a: Action, message: Message) -> None:
        assert a.i is not None
        key = self._step.kind_of(a)
        known = self._facts.get((key, a.j))
        tapes = self._tapes.get((key, a.j - 1)) if known and known[0] is message.facts else None
        packet = Packet.of(message.tensors, message.facts, tapes)
        _keep_few(self._facts)
        _keep_few(self._tapes)
        self._facts[key, a.j] = (message.facts, None)
        self._tapes[key, a.j - 1] = packet.tapes
        self._packets[a.t, a.i, a.j] = packet

    def _remembered(self, a: Action, tapes: tuple[Tape, ...]) -> tuple[Tape, ...]:
        """Return the same object for equal tapes, so that comparing them costs nothing."""
        key = (self._step.kind_of(a), a.j)
        if self._tapes.get(key) != tapes:
            _keep_few(self._tapes)
            self._tapes[key] = tapes
        return self._tapes[key]

    def _give_crossed(self, a: Action) -> Message:
        assert a.i is not None
        sent = self._crossed.pop((a.t, a.i, a.j))
        handles = sorted(sent)
        facts = [[*h, len(sent[h])] for h in handles]
        return Message([x for h in handles for x in sent[h]], facts)

    def _take_crossed(self, a: Action, message: Message) -> None:
        assert a.i is not None
        came = iter(message.tensors)
        self._crossed[a.t, a.i, a.j] = {
            (region, event, leaf): list(islice(came, num))
            for region, event, leaf, num in message.facts
        }

    def _give_tied(self, a: Action) -> Message:
        assert a.i is not None
        lent = [n for n, _ in self._ownership.lent(a.j) if (a.t, a.i, n) in self._tied]
        grads = [self._tied.pop((a.t, a.i, n)) for n in lent]
        refuse_sparse(a.j, *grads)
        return Message(grads, lent)

    def _take_tied(self, a: Action, message: Message) -> None:
        assert a.i is not None
        assert a.peer is not None
        taken = dict(zip(message.facts, message.tensors, strict=True))
        self._tied_from[a.t, a.i, a.j, a.peer] = taken

    def _give_sum(self, a: Action) -> Message:
        grads = self._grads.take(a.t, a.j).grads
        refuse_sparse(a.j, *grads)
        places = [k for k, grad in enumerate(grads) if grad is not None]
        narrowed = self._grads.dtypes.narrowed
        return Message([narrowed(grad) for grad in grads if grad is not None], places)

    def _take_sum(self, a: Action, message: Message) -> None:
        self._grads.put(a.t, a.j, Sum(self._placed(a.j, message)))

    def _take_total(self, a: Action, message: Message) -> None:
        self._grads.put(a.t, a.j, Sum(self._placed(a.j, message)))
        self._look_if_complete(a)

    def _placed(self, j: int, message: Message) -> list[Tensor | None]:
        by_place = dict(zip(message.facts, message.tensors, strict=True))
        return [by_place.get(k) for k in range(len(self._ownership.owned(j)))]

    def _give_parameters(self, a: Action) -> Message:
        stage, read = self._ownership.owned(a.j), self._read_state
        state, facts = read(stage) if read else ([], None)
        sent = (self._forms.compress(p, p.detach()) for p in stage)
        return Message([*sent, *state], facts)

    def _take_parameters(self, a: Action, message: Message) -> None:
        self._updates.begin_version(a)
        stage, write = self._ownership.owned(a.j), self._write_state
        self._write(stage, message.tensors[: len(stage)])
        if write is not None:
            write(stage, message.tensors[len(stage) :], message.facts)

    def _write(self, parameters: Sequence[nn.Parameter], sent: Sequence[Tensor]) -> None:
        # graphs that hold them are over, or do not look at them
        with torch.no_grad(), unseen(parameters):
            for p, x in zip(parameters, sent, strict=True):
                self._forms.expand_into(p, x, p.detach())

    def _give_tied_values(self, a: Action) -> Message:
        assert a.peer is not None
        shared = self._ownership.shared(a.j, self._own.stages_of(a.peer))
        return Message([self._forms.compress(p, p.detach()) for p in shared])

    def _take_tied_values(self, a: Action, message: Message) -> None:
        self._updates.begin_version(a)
        self._write(self._ownership.shared(a.j, self._ownership.stages), message.tensors)

    def _give_buffers(self, a: Action) -> Message:
        return Message(self._ownership.changing(a.j))

    def _take_buffers(self, a: Action, message: Message) -> None:
        put(self._ownership.changing(a.j), message.tensors)

    def _give_norms(self, a: Action) -> Message:
        return self._norms.note(a.t, a.j, self._grads.of(a.t, a.j)).message()

    def _take_norms(self, a: Action, message: Message) -> None:
        self._norms.put(a.t, a.j, message)

    def _give_batch(self, a: Action) -> Message:
        return self._batches.shared[a.t]

    def _take_batch(self, a: Action, message: Message) -> None:
        self._batches.shared[a.t] = message

    def _give_losses(self, a: Action) -> Message:
        return self._conclusions.conclude(a.t)

    def _take_losses(self, a: Action, message: Message) -> None:
        self._conclusions.came[a.t] = message


def _key(a: Action) -> Key:
    assert a.i is not None
    return a.t, a.i, a.j


def _keep_few(found: dict[Any, Any]) -> None:
    """Forget the oldest entry where there are many: inputs of many sizes must not fill memory."""
    if len(found) >= _MOST_KINDS:
        del found[next(iter(found))]


_Give: TypeAlias = Callable[[Exchange, Action], Message]
_Take: TypeAlias = Callable[[Exchange, Action, Message], None]
_WAYS: dict[Payload, tuple[_Give, _Take]] = {
    Payload.A: (Exchange._give_packet, Exchange._take_packet),
    Payload.G: (Exchange._give_crossed, Exchange._take_crossed),
    Payload.W: (Exchange._give_tied, Exchange._take_tied),
    Payload.S: (Exchange._give_sum, Exchange._take_sum),
    Payload.T: (Exchange._give_sum, Exchange._take_total),
    Payload.R: (Exchange._give_buffers, Exchange._take_buffers),
    Payload.C: (Exchange._give_buffers, Exchange._take_buffers),
    Payload.P: (Exchange._give_parameters, Exchange._take_parameters),
    Payload.V: (Exchange._give_tied_values, Exchange._take_tied_values),
    Payload.N: (Exchange._give_norms, Exchange._take_norms),
    Payload.D: (Exchange._give_batch, Exchange._take_batch),
    Payload.L: (Exchange._give_losses, Exchange._take_losses),
}
