"""An optimizer on master weights: its groups, and its state in checkpoints.

In a checkpoint the state has the shapes of the module's parameters, with zeros where they are
pruned, so that dense training loads it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cyclic.plugin.precision.parameter_state import ParameterState

Saved: TypeAlias = dict[str, Any]  # what Optimizer.state_dict() returns


def give_masters(optimizer: Optimizer, states: Sequence[ParameterState]) -> list[ParameterState]:
    """Put master weights in the place of the weights that an optimizer was made for.

    Groups, their values, and what schedulers refer to stay as they are.

    Returns:
        The states of the parameters that the optimizer trains.
    """
    by_weight = {id(s.weight): s for s in states}
    trained = []
    for group in optimizer.param_groups:
        for k, p in enumerate(group["params"]):
            if id(p) in by_weight:
                state = by_weight[id(p)]
                trained.append(state)
                group["params"][k] = state.master
                _move_state(optimizer, state)
    return trained


def _move_state(optimizer: Optimizer, state: ParameterState) -> None:
    """Hand over what some optimizers (Adagrad) have as soon as they are made."""
    if state.weight in optimizer.state:
        values = optimizer.state.pop(state.weight)
        optimizer.state[state.master] = _changed(
            values,
            lambda x: x.shape == state.weight.shape,
            lambda x: state.layout.compress(x).to(torch.float32, copy=True),
        )


def expanded(saved: Mapping[str, Any], of: Mapping[int, ParameterState]) -> Saved:
    """Return an optimizer's saved state with tensors of the shape of parameters, on the host.

    Args:
        saved: what ``Optimizer.state_dict()`` returns; it stays as it is.
        of: number of a parameter in it -> what is kept of the parameter.
    """
    host = torch.device("cpu")

    def expand(values: Mapping[str, Any], state: ParameterState) -> dict[str, Any]:
        layout = state.layout.to(host)
        shape = state.trained_shape
        return _changed(values, lambda x: x.shape == shape, lambda x: layout.expand(x.to(host)))

    return _each(saved, of, expand)


def compressed(saved: Mapping[str, Any], of: Mapping[int, ParameterState]) -> Saved:
    """Return an optimizer's saved state, of parameters' shapes, as master weights have it."""

    def compress(values: Mapping[str, Any], state: ParameterState) -> dict[str, Any]:
        shape = state.weight.shape
        return _changed(
            values,
            lambda x: x.shape == shape,
            lambda x: state.layout.compress(x.to(state.weight.device)).to(torch.float32),
        )

    return _each(saved, of, compress)


def numbered(optimizer: Optimizer, states: Sequence[ParameterState]) -> dict[int, ParameterState]:
    """Return number of a parameter in ``state_dict()`` -> its state, of those that are pruned."""
    by_master = {id(s.master): s for s in states if s.is_compressed}
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return {k: by_master[id(p)] for k, p in enumerate(every) if id(p) in by_master}


def _each(
    saved: Mapping[str, Any],
    of: Mapping[int, ParameterState],
    change: Callable[[Mapping[str, Any], ParameterState], dict[str, Any]],
) -> Saved:
    state = {k: change(v, of[k]) if k in of else v for k, v in saved["state"].items()}
    return {**saved, "state": state}


def _changed(
    values: Mapping[str, Any],
    is_like: Callable[[Tensor], bool],
    change: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    return {k: change(v) if isinstance(v, Tensor) and is_like(v) else v for k, v in values.items()}
