"""How weights and optimizer state lie in chunks of equal size, known before there is any state.

An optimizer of torch makes its state in its first step. A copy of it, whose parameters have shapes
and no memory, makes the same state without any. What it makes is laid into chunks, parameter by
parameter; a chunk never has parts of two stages:

    stage 0   | exp_avg of w, exp_avg_sq of w, exp_avg of b, ...  | ...  .. |
    stage 1   | ...                                  ............ |             dots: not used

Numbers that count steps have one element each, and stay where they are. Weights have chunks of
their own; what is frozen is apart from what is trained, as it need not be written back.

Source: Fang et al., "PatrickStar", arXiv 2108.05818, section 6 (chunks, and the search of their
    size: that which leaves least room unused).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.absent import is_absent
from lightning_cyclic.runtime.buffers import aligned, total_bytes
from lightning_cyclic.runtime.gradient_store import hidden
from lightning_cyclic.runtime.values.plain import TensorSpec

_SIZES = 17  # that are tried: from the largest tensor to three times as much
_FAST = ("fused", "foreach", "capturable")  # which want a device that has memory


class Part(NamedTuple):
    """Name one tensor of the state of a parameter, or, with no key, its weights."""

    p: nn.Parameter
    key: str
    spec: TensorSpec

    @property
    def num_bytes(self) -> int:
        return total_bytes([self.spec])


Chunk = tuple[Part, ...]


@final
@dataclass(frozen=True, slots=True)
class StateLayout:
    """Hold what lies where.

    Args:
        stages: of each its chunks.
        chunk_bytes: of each chunk.
        num_bytes: of all that lies in them.
    """

    stages: tuple[tuple[Chunk, ...], ...]
    chunk_bytes: int
    num_bytes: int

    @property
    def counts(self) -> list[int]:
        """Return how many chunks each stage has."""
        return list(map(len, self.stages))

    @property
    def unused(self) -> float:
        """Return which part of all chunks is not used, from 0 to 1."""
        room = sum(self.counts) * self.chunk_bytes
        return 1 - self.num_bytes / room if room else 0.0


def lay_state(optimizer: Optimizer, stages: Sequence[Sequence[nn.Parameter]]) -> StateLayout:
    """Lay the state that an optimizer will have of the parameters of stages into chunks.

    Raises:
        ConfigurationError: it cannot be known from shapes alone.
    """
    made = _state_by_shapes(optimizer, {p for ps in stages for p in ps})
    return _laid([[[part for p in ps for part in made.get(p, ())]] for ps in stages])


def lay_weights(stages: Sequence[Sequence[nn.Parameter]]) -> StateLayout:
    """Lay the weights of stages into chunks, of any that are strided."""
    laid = [[p for p in ps if p.layout is torch.strided and not is_lazy(p)] for ps in stages]
    return _laid([
        [[_weights(p) for p in ps if p.requires_grad is trains] for trains in (True, False)]
        for ps in laid
    ])  # fmt: skip


def _laid(parts: Sequence[Sequence[Sequence[Part]]]) -> StateLayout:
    """Lay parts of stages into chunks, of which none has parts of two of a stage's groups."""
    sizes = [part.num_bytes for groups in parts for each in groups for part in each]
    if not sizes:
        return StateLayout(((),) * len(parts), aligned(1), 0)
    least = max(sizes)
    tried = [aligned(least + least * k // (_SIZES // 2)) for k in range(_SIZES)]
    packed = {
        size: tuple(
            tuple(chunk for each in groups for chunk in _packed(each, size)) for groups in parts
        )
        for size in tried
    }
    best = min(tried, key=lambda size: size * sum(map(len, packed[size])))
    return StateLayout(packed[best], best, sum(sizes))


def state_bytes(optimizer: Optimizer) -> int:
    """Return how many bytes of state an optimizer has behind its first step, but for step counts.

    Raises:
        ConfigurationError: it cannot be known from shapes alone.
    """
    wanted = {p for group in optimizer.param_groups for p in group["params"]}
    made = _state_by_shapes(optimizer, wanted)
    specs = (part.spec for parts in made.values() for part in parts)
    return sum(prod(spec.size) * spec.dtype.itemsize for spec in specs)


def _packed(parts: Sequence[Part], chunk_bytes: int) -> Iterator[Chunk]:
    chunk: list[Part] = []
    room = chunk_bytes
    for part in parts:
        if part.num_bytes > room:
            yield tuple(chunk)
            chunk, room = [], chunk_bytes
        chunk.append(part)
        room -= part.num_bytes
    if chunk:
        yield tuple(chunk)


def _state_by_shapes(
    optimizer: Optimizer, wanted: set[nn.Parameter]
) -> dict[nn.Parameter, list[Part]]:
    """Return what a first step makes of each parameter; no memory is taken for it."""
    shapes = {
        p: _with_gradient(p) for g in optimizer.param_groups for p in g["params"] if p in wanted
    }
    copied = _copy_over_shapes(optimizer, shapes)
    try:
        # one that knows parameters by another way, too, leaves them as they are
        with torch.no_grad(), hidden(shapes):
            # of the class: schedulers put a step of their own on the instance
            type(copied).step(copied)
    except Exception as error:
        raise _unknown(optimizer, f"{type(error).__name__}: {error}") from error
    return {p: list(_parts_of(p, copied.state.get(x, {}))) for p, x in shapes.items()}


def _weights(p: nn.Parameter) -> Part:
    return Part(p, "", TensorSpec.of(_shape_as_used(p))._replace(on_host=True))


def _shape_as_used(p: nn.Parameter) -> Tensor:
    """Return a tensor that lies as a parameter does where it has its values, and has none."""
    stride = p.stride()
    if is_absent(p):  # which is to come as it is made
        stride = torch.empty(p.size(), device="meta").stride()
    return torch.empty_strided(p.size(), stride, dtype=p.dtype, device="meta")


def _with_gradient(p: nn.Parameter) -> nn.Parameter:
    x = nn.Parameter(_shape_as_used(p))
    x.grad = torch.empty_like(x)
    return x


def _copy_over_shapes(
    optimizer: Optimizer, shapes: Mapping[nn.Parameter, nn.Parameter]
) -> Optimizer:
    if any(isinstance(x, Optimizer) for held in vars(optimizer).values() for x in _each(held)):
        raise _unknown(optimizer, "it has other optimizers inside, which have parameters")
    copied: Optimizer = object.__new__(type(optimizer))
    mutable = (list, dict, set)
    vars(copied).update(
        {k: copy(x) if isinstance(x, mutable) else x for k, x in vars(optimizer).items()}
    )
    for name in [name for name in vars(copied) if name.endswith("_hooks")]:
        vars(copied)[name] = OrderedDict()  # nobody is told of this step
    copied.state = defaultdict(dict)
    for p, x in shapes.items():  # of those that make it when they are made
        if p in optimizer.state:
            copied.state[x] = {k: _shape_of(held) for k, held in optimizer.state[p].items()}
    copied.param_groups = [
        # the plain way of each optimizer takes tensors of any device
        {
            **{key: deepcopy(x) for key, x in group.items() if key != "params"},
            **{key: False for key in _FAST if key in group},
            "params": [shapes[p] for p in group["params"] if p in shapes],
        }
        for group in optimizer.param_groups
    ]
    return copied


def _shape_of(held: Any) -> Any:
    is_large = isinstance(held, Tensor) and held.dim() > 0
    return torch.empty_like(held, device="meta") if is_large else deepcopy(held)


def _each(held: object) -> Iterable[object]:
    if isinstance(held, Mapping):
        return held.values()
    return held if isinstance(held, list | tuple | set) else (held,)


def _parts_of(p: nn.Parameter, made: Mapping[str, Any]) -> Iterator[Part]:
    for key, x in made.items():
        if isinstance(x, Tensor) and x.dim() > 0 and x.layout is torch.strided:
            dense = torch.empty_like(x, device="meta")  # strides without holes
            yield Part(p, key, TensorSpec.of(dense)._replace(on_host=True, requires_grad=False))


def _unknown(optimizer: Optimizer, why: str) -> ConfigurationError:
    name = type(optimizer).__name__
    return ConfigurationError(
        f"memory_limit_bytes=... with {name}, whose state is not known before its first step, as "
        f"it takes no parameters that have shapes alone ({why}); allowed: optimizers that "
        "make their state of the shapes of parameters, as most of torch do; use "
        "torch.optim.AdamW, or leave memory_limit_bytes out"
    )
