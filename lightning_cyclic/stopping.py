"""Stopping: a SIGTERM travels with the sums instead of a broadcast at the start of every batch.

Lightning's broadcast makes worker 0 wait for all others once per batch: a barrier, which undoes
the stagger. Here the request reaches every worker with the parameters, and all stop at the same
step. Each attribute is replaced on one Trainer's objects only, and only where Lightning has it.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_cyclic.runtime.session import Session

_ASKED_EVERY_BATCH = "_broadcast_sigterm_tensor"  # of the epoch loop, since Lightning 2.5.6
_SIGNAL_HANDLER = "_sigterm_notifier_fn"  # of the signal connector


def replace_stop_broadcast(trainer: Trainer, session: Session) -> None:
    """Ask the session instead of all workers, and tell it of signals."""
    signals: Any = trainer._signal_connector

    def stop_if_agreed() -> None:
        if session.engine is not None and session.engine.stopping:
            signals.received_sigterm = True
            raise SIGTERMException

    def request(signum: Any, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if not session.stop_requested and launcher is not None:
            launcher.kill(signum)
        session.request_stop()

    for holder, name, replacement in (
        (trainer.fit_loop.epoch_loop, _ASKED_EVERY_BATCH, stop_if_agreed),
        (signals, _SIGNAL_HANDLER, request),
    ):
        if hasattr(holder, name):
            setattr(holder, name, replacement)


def restore_stop_broadcast(trainer: Trainer) -> None:
    """Undo the replacement."""
    for holder, name in (
        (trainer.fit_loop.epoch_loop, _ASKED_EVERY_BATCH),
        (trainer._signal_connector, _SIGNAL_HANDLER),
    ):
        if name in vars(holder):
            delattr(holder, name)
