"""Counts of epochs: those behind a file are those of a run that was not stopped.

                                      ready  started  processed  completed
    in epoch 2, and so in its files     3       3         2          2
    Lightning, behind a file of the
    last batch of epoch 1               2       2         2          2

A file with the second line does not say that an epoch is under way. Lightning ends that epoch
early when it goes on from there, or gives samplers the number of an epoch that is over.
"""

from __future__ import annotations

from typing import Any


def count_epoch_begun(fit_loop: Any) -> None:
    """Count the epoch that begins, or goes on, as one that has begun and is not over.

    Args:
        fit_loop: of the Trainer.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> loop = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
        >>> for progress in (loop.epoch_progress.total, loop.epoch_progress.current):
        ...     progress.ready = progress.started = progress.processed = progress.completed = 2
        >>> count_epoch_begun(loop)
        >>> loop.epoch_progress.current.ready, loop.epoch_progress.current.processed
        (3, 2)
    """
    for progress in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        progress.ready = progress.started = progress.processed + 1


def mend_epoch_counts(fit_loop: Any) -> None:
    """Let a file that was written with the second line go on in its epoch.

    Args:
        fit_loop: of the Trainer, with the counts of the file, before it has begun to run.
    """
    epochs, batches = fit_loop.epoch_progress.current, fit_loop.epoch_loop.batch_progress.current
    is_over = epochs.ready == epochs.started == epochs.processed
    if is_over and batches.completed < batches.processed:  # written where a batch ends
        count_epoch_begun(fit_loop)
        fit_loop.restarting = True  # which it is not where it takes the epoch for over
