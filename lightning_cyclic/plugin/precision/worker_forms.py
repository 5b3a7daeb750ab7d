"""Compressed states on one of several workers: what is trained there, and what travels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from torch import Tensor, nn
from typing_extensions import override

from lightning_cyclic.plugin.precision.compressed import DenseLayout
from lightning_cyclic.plugin.precision.parameter_state import ParameterState
from lightning_cyclic.runtime.weight_forms import WeightForms


@final
class SparseForms(WeightForms):
    """Train master weights, and send the kept elements alone.

    Args:
        states: of all parameters that have one.
        trained: those of them that the optimizer has.
        check: refuses gradients that the optimizer is not to have, before each update.
    """

    def __init__(
        self,
        states: Sequence[ParameterState],
        trained: Sequence[ParameterState],
        check: Callable[[], None],
    ) -> None:
        self._layouts = {
            id(s.weight): s.layout for s in states if not isinstance(s.layout, DenseLayout)
        }
        self._by_weight = {id(s.weight): s for s in trained}
        self._by_master = {id(s.master): s for s in trained}
        self._check = check

    @override
    def trained(self, weight: nn.Parameter) -> nn.Parameter:
        state = self._by_weight.get(id(weight))
        return weight if state is None else state.master

    @override
    def weight(self, trained: nn.Parameter) -> nn.Parameter:
        state = self._by_master.get(id(trained))
        return trained if state is None else state.weight

    @override
    def stand_in(self, weight: nn.Parameter, other: nn.Parameter) -> nn.Parameter:
        state = self._by_weight.get(id(weight))
        if state is not None and other.requires_grad:
            other.register_post_accumulate_grad_hook(state.take)  # type: ignore[no-untyped-call]
        return other

    @override
    def sends_all(self, weight: nn.Parameter) -> bool:
        return id(weight) not in self._layouts

    @override
    def compress(self, weight: nn.Parameter, values: Tensor) -> Tensor:
        layout = self._layouts.get(id(weight))
        return values if layout is None else layout.compress(values)

    @override
    def expand_into(self, weight: nn.Parameter, sent: Tensor, values: Tensor) -> None:
        layout = self._layouts.get(id(weight))
        if layout is None:
            values.copy_(sent)
        else:
            values.zero_()  # its memory may have been another weight's, or a hook's
            layout.expand_into(sent, values)

    @override
    def as_weight(self, weight: nn.Parameter, gradient: Tensor) -> Tensor:
        state = self._by_weight.get(id(weight))  # else nothing has compressed it
        return gradient if state is None else state.layout.expand(gradient)

    @override
    @contextmanager
    def updating(self, trained: Sequence[nn.Parameter]) -> Iterator[None]:
        states = [s for p in trained if (s := self._by_master.get(id(p))) is not None]
        for state in states:
            state.show(follows=False)  # weights change with versions, and by nothing else
        self._check()
        yield
        for state in states:
            state.write()

    @override
    def leave(self, mine: Sequence[nn.Parameter]) -> None:
        kept = {id(p) for p in mine}
        for key, state in self._by_master.items():
            if key not in kept:
                state.leave()
