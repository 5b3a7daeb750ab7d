"""Accumulation: how many batches of a worker the Trainer adds up to one step."""

from __future__ import annotations

from lightning_cyclic.compat import GradientAccumulationScheduler, Trainer
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.options import Options


def batches_of_step(trainer: Trainer) -> int:
    """Count the batches of the step that begins: fewer at the end of an epoch, which ends it.

    Args:
        trainer: whose loop has counted the first of them.
    """
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    every = trainer.accumulate_grad_batches
    left = trainer.num_training_batches - ready + 1
    return int(min(every - (ready - 1) % every, left))


def plan_of_rounds(
    options: Options,
    num_stages: int,
    relayed: tuple[int, ...],
    relayed_until: tuple[int, ...],
    rounds: int,
) -> Plan:
    """Make a plan in which each worker runs so many batches per step.

    Args:
        options: what the user chose.
        num_stages: how many stages there are.
        relayed: stages whose buffers travel.
        relayed_until: the last stage in which those of each change.
        rounds: batches of each worker.
    """
    num_microbatches = rounds * (options.num_workers or 1) if rounds > 1 else None
    return options.plan(num_stages, relayed, relayed_until, num_microbatches=num_microbatches)


def may_accumulate(trainer: Trainer) -> bool:
    """Say whether a step may have several batches."""
    scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks)  # type: ignore[attr-defined]
    return scheduled or trainer.accumulate_grad_batches != 1
