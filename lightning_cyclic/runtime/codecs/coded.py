"""Coded gradients: those of a stage as a codec sends them, in one message that is laid out once.

| plain tensors, each by itself | what is sent of the others, all of one dtype in one tensor |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.codecs.base import AbstractCodec
from lightning_cyclic.runtime.gradient_store import Gradients

States: TypeAlias = dict[int, dict[str, dict[str, Tensor]]]


@final
class Codes:
    """Encode gradients of parameters, by their names, and keep what codecs keep of them.

    Args:
        codec: by which.
        states: worker -> name -> what the codec keeps; of one process that runs the micro-batches
            of several workers, of all of them.
    """

    def __init__(self, codec: AbstractCodec, states: States | None = None) -> None:
        self.codec = codec
        self._states: States = defaultdict(dict, states or {})

    def copied(self) -> Codes:
        """Return what does the same from here on, and changes nothing of this."""
        return Codes(self.codec, self.states())

    def begin(self, worker: int) -> None:
        """Let the backward that comes be a worker's."""
        self.codec.begin(partial(self._state_of, worker))

    def _state_of(self, worker: int, name: str) -> dict[str, Tensor]:
        return self._states[worker].setdefault(name, {})

    def takes(self, name: str, like: Tensor) -> bool:
        """Say whether the gradient of a parameter is encoded."""
        names = self.codec.names
        return (names is None or name in names) and self.codec.takes(like)

    def encode(self, worker: int, name: str, gradient: Tensor) -> Sequence[Tensor]:
        has_memory = self.codec.has_memory
        state = self._state_of(worker, name) if has_memory else {}
        for key, x in state.items():  # what a checkpoint brought; counters stay with the host
            if x.is_floating_point() and x.device != gradient.device:
                state[key] = x.to(gradient.device)
        sent = self.codec.encode(gradient.detach(), state)
        if state and not has_memory:
            raise StepError(
                f"{self.codec!r} keeps {', '.join(map(repr, state))} of gradients, but says that "
                "it keeps nothing, so that checkpoints would lack it; allowed: to write to its "
                "state if it says so; use has_memory = True in its class"
            )
        check_sent(self.codec, f"the gradient of {name!r}", gradient, sent)
        return sent

    def through(self, worker: int, name: str, gradient: Tensor) -> Tensor:
        """Return a gradient as its owner has it, once a worker has encoded it."""
        if not self.takes(name, gradient):
            return gradient
        like = torch.empty_like(gradient, device="meta")
        return self.codec.decode(self.encode(worker, name, gradient), like)

    def states(self) -> States:
        """Return what checkpoints keep; codecs put new tensors in the place of these."""
        return {
            worker: {name: dict(state) for name, state in of_worker.items()}
            for worker, of_worker in self._states.items()
        }

    def put_states(self, states: Mapping[int, Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Go on with what another run kept."""
        self._states.clear()
        for worker, of_worker in states.items():
            self._states[worker] = {name: dict(state) for name, state in of_worker.items()}


def check_sent(codec: AbstractCodec, what: str, x: Tensor, sent: Sequence[Tensor]) -> None:
    """Refuse what a codec sends in other shapes or dtypes than it has said.

    Raises:
        StepError: it does.
    """
    said = codec.sent(torch.empty_like(x, device="meta"))
    if [(y.shape, y.dtype) for y in sent] != [(y.shape, y.dtype) for y in said]:
        raise StepError(
            f"{codec!r} sends {_words(sent)} of {what}, of {_words([x])}; allowed: "
            f"{_words(said)}, as it says itself in sent(), since messages are laid out once; let "
            "encode() give these"
        )


class _Piece(NamedTuple):
    """Say where a part of what is sent of a parameter lies.

    Args:
        k: number of the tensor in the message.
        begin: where in it.
    """

    k: int
    begin: int
    like: Tensor


@final
class CodedStage:
    """Say how the gradients of a stage lie in a message, and bring them there and back.

    Args:
        names: of its parameters.
        likes: their gradients, on the meta device.
    """

    def __init__(self, codes: Codes, names: Sequence[str], likes: Sequence[Tensor]) -> None:
        self._codes = codes
        self._names = names
        self._likes = likes
        self._is_coded = list(map(codes.takes, names, likes))
        self.tensors: list[Tensor] = []  # of the message, on the meta device
        self._pieces: list[list[_Piece]] = []  # of each parameter
        self._lay_out()

    def _lay_out(self) -> None:
        pieces = zip(self._likes, self._is_coded, strict=True)
        sent = [self._codes.codec.sent(x) if is_coded else None for x, is_coded in pieces]
        self.tensors = [x for x, own in zip(self._likes, sent, strict=True) if own is None]
        dtypes = list(dict.fromkeys(x.dtype for own in sent for x in own or ()))
        ends = dict.fromkeys(dtypes, 0)
        plain = iter(range(len(self.tensors)))
        for like, own in zip(self._likes, sent, strict=True):
            if own is None:
                self._pieces.append([_Piece(next(plain), 0, like)])
                continue
            self._pieces.append([])
            for x in own:
                number = len(self.tensors) + dtypes.index(x.dtype)
                self._pieces[-1].append(_Piece(number, ends[x.dtype], x))
                ends[x.dtype] += x.numel()
        self.tensors += [torch.empty(ends[d], dtype=d, device="meta") for d in dtypes]

    def write(self, worker: int, grads: Gradients, into: Sequence[Tensor]) -> None:
        """Encode a worker's gradients into a message; None leaves a gap."""
        for n, grad in enumerate(grads):
            if grad is None:
                continue
            sent = [grad]
            if self._is_coded[n]:
                sent = list(self._codes.encode(worker, self._names[n], self._own(n, grad)))
            for piece, x in zip(self._pieces[n], sent, strict=True):
                self._place(piece, into, is_coded=self._is_coded[n]).copy_(x)

    def read(self, there: Sequence[bool] | None, tensors: Sequence[Tensor]) -> Gradients:
        """Decode what is in a message.

        Args:
            there: whether each parameter has a gradient in it; None where all have.
        """
        there = there or [True] * len(self._likes)
        return [self._read_one(n, tensors) if here else None for n, here in enumerate(there)]

    def _read_one(self, n: int, tensors: Sequence[Tensor]) -> Tensor:
        is_coded = self._is_coded[n]
        sent = [self._place(piece, tensors, is_coded=is_coded) for piece in self._pieces[n]]
        return self._codes.codec.decode(sent, self._likes[n]) if is_coded else sent[0].clone()

    def through(self, worker: int, grads: Gradients) -> Gradients:
        """Return a worker's gradients as their owner has them, without a message."""
        found = enumerate(grads)
        return [
            x
            if x is None or not self._is_coded[n]
            else self._codes.through(worker, self._names[n], self._own(n, x))
            for n, x in found
        ]

    def _own(self, n: int, grad: Tensor) -> Tensor:
        """Return a gradient in the dtype of its parameter, in which both ends expect it."""
        return grad.to(self._likes[n].dtype)

    @staticmethod
    def _place(piece: _Piece, tensors: Sequence[Tensor], *, is_coded: bool) -> Tensor:
        x = tensors[piece.k]
        if not is_coded:
            return x
        return x.narrow(0, piece.begin, piece.like.numel()).view(piece.like.shape)


def _words(tensors: Sequence[Tensor]) -> str:
    found: list[Any] = [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in tensors]
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in found) or "nothing"
