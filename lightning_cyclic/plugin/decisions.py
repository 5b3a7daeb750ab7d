"""Decisions that all ranks of a pipeline without a flush must take alike.

A rank learns what a step has logged when the pipeline tells it, which may be in a later step. What
decides by such a metric decides otherwise on each rank, and they would wait for each other.
"""

from __future__ import annotations

from typing import Any

from lightning_cyclic.compat import EarlyStopping, ModelCheckpoint, Trainer
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.agreement import gather_texts


def check_monitors(trainer: Trainer, preset: str, *, validates: bool) -> None:
    """Refuse what decides within an epoch by metrics of its steps.

    Args:
        trainer: whose training has logged something.
        preset: name of the plan, for errors.
        validates: whether validation is to begin within the epoch, behind which more decide.

    Raises:
        ConfigurationError: with the callback or scheduler, and its metric.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    of_steps = [r for r in results.values() if r.meta.on_step]
    names = {x for r in of_steps for x in results._forked_name(r, on_step=True)}
    found: dict[str, Any] = {
        type(callback).__name__: callback.monitor
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if _decides(callback, trainer, validates=validates)
    }
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == "step":
            found[type(config.scheduler).__name__] = config.monitor
    for what, monitor in found.items():
        if monitor in names:
            raise ConfigurationError(
                f"{what} decides within an epoch by {monitor!r}, a metric of the steps of "
                f"training, but under preset {preset!r} ranks learn it at different times, and "
                "would decide otherwise; allowed: metrics that validation logs, and metrics of "
                "training at the end of an epoch; monitor one of validation, decide at the end "
                "of epochs (ModelCheckpoint(save_on_train_epoch_end=True), "
                "EarlyStopping(check_on_train_epoch_end=True), 'interval': 'epoch' of a "
                "scheduler), or use strategy='1f1b'"
            )


def _decides(callback: Any, trainer: Trainer, *, validates: bool) -> bool:
    """Say whether a callback decides by its metric behind a batch, or behind validation."""
    if isinstance(callback, EarlyStopping):
        return validates and not callback._check_on_train_epoch_end
    if not isinstance(callback, ModelCheckpoint):
        return False
    if callback._every_n_train_steps >= 1 or callback._train_time_interval is not None:
        return True
    return validates and not callback._should_save_on_train_epoch_end(trainer)


def require_same_stop(trainer: Trainer, group: Any) -> None:
    """Refuse that some ranks end training where others go on; all must call it.

    Raises:
        ConfigurationError: on every rank, with those that stop.
    """
    told = gather_texts("stop" if trainer.should_stop else "", group)
    stops = [r for r, text in enumerate(told) if text]
    if stops and len(stops) < len(told):
        others = [r for r in range(len(told)) if r not in stops]
        raise ConfigurationError(
            f"trainer.should_stop is set on {_ranks(stops)}, and not on {_ranks(others)}; "
            "allowed: the same on every rank; set it by what all ranks know alike: metrics of "
            "validation, or of training at the end of an epoch"
        )


def stopping(trainer: Trainer) -> str:
    """Say what all ranks come together for where this one ends training within an epoch."""
    return (
        f"to stop training as rank {trainer.global_rank} does, whose trainer.should_stop is set "
        "(metrics of a step, which ranks learn at different times, may not decide it)"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
