"""What a worker that runs whole micro-batches exchanges with others.

S, T, ADD   partial sums of gradients, in micro-batch order, in the buffers they came in
H, ADD      or gradients, which their owner, or the lead of a group, adds in that order; a codec
            may make them smaller, those that their owner has itself as well
OUTER, U    outer weights, made of the sum of differences, and handed on (local_weights.py)
P           versions of parameters, handed on in the buffers they came in; or what they add to the
            ones before, which a codec has made smaller
R, C        module buffers that training changes: what micro-batch i-1 left, to micro-batch i;
they are copied, as they are small, and code may have replaced them
N, K        norms of gradients; the word that a step may begin
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.bits import Mark
from lightning_cyclic.runtime.buffers import Buffer, Layout
from lightning_cyclic.runtime.codecs.coded import CodedStage, Codes
from lightning_cyclic.runtime.codecs.weights import CodedWeights
from lightning_cyclic.runtime.gradient_store import GradientStore, Sum
from lightning_cyclic.runtime.messages import Message, Messages
from lightning_cyclic.runtime.norms import Norms
from lightning_cyclic.runtime.stages.stage_map import StageMap
from lightning_cyclic.runtime.state_tier import ALL_STAYS, StateTiers
from lightning_cyclic.runtime.weight_forms import ALL, WeightForms
from lightning_cyclic.runtime.whole_step.coded_versions import CodedVersions
from lightning_cyclic.runtime.whole_step.local_weights import LocalWeights
from lightning_cyclic.runtime.whole_step.shards import Shards
from lightning_cyclic.runtime.whole_step.versions import VersionStore


@final
class Exchange:
    """Keep what comes and what goes.

    Args:
        sums_travel: whether sums of gradients do, and not only gradients, to who adds all.
        codes: of gradients, where a codec makes those smaller that travel.
        weights: by which versions are sent, where a codec makes them smaller.
        owned: stages whose versions this worker makes.
        tiers: of what comes and goes.
    """

    def __init__(  # noqa: PLR0913  (all that is exchanged meets here)
        self,
        module: nn.Module,
        worker: int,
        stages: StageMap,
        stores: Sequence[VersionStore],
        grads: GradientStore,
        norms: Norms,
        messages: Messages,
        forms: WeightForms = ALL,
        *,
        sums_travel: bool = True,
        codes: Codes | None = None,
        weights: CodedWeights | None = None,
        owned: Collection[int] = (),
        tiers: StateTiers = ALL_STAYS,
    ) -> None:
        self._tiers = tiers
        self._module = module
        self._worker = worker
        self._stages = stages
        self._stores = stores
        self._grads = grads
        self._norms = norms
        self._messages = messages
        self._forms = forms
        trained = [list(map(forms.weight, grads.parameters_of(j))) for j in range(len(stores))]
        pairs = list(zip(stores, trained, strict=True))
        dtypes = grads.dtypes
        self._sum_layouts = [self._layout_of(*pair, dtypes.of_sums) for pair in pairs]
        # of gradients that travel to be added: where their sum travels, too, it lies as they do
        self._added_layouts = (
            self._sum_layouts
            if sums_travel
            else [self._layout_of(*pair, dtypes.of_gradients) for pair in pairs]
        )
        self._coded: list[CodedStage] = []  # by stage, if gradients are
        if codes is not None:
            self._code(codes, pairs)
        self._parameter_layouts = [self._layout_of(store, store.parameters) for store in stores]
        self._versions: list[CodedVersions] = []  # by stage, if they are coded
        if weights is not None:
            self._versions = [
                CodedVersions(weights, *pair, messages, is_own=j in owned)
                for j, pair in enumerate(pairs)
            ]
            self._parameter_layouts = [x.layout for x in self._versions]
        self.shards: Shards | None = None  # where workers hold what they use alone
        self.local: LocalWeights | None = None  # where each worker has weights of its own
        self._gradients: dict[tuple[int, int | None, int], Sum] = {}  # that came
        self._handed_on: list[tuple[str, Mark]] = []  # names of buffers, and what was sent

    def _code(
        self, codes: Codes, pairs: Sequence[tuple[VersionStore, Sequence[nn.Parameter]]]
    ) -> None:
        """Lay messages of gradients out as a codec has them."""
        of_gradients = self._grads.dtypes.of_gradients
        for names, (store, weights) in zip(self._stages.trained, pairs, strict=True):
            likes = self._sent_of(store, weights, of_gradients)
            self._coded.append(CodedStage(codes, names, likes))
        coded = zip(self._coded, pairs, strict=True)
        self._added_layouts = [
            self._messages.layout(each.tensors, len(weights), keeps=store.layout.keeps)
            for each, (store, weights) in coded
        ]

    def _layout_of(
        self,
        store: VersionStore,
        weights: Sequence[nn.Parameter],
        dtype_of: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
    ) -> Layout:
        """Return how messages lie that have something for each of some weights of a stage."""
        sends_all = all(map(self._forms.sends_all, weights))
        if sends_all and all(dtype_of(p.dtype) == p.dtype for p in weights):
            return store.layout_of(weights)
        as_sent = self._sent_of(store, weights, dtype_of)
        return self._messages.layout(as_sent, keeps=store.layout.keeps)

    def _sent_of(
        self,
        store: VersionStore,
        weights: Sequence[nn.Parameter],
        dtype_of: Callable[[torch.dtype], torch.dtype],
    ) -> list[Tensor]:
        """Return what is sent for each of some weights of a stage, without values."""
        sends_all = all(map(self._forms.sends_all, weights))
        sent = (
            store.laid(weights)
            if sends_all
            else [self._forms.compress(p, p.detach()) for p in weights]
        )
        return [_like(x, dtype_of(x.dtype)) for x in sent]

    def add(self, a: Action) -> None:
        """Add gradients that came, or the own, to the sum, which comes first in the addition.

        Of an OUTER: make what is made of the sum.
        """
        if a.kind is Kind.OUTER:
            assert self.local is not None
            self.local.make_outer(a.t, a.j)
            return
        gradients = self._gradients.pop((a.t, a.i, a.j), None)
        if gradients is None and self._coded:
            own = self._grads.take_own(a.t, a.j)
            gradients = own._replace(grads=self._coded[a.j].through(self._worker, own.grads))
        self._grads.add(a.t, a.j, gradients)

    def note_made(self, j: int, v: int) -> None:
        """Note that this worker has made a version."""
        if self._versions:
            self._versions[j].make(v)

    def free(self, a: Action) -> None:
        if (tier := self._tiers.of(a.payload)) is not None:
            tier.free(a.j)
            return
        assert self.shards is not None
        assert a.v is not None
        self.shards.free(a.j, a.v)

    def move(self, a: Action) -> None:
        tier = self._tiers.of(a.payload)
        assert tier is not None
        tier.move(a)

    def check_handed_on(self) -> None:
        """Check, when the forwards of a step are over, what was handed on before.

        Raises:
            StepError: a buffer has changed since.
        """
        changed = [name for name, sent in self._handed_on if not sent.is_of(sent.value)]
        self._handed_on.clear()
        if changed:
            raise StepError(
                f"buffer {changed[0]!r} of rank {self._worker} changed after it had been handed "
                "on to the next rank, because its module ran later than in the first training "
                "step; allowed: the order of the first step; cut only where the order is always "
                'the same, stages=["module.path", ...], or use stages=1'
            )

    # ------------------------------------------------------------------ messages

    def layouts(self, j: int) -> dict[Payload, Layout]:
        """Return the one layout of each payload's messages of a stage."""
        sums, buffers = self._sum_layouts[j], self._messages.layout(self._buffers(j))
        return {
            Payload.P: self._parameter_layouts[j],
            Payload.U: self._parameter_layouts[j],
            Payload.S: sums,
            Payload.T: sums,
            Payload.H: self._added_layouts[j],
            Payload.R: buffers,
            Payload.C: buffers,
            Payload.N: self._norms.layout(j, self._messages),
            Payload.K: Layout([], torch.device("cpu")),  # a word between hosts
        }

    def key(self, a: Action) -> None:
        """Let the messages of a ring have one form."""

    def hold(self, a: Action) -> None:
        if a.kind in (Kind.FETCH, Kind.EVICT):
            tier = self._tiers.of(a.payload)
            assert tier is not None
            tier.hold(a)
        if a.payload is Payload.P and a.kind is Kind.SEND:
            assert a.v is not None
            self._stores[a.j].hold(a.v)

    def let_go(self, a: Action) -> None:
        if a.payload is Payload.P:
            assert a.v is not None
            self._stores[a.j].let_go(a.v)

    def give(self, a: Action) -> Message:
        assert a.payload is not None
        give, _ = _WAYS[a.payload]
        return give(self, a)

    def take(self, a: Action, message: Message) -> None:
        assert a.payload is not None
        _, take = _WAYS[a.payload]
        take(self, a, message)

    def _give_sum(self, a: Action) -> Message:
        assert a.payload is not None
        layout = (self._added_layouts if a.payload is Payload.H else self._sum_layouts)[a.j]
        grads, word, buffer = self._grads.take(a.t, a.j)
        there = [x is not None for x in grads]
        if buffer is None or not layout.has(buffer):
            given, buffer = buffer, self._messages.room(layout)
            narrowed = self._grads.dtypes.narrowed
            buffer.write([None if x is None else narrowed(x) for x in grads])
            if given is not None:
                given.let_go()
        marks = None if all(there) else there
        return Message(buffer.tensors, None, word, marks, buffer, leaves=True)

    def _give_gradients(self, a: Action) -> Message:
        if not self._coded:
            return self._give_sum(a)
        grads, word, _ = self._grads.take_own(a.t, a.j)
        buffer = self._messages.room(self._added_layouts[a.j])
        self._coded[a.j].write(self._worker, grads, buffer.tensors)
        there = [x is not None for x in grads]
        return Message(buffer.tensors, None, word, there, buffer, leaves=True)

    def _take_sum(self, a: Action, message: Message) -> None:
        self._grads.put(a.t, a.j, _sum_of(message))

    def _take_gradients(self, a: Action, message: Message) -> None:
        self._gradients[a.t, a.i, a.j] = (
            self._decoded(self._coded[a.j], message) if self._coded else _sum_of(message)
        )

    def _decoded(self, coded: CodedStage, message: Message) -> Sum:
        assert message.buffer is not None
        grads = coded.read(message.there, message.tensors)
        message.buffer.let_go()
        return Sum(grads, message.word)

    def _give_parameters(self, a: Action) -> Message:
        assert a.v is not None
        if self._versions:
            return self._versions[a.j].give(a.v)
        store, layout = self._stores[a.j], self._parameter_layouts[a.j]
        buffer, word = store[a.v], store.words[a.v]
        if layout is store.layout:
            return Message(buffer.tensors, None, word, None, buffer)
        sent = self._messages.room(layout)
        pairs = zip(store.parameters, buffer.tensors, strict=True)
        sent.write([self._forms.compress(p, x) for p, x in pairs])
        return Message(sent.tensors, None, word, None, sent, leaves=True)

    def _take_parameters(self, a: Action, message: Message) -> None:
        assert a.v is not None
        if self._versions:
            self._versions[a.j].take(a.v, message)
            return
        assert message.buffer is not None
        store, buffer = self._stores[a.j], message.buffer
        if self._parameter_layouts[a.j] is not store.layout:
            buffer = self._expanded(store, buffer)
        store.put(a.v, buffer, message.word)

    def _expanded(self, store: VersionStore, sent: Buffer) -> Buffer:
        buffer = self._messages.room(store.layout)
        for p, x, values in zip(store.parameters, sent.tensors, buffer.tensors, strict=True):
            self._forms.expand_into(p, x, values)
        sent.let_go()
        return buffer

    def _give_outer(self, a: Action) -> Message:
        assert self.local is not None
        buffer = self._messages.room(self._parameter_layouts[a.j])
        values, word = self.local.outer(a.j)
        buffer.write(values)
        return Message(buffer.tensors, None, word, None, buffer, leaves=True)

    def _take_outer(self, a: Action, message: Message) -> None:
        assert self.local is not None
        assert message.buffer is not None
        self.local.put_outer(a.j, message.tensors, message.word)
        message.buffer.let_go()

    def _give_buffers(self, a: Action) -> Message:
        buffers = self._buffers(a.j)
        if a.payload is Payload.R:
            names = self._stages.stages[a.j].buffers
            pairs = zip(names, buffers, strict=True)
            self._handed_on += [(name, Mark.of(x)) for name, x in pairs]
        return Message(buffers)

    def _take_buffers(self, a: Action, message: Message) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._buffers(a.j), list(message.tensors))

    def _buffers(self, j: int) -> list[Tensor]:
        return [self._module.get_buffer(name) for name in self._stages.stages[j].buffers]

    def _give_norms(self, a: Action) -> Message:
        return self._norms.note(a.t, a.j, self._grads.of(a.t, a.j)).message()

    def _take_norms(self, a: Action, message: Message) -> None:
        self._norms.put(a.t, a.j, message)

    def _give_start(self, a: Action) -> Message:
        return Message([])

    def _take_start(self, a: Action, message: Message) -> None:
        """Have been let go."""


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=dtype, device="meta")


