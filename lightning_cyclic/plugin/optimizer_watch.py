"""What an optimizer's own step() writes into its groups, and whether it may be called in parts.

Optimizers count their steps in a group (``group["step"] += 1``), or keep an estimate there. Where
stages are updated apart, each call has to begin with what the step before has left.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.group_values import Values, changed_values, copied, noted_values
from lightning_cyclic.plugin.optimizer_trial import may_be_parted

_NO_ESTIMATE = (int, bool, str, type(None))


@final
class OptimizerWatch:
    """Watch the calls of an optimizer's step().

    Args:
        preset: name of the plan, for errors.
    """

    def __init__(self, preset: str) -> None:
        self._preset = preset
        self._has_tried = False
        self._may_be_parted: bool | None = None

    def begin(self, optimizer: Optimizer, updated: Sequence[nn.Parameter]) -> Written:
        """Begin a call.

        Args:
            optimizer: before its step.
            updated: parameters that it has gradients of.

        Raises:
            ConfigurationError: some of the optimizer's, which it may not be called for alone.
        """
        if not self._has_tried and updated and _is_part(optimizer, updated):
            self._has_tried = True
            self._may_be_parted = may_be_parted(optimizer, updated[0].device)
        if self._may_be_parted is False:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() gives parameters other values where it is "
                f"called for some of them at a time, as under preset {self._preset!r}, which "
                "updates stages apart; allowed: optimizers that update each parameter by itself; "
                "switch off what looks at all of them (a norm of all gradients, one rate that is "
                "estimated for all, a count of calls), use torch.optim.AdamW(self.parameters()), "
                "or strategy='ddp'"
            )
        return Written(optimizer, updated, self)

    def check(self, optimizer: Optimizer, updated: Sequence[nn.Parameter], found: Values) -> None:
        """Check what a call has written, where no trial told whether there may be several.

        Raises:
            ConfigurationError: a number that may depend on the gradients, of which the call had
                some alone.
        """
        estimates = ((k, v) for values in found for k, v in values.items() if _may_estimate(v))
        first = next(estimates, None)
        if first and self._may_be_parted is None and _is_part(optimizer, updated):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() has written {first[0]!r} into a parameter "
                f"group ({first[1]!r}), but under preset {self._preset!r} a call updates some of "
                "the parameters and knows nothing of the others; allowed: optimizers that write "
                "counts of steps there; use torch.optim.AdamW(self.parameters()), or "
                "strategy='ddp'"
            )


@final
class Written:
    """Finds the values that a call of step() has written.

    Args:
        optimizer: before its step.
        updated: parameters that it has gradients of.
        watch: checks what is found.
    """

    def __init__(
        self, optimizer: Optimizer, updated: Sequence[nn.Parameter], watch: OptimizerWatch
    ) -> None:
        self._optimizer = optimizer
        self._updated = updated
        self._watch = watch
        self._before = noted_values(optimizer)

    def find(self) -> Values:
        """Return copies of what is new or has changed since, by group.

        Raises:
            ConfigurationError: what may depend on gradients that the call did not have.
        """
        changed = changed_values(self._optimizer, self._before)
        found = [{k: copied(v) for k, v in values.items()} for values in changed]
        self._watch.check(self._optimizer, self._updated, found)
        return found


def closure_called(optimizer: Optimizer, preset: str) -> ConfigurationError:
    """Make the error of an optimizer that computes gradients again, at weights of its own."""
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


def _is_part(optimizer: Optimizer, updated: Sequence[nn.Parameter]) -> bool:
    known = {id(p) for p in updated}
    held = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    return not all(id(p) in known for p in held)


def _may_estimate(value: Any) -> bool:
    """Say whether a value may be an estimate: those are real numbers."""
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return not isinstance(value, _NO_ESTIMATE)
