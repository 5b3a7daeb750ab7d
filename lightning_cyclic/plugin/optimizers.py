"""Optimizers: which may be called for some of their parameters, and which for single elements.

Where stages are updated apart, each call of step() has the gradients of one stage. Whoever updates
each parameter by itself does not notice; who takes a norm of all gradients, estimates one rate for
all, or counts calls, would train something else. With compressed states the same holds for each
element. Torch's own are known; any other says so itself:

    optimizer.updates_apart = "parameter"   # each parameter by its own gradient and state
    optimizer.updates_apart = "element"     # and each element of it, where a zero stays a zero
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, final

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.bits import Mark

SAID_BY: Final = "updates_apart"  # the attribute of an optimizer, or of its class
_BY_ELEMENT: Final = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad,
    optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
_BY_PARAMETER: Final = {"Adafactor", "Muon"}  # of torch and transformers, from some version on


def updates_each(what: str, optimizer: Optimizer) -> bool:
    """Say whether an optimizer is known, or says itself, to update each of something by itself.

    A subclass counts as its parent unless it has a ``step`` of its own.

    Raises:
        ConfigurationError: it says something else.

    Example:
        >>> weights = [nn.Parameter(nn.Linear(2, 2).weight)]
        >>> updates_each("element", optim.AdamW(weights)), updates_each("element", optim.LBFGS(weights))
        (True, False)
    """  # noqa: E501  (as they are)
    said = getattr(optimizer, SAID_BY, None)
    if said not in (None, "parameter", "element"):
        raise ConfigurationError(
            f"{type(optimizer).__name__}.{SAID_BY} is {said!r}; allowed: 'parameter', 'element'; "
            f"use optimizer.{SAID_BY} = 'parameter'"
        )
    if said is not None:
        return said in ("element", what)
    kind = type(optimizer)
    if any(issubclass(kind, known) and _has_step_of(kind, known) for known in _BY_ELEMENT):
        return True
    is_named = kind.__name__ in _BY_PARAMETER and _package(kind) in ("torch", "transformers")
    return what == "parameter" and is_named


def _has_step_of(kind: type[Optimizer], known: type[Optimizer]) -> bool:
    # torch wraps every class's step for the profiler
    return inspect.unwrap(kind.step) is inspect.unwrap(known.step)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def check_parted(optimizer: Optimizer, updated: Sequence[nn.Parameter], preset: str) -> None:
    """Refuse to call an optimizer for some of its parameters, unless it treats each by itself."""
    if not updated or updates_each("parameter", optimizer):
        return
    known = {id(p) for p in updated}
    held = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    if all(id(p) in known for p in held):
        return
    name = type(optimizer).__name__
    raise ConfigurationError(
        f"{name}.step() is called for some of its parameters at a time under preset {preset!r}, "
        f"which updates stages apart, and nothing says that {name} updates each parameter by "
        "itself; allowed: optimizers of torch.optim but LBFGS, and others that say so; if it has "
        "no norm of all gradients, no rate that is estimated for all, and counts its steps in "
        f"parameter groups or in the state of parameters, use optimizer.{SAID_BY} = 'parameter'; "
        "else use torch.optim.AdamW(self.parameters()), or strategy='ddp'"
    )


@final
class Written:
    """Find the values that a call of step() writes into groups: counts of steps, most often.

    Where stages are updated apart, each call has to begin with what the step before has left.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = noted_values(optimizer)

    def find(self) -> Values:
        """Return copies of what is new or has changed since, by group."""
        changed = changed_values(self._optimizer, self._before)
        return [{k: copied(v) for k, v in values.items()} for values in changed]


def closure_called(optimizer: Optimizer, preset: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(optimizer).__name__}.step() calls its closure, to compute gradients itself, but "
        f"under preset {preset!r} these are of steps and weights that are over when it is called; "
        "allowed: optimizers that need no closure; use torch.optim.AdamW(self.parameters()), or "
        "strategy='1f1b' or 'ddp'"
    )


@contextmanager
def without_closure(optimizer: Optimizer, preset: str) -> Iterator[None]:
    """Run the body, which calls step() without a closure.

    Raises:
        ConfigurationError: it failed where the optimizer calls its closure, or asks for it.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        if any("closure" in text for text in (str(error), *(f.line or "" for f in frames))):
            raise closure_called(optimizer, preset) from error
        raise


Values: TypeAlias = list[dict[str, Any]]  # by group, without its parameters
Noted: TypeAlias = list[dict[str, Mark]]


def values_of(optimizer: Optimizer) -> Values:
    return [
        {k: copied(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def put_values(
    optimizer: Optimizer, values: Sequence[Mapping[str, Any]], added: Collection[str] = ()
) -> None:
    """Give groups values.

    Args:
        optimizer: whose groups; those behind the last that has values stay as they are.
        added: keys that are taken out where there is no value.
    """
    for group, given in zip(optimizer.param_groups, values, strict=False):
        for key in added:
            if key not in given:
                group.pop(key, None)
        group.update({k: copied(v) for k, v in given.items()})


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def noted_values(optimizer: Optimizer) -> Noted:
    return [
        {k: Mark.of(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def check_groups(optimizer: Optimizer, num_groups: int) -> None:
    """Refuse groups that have come since there were so many.

    Raises:
        ConfigurationError: there are others.
    """
    if len(optimizer.param_groups) != num_groups:
        raise ConfigurationError(
            "a parameter group of the optimizer was added within a step, by training_step or a "
            "hook of its backward or update, when it is known what the step updates; allowed: "
            "groups that come between steps; add it in on_train_batch_start, or where epochs begin"
        )


def changed_values(optimizer: Optimizer, before: Noted) -> Values:
    """Return what is new or has changed in each group; not copies.

    Raises:
        ConfigurationError: there are other groups.
    """
    check_groups(optimizer, len(before))
    return [
        {k: v for k, v in group.items() if k != "params" and _differs(v, noted.get(k))}
        for group, noted in zip(optimizer.param_groups, before, strict=True)
    ]


def _differs(value: Any, before: Mark | None) -> bool:
    if before is None:
        return True
    if isinstance(value, Tensor):  # whose values, on a GPU, would have to be waited for
        return not before.is_of(value)
    return value is not before.value and bool(value != before.value)
