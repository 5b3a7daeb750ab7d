"""Values of an optimizer's parameter groups: hyper-parameters, and what step() writes there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

Values: TypeAlias = list[dict[str, Any]]  # by group, without its parameters


def values_of(optimizer: Optimizer) -> Values:
    """Return copies of the values of each group."""
    return [
        {k: copied(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def put_values(
    optimizer: Optimizer,
    values: Sequence[Mapping[str, Any]],
    added: Collection[str] = (),
) -> None:
    """Give groups values.

    Args:
        optimizer: whose groups; those behind the last that has values stay as they are.
        values: by group.
        added: keys that are taken out where there is no value.
    """
    for group, given in zip(optimizer.param_groups, values, strict=False):
        for key in added:
            if key not in given:
                group.pop(key, None)
        group.update({k: copied(v) for k, v in given.items()})


def copied(value: Any) -> Any:
    """Return a value that nobody changes in place."""
    return value.clone() if isinstance(value, Tensor) else value