def _sum_of(message: Message) -> Sum:
    there = message.there or [True] * len(message.tensors)
    grads = [x if here else None for x, here in zip(message.tensors, there, strict=True)]
    return Sum(grads, message.word, message.buffer)


_Give: TypeAlias = Callable[[Exchange, Action], Message]
_Take: TypeAlias = Callable[[Exchange, Action, Message], None]
_WAYS: dict[Payload, tuple[_Give, _Take]] = {
    Payload.S: (Exchange._give_sum, Exchange._take_sum),
    Payload.T: (Exchange._give_sum, Exchange._take_sum),
    Payload.H: (Exchange._give_gradients, Exchange._take_gradients),
    Payload.P: (Exchange._give_parameters, Exchange._take_parameters),
    Payload.U: (Exchange._give_outer, Exchange._take_outer),
    Payload.R: (Exchange._give_buffers, Exchange._take_buffers),
    Payload.C: (Exchange._give_buffers, Exchange._take_buffers),
    Payload.N: (Exchange._give_norms, Exchange._take_norms),
    Payload.K: (Exchange._give_start, Exchange._take_start),
}


class Word(enum.IntFlag):
    """Say something about a step; a sum carries what any worker said."""

    NONE = 0
    STOP = 1  # somebody asked to end training (SIGTERM)
    ENDS = 2  # somebody had the last batch of the epoch
    GOES_ON = 4  # somebody has more batches
    OVERFLOW = 8  # gradients overflowed, and the version is the one before (its owner says so)


@final
class Words:
    """Say what this worker has to say about a step, and keep what was heard of all."""

    def __init__(self) -> None:
        self.ends = False  # whether this worker's batch is its last of the epoch
        self.stop_wanted = False
        self._stop_version: int | None = None

    def said(self) -> Word:
        word = Word.ENDS if self.ends else Word.GOES_ON
        return word | Word.STOP if self.stop_wanted else word

    def hear(self, v: int, word: Word) -> None:
        """Note what all workers said of the step that made version ``v``.

        Raises:
            StepError: some workers had their last batch, others had not.
        """
        if word & Word.STOP and self._stop_version is None:
            self._stop_version = v
        if word & Word.ENDS and word & Word.GOES_ON:
            raise StepError(
                f"some workers had their last batch in step {v - 1}, others have more; allowed: "
                "the same number of batches on every worker; drop the surplus in the "
                "IterableDataset, or set Trainer(limit_train_batches=...)"
            )

    def stops(self, t: int) -> bool:
        """Say whether training ends before step ``t``; the same on every worker."""
        # a version made with a stop byte has been read by every worker two steps later
        return self._stop_version is not None and t >= self._stop_version + 2
