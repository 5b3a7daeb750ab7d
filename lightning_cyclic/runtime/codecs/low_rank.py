"""Low-rank gradients: what is sent of a weight's gradient are factors that its backward has made.

    backward    rows of a layer    ->  the stream of its worker: the factors so far
    p.grad                             a gradient that holds these (factored.py)
    encode                             takes them as they are

The gradient itself is in no place: what the owner makes of the factors is the first matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.codecs.base import AbstractCodec, State, wide
from lightning_cyclic.runtime.codecs.factored import FactoredGradient, Form
from lightning_cyclic.runtime.codecs.factors import Factors, behind_block, first_factors


class _Progress(NamedTuple):
    """Say how far a step has come with a layer.

    Args:
        num_rows: of the step.
        num_before: rows that what it began with stands for.
    """

    num_rows: int
    num_before: int
    is_finite: Tensor


@final
class LowRank(AbstractCodec):
    """Send factors of gradients, which streams of layers have made, one of each worker and layer.

    Args:
        name: what made it, and with which numbers, for messages and checkpoints.
        names: of the weights.
    """

    has_memory: ClassVar[bool] = True

    def __init__(self, name: str, rank: int, names: Collection[str]) -> None:
        self._name = name
        self._rank = rank
        self.names: frozenset[str] = frozenset(names)
        self._state_of: Callable[[str], State] = _no_state
        # of each stream, by its state: of a worker's, and of a plain step that is compared
        self._progress: dict[int, tuple[State, _Progress]] = {}

    @override
    def __repr__(self) -> str:
        return self._name

    # ------------------------------------------------------------------ in a backward

    @override
    def begin(self, state_of: Callable[[str], State]) -> None:
        self._state_of = state_of

    def begin_step(self) -> None:
        """Begin the gradients of a step: what its streams have so far is of the one before."""
        self._progress.clear()

    def follow(
        self, name: str, form: Form, blocks: Iterable[tuple[Tensor, Tensor]]
    ) -> FactoredGradient:
        """Go on with the stream of a weight, and return its gradient of the step so far.

        Args:
            form: of the weight.
            blocks: of rows that its layer was given, and of those that came back.
        """
        state, dtype = self._state_of(name), wide(form.dtype)
        factors = self._factors(state, form, dtype)
        _, so_far = self._progress.get(id(state), (state, None))
        for rows, back in blocks:
            if not len(rows):
                continue
            x, delta = rows.to(dtype), back.to(dtype)
            if so_far is None:  # what there is of the step before counts as one block
                is_finite = torch.ones((), dtype=torch.bool, device=x.device)
                so_far = _Progress(0, len(x) if state else 0, is_finite)
            known = so_far.num_before + so_far.num_rows
            factors, is_finite = behind_block(factors, known, x, delta)
            so_far = so_far._replace(
                num_rows=so_far.num_rows + len(x), is_finite=so_far.is_finite & is_finite
            )
        state.update(factors._asdict())
        if so_far is None:  # it was given no rows
            return FactoredGradient(form, factors._replace(sigma=0 * factors.sigma), 0)
        self._progress[id(state)] = state, so_far  # which it keeps, so that no other has its id
        sums = torch.where(so_far.is_finite, so_far.num_rows * factors.sigma, torch.nan)
        return FactoredGradient(form, factors._replace(sigma=sums), so_far.num_rows)

    def _factors(self, state: State, form: Form, dtype: torch.dtype) -> Factors:
        n, m = sides(form.shape)
        if not state:
            return first_factors(n, m, self._rank, dtype, form.device)
        return Factors(*(state[key].to(form.device) for key in Factors._fields))

    # ------------------------------------------------------------------ as a codec

    @override
    def takes(self, like: Tensor) -> bool:
        return len(like.shape) >= 2 and self._rank <= min(sides(like.shape))

    @override
    def sent(self, like: Tensor) -> Sequence[Tensor]:
        (n, m), k = sides(like.shape), self._rank
        shapes = ((n, k), (k,), (m, k))
        return [torch.empty(x, dtype=wide(like.dtype), device="meta") for x in shapes]

    @override
    def encode(self, gradient: Tensor, state: State) -> Sequence[Tensor]:
        if not isinstance(gradient, FactoredGradient) or gradient.is_changed:
            raise StepError(
                f"a weight of shape {list(gradient.shape)} has a gradient that is not the one "
                f"that {self!r} has made: a hook of the tensor has changed it; allowed: gradients "
                "as the backward makes them; remove the hook, or leave the layer out, "
                "LowRankGradients(modules=[...])"
            )
        return gradient.factors

    @override
    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        return Factors(*sent).dense().view(like.shape)


def _no_state(name: str) -> State:
    raise AssertionError(name)  # nobody has said whose backward it is


def sides(shape: torch.Size) -> tuple[int, int]:
    """Return rows and columns of a weight as a matrix: its first dimension, and all others."""
    return shape[0], math.prod(shape[1:])
