"""What goes from a stage to the next one, what is learnt on the way, and what comes out at last.

In the first step with a new kind of batch nobody knows what later stages will need: a packet
holds every tensor that the user's code still could use. Stages note what they did use; the last
stage puts that together into a *lesson*, which holds from the next step on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cyclic.runtime.buffers import sent_spec
from lightning_cyclic.runtime.partial_step.ghosts import Handle
from lightning_cyclic.runtime.partial_step.module_state import Change
from lightning_cyclic.runtime.partial_step.tape import Tape, names, tape_from_data, tape_to_data
from lightning_cyclic.runtime.values.plain import TensorSpec, spec_from_data, spec_to_data


class Coded(NamedTuple):
    """Hold what is sent of a tensor, in its place.

    Args:
        spec: of the tensor.
    """

    sent: Sequence[Tensor]
    spec: TensorSpec


@dataclass(slots=True, kw_only=True)
class Packet:
    """Hold what crosses from stage j to stage j+1 for one micro-batch.

    Args:
        tensors: by handle; cut off from the graph.
        with_grad: handles of those whose gradients come back.
        used: last stage that used each handle so far; only while learning.
        shared: numbers of the groups of tensors that share memory in the stages that made them.
        stale: tensors of which another view was changed in place since -> where.
        spread: strides of tensors that travel without the gaps in their memory.
        coded: what is sent of tensors that a codec makes smaller, until it is decoded; they are
            not among the others, and have gradients.
    """

    tensors: dict[Handle, Tensor] = field(default_factory=dict)
    with_grad: frozenset[Handle] = frozenset()
    tapes: tuple[Tape, ...] = ()
    used: dict[Handle, int] = field(default_factory=dict)
    learning: bool = False
    shared: dict[Handle, int] = field(default_factory=dict)
    stale: dict[Handle, str] = field(default_factory=dict)
    spread: tuple[tuple[Handle, tuple[int, ...]], ...] = ()
    coded: dict[Handle, Coded] = field(default_factory=dict)

    def note_spread(self) -> None:
        """Note how tensors lie: kernels add in another order where memory has no gaps."""
        loose = ((h, x) for h, x in self.tensors.items() if not x.is_contiguous())
        self.spread = tuple((h, x.stride()) for h, x in loose if sent_spec(x).stride != x.stride())

    def sent(self) -> list[Tensor]:
        """Return the tensors of its message."""
        return [*self.tensors.values(), *(x for each in self.coded.values() for x in each.sent)]

    def tag(self) -> Any:
        """Return what decides about the facts: equal for equal ones."""
        coded = [(h, c.spec, len(c.sent)) for h, c in self.coded.items()]
        return (
            tuple(self.tensors), self.with_grad, self.tapes, self.used, self.learning,
            self.shared, self.stale, self.spread, coded,
        )  # fmt: skip

    def facts(self) -> Any:
        """Return what is to be said beside the tensors, in terms of JSON."""
        return [
            [list(h) for h in self.tensors],
            [h in self.with_grad for h in self.tensors],
            [tape_to_data(tape) for tape in self.tapes],
            [[list(h), j] for h, j in self.used.items()],
            self.learning,
            [[list(h), n] for h, n in self.shared.items()],
            [[list(h), line] for h, line in self.stale.items()],
            [[list(h), list(stride)] for h, stride in self.spread],
            [[list(h), spec_to_data(c.spec), len(c.sent)] for h, c in self.coded.items()],
        ]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], facts: Any, tapes: tuple[Tape, ...] | None) -> Packet:
        """Make a packet of what came; ``tapes`` if they are known already."""
        handles, with_grad, tape_data, used, learning, shared, stale, spread, coded = facts
        keys: list[Handle] = [(h[0], h[1], h[2]) for h in handles]
        came = dict(zip(keys, tensors, strict=False))
        rest = iter(tensors[len(keys) :])
        for h, stride in spread:
            x = came[h[0], h[1], h[2]]
            made = torch.empty_strided(x.size(), stride, dtype=x.dtype, device=x.device)
            came[h[0], h[1], h[2]] = made.copy_(x)
        return cls(
            tensors=came,
            with_grad=frozenset(h for h, yes in zip(keys, with_grad, strict=True) if yes),
            tapes=tapes or tuple(tape_from_data(data) for data in tape_data),
            used={(h[0], h[1], h[2]): j for h, j in used},
            learning=learning,
            shared={(h[0], h[1], h[2]): n for h, n in shared},
            stale={(h[0], h[1], h[2]): line for h, line in stale},
            coded={
                (h[0], h[1], h[2]): Coded(list(islice(rest, num)), spec_from_data(spec))
                for h, spec, num in coded
            },
        )


class Gradients(NamedTuple):
    """Hold gradients that one stage has of what others gave it."""

    crossed: Mapping[Handle, Tensor]
    tied: Mapping[str, Tensor]


class Lesson(NamedTuple):
    """Hold what a kind of batch has taught.

    Args:
        paths: names of the events of each region but the last.
        last_use: the last stage that uses each handle that crosses.
    """

    paths: tuple[tuple[str, ...], ...]
    last_use: Mapping[Handle, int]

    def wanted(self, j: int) -> frozenset[Handle]:
        """Return the handles that cross from stage ``j`` to the next."""
        return frozenset(h for h, last in self.last_use.items() if h[0] <= j < last)

    def to_data(self) -> Any:
        return [[list(p) for p in self.paths], [[list(h), j] for h, j in self.last_use.items()]]

    @classmethod
    def from_data(cls, data: Any) -> Lesson:
        paths, uses = data
        return cls(tuple(tuple(p) for p in paths), {(h[0], h[1], h[2]): j for h, j in uses})

    @classmethod
    def merge(
        cls, known: Lesson | None, tapes: Sequence[Tape], used: Mapping[Handle, int]
    ) -> Lesson:
        """Add what one micro-batch used; of other paths, the latest holds."""
        paths = tuple(names(tape) for tape in tapes)
        if known is None or known.paths != paths:
            return cls(paths, dict(used))
        last = dict(known.last_use)
        for h, j in used.items():
            last[h] = max(j, last.get(h, j))
        return cls(paths, last)


class Outcome(NamedTuple):
    """Hold what the last stage got from one micro-batch.

    Args:
        logs: name, value and arguments of what it logged.
        changes: of what it keeps on the module.
    """

    output: Any
    logs: list[tuple[str, Any, dict[str, Any]]]
    changes: list[Change]
