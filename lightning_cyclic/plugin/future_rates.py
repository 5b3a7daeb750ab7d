"""Outlook: the learning rates of updates to come, from copies of the Trainer's schedulers.

A copy is run ahead in front of a twin of the optimizer that has its hyper-parameters and nothing
else. So neither scheduler nor optimizer is disturbed, and what is foretold depends on nothing but
the step that it is foretold in: a flush or a checkpoint changes no number.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    import lightning.pytorch as pl

Row = list[float]  # the learning rate of each parameter group


@final
class Outlook:
    """Foretell learning rates, step by step.

    Only schedulers with ``interval="step"`` move within the horizon. What cannot be foretold stays
    as it is, and that is said once: ReduceLROnPlateau needs a metric, and so may a module's own
    ``lr_scheduler_step``; an epoch's scheduler moves at its end.

    Args:
        trainer: whose schedulers and optimizer are asked.
        furthest: updates to look ahead.

    Source: FTPipe (USENIX ATC 2021), weight prediction, https://github.com/saareliad/FTPipe.
    """

    def __init__(self, trainer: pl.Trainer, furthest: int) -> None:
        self._trainer = trainer
        self._furthest = furthest
        self._rows: dict[int, list[Row]] = {}
        self._configs: list[Any] | None = None  # of what can be looked ahead

    def remember(self, t: int) -> None:
        """Foretell in step ``t``, before its schedulers move on, and forget early steps."""
        self._rows[t] = self._look()
        for old in [k for k in self._rows if k < t - self._furthest]:
            del self._rows[old]

    def rows(self, t: int, horizon: int) -> list[Row] | None:
        """Return the learning rates of the updates behind that of step ``t``, as foretold in it.

        None where nothing was foretold, as in front of a checkpoint of another run.
        """
        rows = self._rows.get(t)
        assert horizon <= self._furthest
        return None if rows is None else rows[1 : 1 + horizon]

    def _look(self) -> list[Row]:
        if self._configs is None:
            self._configs = self._find()
        optimizer = self._trainer.optimizers[0]
        if not self._configs:
            return [_rates(optimizer)] * (1 + self._furthest)
        twin = _twin_of(optimizer)
        schedulers = _copies([config.scheduler for config in self._configs], optimizer, twin)
        batch, rows = self._trainer.fit_loop.epoch_loop.batch_idx, [_rates(twin)]
        for _ in range(self._furthest):
            batch += 1  # as Lightning counts for the frequency of schedulers
            for config, scheduler in zip(self._configs, schedulers, strict=True):
                if batch % config.frequency == 0:
                    scheduler.step()
            batch = batch if batch < self._trainer.num_training_batches else 0
            rows.append(_rates(twin))
        return rows

    def _find(self) -> list[Any]:
        """Return what can be looked ahead; say once what cannot."""
        trainer = self._trainer
        of_steps = [c for c in trainer.lr_scheduler_configs if c.interval == "step"]
        moving = [c for c in of_steps if not c.reduce_on_plateau]
        on_plateau = [type(c.scheduler).__name__ for c in of_steps if c.reduce_on_plateau]
        reasons = dict.fromkeys(on_plateau, "needs a metric")
        if moving and is_overridden("lr_scheduler_step", trainer.lightning_module):
            name = type(trainer.lightning_module).__name__
            reasons[f"{name}.lr_scheduler_step"], moving = "may need more than the scheduler", []
        for c in list(moving):
            optimizer = trainer.optimizers[0]
            try:
                _copies([c.scheduler], optimizer, _twin_of(optimizer))
            except Exception as error:
                reasons[type(c.scheduler).__name__] = f"cannot be copied ({error})"
                moving.remove(c)
        if not moving and not reasons:
            reasons["this Trainer"] = "has no scheduler that moves with each step"
        if reasons:
            why = ", ".join(f"{name} {reason}" for name, reason in reasons.items())
            rank_zero_warn(
                f"lookahead_lrs=True cannot foretell all learning rates: {why}; where it cannot, "
                'they are taken to stay as they are; return a scheduler with {"interval": "step"}'
            )
        return moving

    # ------------------------------------------------------------------ checkpoints

    def state(self, t: int) -> list[Row] | None:
        """Return what was foretold in step ``t``."""
        return self._rows.get(t)

    def put_state(self, t: int, rows: Sequence[Row] | None) -> None:
        """Take from a checkpoint what was foretold in step ``t``."""
        if rows is not None:
            self._rows[t] = [list(row) for row in rows]


def _rates(optimizer: Optimizer) -> Row:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _twin_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with groups of its own, whose parameters and state are left out."""
    twin = copy.copy(optimizer)
    twin.param_groups = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    for group in twin.param_groups:
        group["params"] = []
    twin.state = defaultdict(dict)
    # schedulers warn if they step before the optimizer, and look for its step to be wrapped
    twin.step = optimizer.step  # type: ignore[method-assign]
    twin._opt_called = True  # type: ignore[attr-defined]
    return twin


def _copies(schedulers: list[Any], optimizer: Optimizer, twin: Optimizer) -> list[Any]:
    """Return copies that schedule the twin; nothing of the optimizer is copied."""
    return copy.deepcopy(schedulers, {id(optimizer): twin})
