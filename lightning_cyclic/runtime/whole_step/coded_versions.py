"""Versions that are sent as what they add to the ones before (see codecs/weights.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_cyclic.runtime.codecs.weights import CodedWeights
from lightning_cyclic.runtime.messages import Message, Messages
from lightning_cyclic.runtime.whole_step.versions import VersionStore


@final
class CodedVersions:
    """Send and receive versions of one stage.

    Args:
        trained: of its parameters; all others are sent as they are.
        is_own: whether this worker makes the versions.
    """

    def __init__(
        self,
        weights: CodedWeights,
        store: VersionStore,
        trained: Collection[nn.Parameter],
        messages: Messages,
        *,
        is_own: bool,
    ) -> None:
        self._weights, self._store, self._messages = weights, store, messages
        likes = store.laid(store.parameters)
        codec, ids = weights.codec, set(map(id, trained))
        self._likes = [torch.empty_like(x, device="meta") for x in likes]
        self._is_coded = [
            id(p) in ids and codec.takes(x)
            for p, x in zip(store.parameters, self._likes, strict=True)
        ]
        pairs = list(zip(self._likes, self._is_coded, strict=True))
        sent = [codec.sent(x) if is_coded else [x] for x, is_coded in pairs]
        self._counts = list(map(len, sent))
        self.layout = messages.layout([x for each in sent for x in each], keeps=store.layout.keeps)
        self._sent: dict[int, Sequence[Tensor]] = {}  # version -> what is handed on of it
        # what all have, of the newest version that has come; who makes versions has it shown
        self._newest = [] if is_own else [p.detach().clone() for p in store.parameters]
        self._v = store.newest

    def make(self, v: int) -> None:
        """Note what is to be sent of a version that this worker has made."""
        sent: list[Tensor] = []
        for p, is_coded in zip(self._store.parameters, self._is_coded, strict=True):
            sent += self._weights.take_sent(p) if is_coded else [p.detach().clone()]
        self._keep(v, sent)

    def give(self, v: int) -> Message:
        buffer = self._messages.room(self.layout)
        buffer.write(self._sent[v])
        return Message(buffer.tensors, None, self._store.words[v], None, buffer, leaves=True)

    def take(self, v: int, message: Message) -> None:
        assert message.buffer is not None
        assert v == self._v + 1, f"version {v} adds to the one before, and {self._v} is here"
        self._v = v
        self._keep(v, [x.clone() for x in message.tensors])
        begin = 0
        for k, newest in enumerate(self._newest):
            sent = self._sent[v][begin : begin + self._counts[k]]
            begin += self._counts[k]
            newest.copy_(self._added(newest, sent, k) if self._is_coded[k] else sent[0])
        buffer = self._messages.room(self._store.layout)
        buffer.write(self._newest)
        message.buffer.let_go()
        self._store.put(v, buffer, message.word)

    def _added(self, newest: Tensor, sent: Sequence[Tensor], k: int) -> Tensor:
        return newest + self._weights.codec.decode(sent, self._likes[k])

    def _keep(self, v: int, sent: Sequence[Tensor]) -> None:
        for old in [u for u in self._sent if u < v and u not in self._store]:
            del self._sent[old]  # nobody hands it on any more
        self._sent[v] = sent
