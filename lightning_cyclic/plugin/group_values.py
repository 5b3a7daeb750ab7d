"""Values of an optimizer's parameter groups: hyper-parameters, and what step() writes there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from lightning_cyclic.errors import ConfigurationError

Values: TypeAlias = list[dict[str, Any]]  # by group, without its parameters
Noted: TypeAlias = list[dict[str, tuple[Any, int]]]  # by group, and how often each was changed


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


def noted_values(optimizer: Optimizer) -> Noted:
    """Return the values of each group themselves, to tell later what has changed."""
    return [
        {k: (v, _version(v)) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def changed_values(optimizer: Optimizer, before: Noted) -> Values:
    """Return what is new or has changed in each group; not copies.

    Raises:
        ConfigurationError: there are other groups.
    """
    if len(optimizer.param_groups) != len(before):
        raise ConfigurationError(
            "a parameter group of the optimizer was added within a step, by training_step or a "
            "hook of its backward or update, when it is known what the step updates; allowed: "
            "groups that come between steps; add it in on_train_batch_start, or where epochs begin"
        )
    return [
        {k: v for k, v in group.items() if k != "params" and _differs(v, noted.get(k))}
        for group, noted in zip(optimizer.param_groups, before, strict=True)
    ]


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _differs(value: Any, before: tuple[Any, int] | None) -> bool:
    if before is None:
        return True
    then, version = before
    if isinstance(value, Tensor):  # whose values, on a GPU, would have to be waited for
        return value is not then or value._version != version
    return value is not then and bool(value != then)
