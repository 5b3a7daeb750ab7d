"""Master weights: in an optimizer's groups, in its saved state, and on one of several workers.

In a checkpoint the state has the shapes of the module's parameters, with zeros where they are
pruned, so that dense training loads it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.plugin.precision.compressed import ParameterState
from lightning_cyclic.runtime.weight_forms import WeightForms

_HOST = torch.device("cpu")


def give_masters(optimizer: Optimizer, states: Sequence[ParameterState]) -> list[ParameterState]:
    """Put master weights in the place of the weights that an optimizer was made for.

    Groups, their values, and what schedulers refer to stay as they are; what some optimizers
    (Adagrad) have as soon as they are made is compressed.

    Returns:
        The states of the parameters that the optimizer trains.
    """
    by_weight = {id(s.weight): s for s in states}
    trained = []
    for group in optimizer.param_groups:
        for k, p in enumerate(group["params"]):
            if (state := by_weight.get(id(p))) is not None:
                trained.append(state)
                group["params"][k] = state.master
                if p in optimizer.state:
                    optimizer.state[state.master] = _compressed(optimizer.state.pop(p), state)
    return trained


def expanded(
    saved: Mapping[str, Any], optimizer: Optimizer, states: Sequence[ParameterState]
) -> dict[str, Any]:
    """Return an optimizer's ``state_dict()`` with tensors of parameters' shapes, on the host."""
    return _each(saved, optimizer, states, _expanded)


def compressed(
    saved: Mapping[str, Any], optimizer: Optimizer, states: Sequence[ParameterState]
) -> dict[str, Any]:
    return _each(saved, optimizer, states, _compressed)


def _each(
    saved: Mapping[str, Any], optimizer: Optimizer, states: Sequence[ParameterState],
    change: Callable[[Mapping[str, Any], ParameterState], dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    by_master = {id(s.master): s for s in states if s.is_compressed}
    every = [p for group in optimizer.param_groups for p in group["params"]]
    of = {k: by_master[id(p)] for k, p in enumerate(every) if id(p) in by_master}
    state = {k: change(v, of[k]) if k in of else v for k, v in saved["state"].items()}
    return {**saved, "state": state}


def _expanded(values: Mapping[str, Any], state: ParameterState) -> dict[str, Any]:
    layout, shape = state.layout.to(_HOST), state.trained_shape
    return {
        k: layout.expand(x.to(_HOST)) if isinstance(x, Tensor) and x.shape == shape else x
        for k, x in values.items()
    }


def _compressed(values: Mapping[str, Any], state: ParameterState) -> dict[str, Any]:
    layout, device, shape = state.layout, state.weight.device, state.weight.shape
    return {
        k: layout.compress(x.to(device)).to(torch.float32, copy=True)
        if isinstance(x, Tensor) and x.shape == shape else x
        for k, x in values.items()
    }  # fmt: skip


@final
class SparseForms(WeightForms):
    """Train master weights, and send the kept elements alone.

    Args:
        check: refuses gradients that the optimizer is not to have, before each update.
    """

    def __init__(
        self,
        states: Sequence[ParameterState],
        trained: Sequence[ParameterState],
        check: Callable[[], None],
    ) -> None:
        self._layouts = {id(s.weight): s.layout for s in states if s.is_compressed}
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
