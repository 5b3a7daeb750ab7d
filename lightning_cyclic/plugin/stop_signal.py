"""Stopping: a SIGTERM travels with the sums instead of a broadcast at the start of every batch.

Lightning's broadcast makes worker 0 wait for all others once per batch: a barrier, which undoes
the stagger. Here the request reaches every worker with the parameters, and all stop at the same
step. Each attribute is replaced on one Trainer's objects only, and only where Lightning has it.

The stages of a pipeline have no such sums between steps: :class:`StopBoard`.

SLURM's signal to requeue a job goes the same way. Lightning saves a checkpoint within its handler,
in the middle of a step, while other ranks wait for messages of that step. Here all save it behind
the step at which they stop, when no gradient is accumulated that it would lose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

_ASKED_EVERY_BATCH = "_broadcast_sigterm_tensor"  # of the epoch loop, since Lightning 2.5.6
_SIGNAL_HANDLER = "_sigterm_notifier_fn"  # of the signal connector
_REQUEUE_HANDLER = "_slurm_sigusr_handler_fn"  # of the same: saves, and calls scontrol


class Asked(Protocol):
    """Be what a signal tells."""

    @property
    def stop_requested(self) -> bool:
        """Say whether this worker was asked to stop."""

    def request_stop(self) -> None:
        """Ask every worker to stop; safe to call from a signal handler."""


@final
class StopBoard:
    """Let any worker of a pipeline ask for a stop, over the store of the default process group.

    Who was asked writes it before his next step. The last stage's worker looks when it has had
    everybody's part of a step, and all learn of it with what that step gave.

    Args:
        key: where in the store the request is written; the same on every worker.
    """

    def __init__(self, key: str) -> None:
        self.stop_requested = False
        self.agreed = False
        self._key = key
        self._told = False
        self._store = dist.distributed_c10d._get_default_store()

    def request_stop(self) -> None:
        """Ask every worker to stop; safe to call from a signal handler."""
        self.stop_requested = True

    def tell(self) -> None:
        """Write down that this worker was asked."""
        if self.stop_requested and not self._told:
            self._told = True
            self._store.set(self._key, "asked")

    def look(self) -> bool:
        """Say whether any worker was asked before the step under way."""
        return self._told or bool(self._store.check([self._key]))

    def agree(self, step: int) -> int:
        """Return the step before which all replicas stop: the first that any of them names."""
        return int(self._store.compare_set(f"{self._key}/step", "", str(step)))


@final
class Requeue:
    """Save a checkpoint and requeue the job where all ranks stop, if SLURM asked any of them to.

    Args:
        trainer: whose signal connector knows how.
        session: is asked to stop.
    """

    def __init__(self, trainer: Trainer, session: Asked) -> None:
        self._trainer = trainer
        self._session = session
        self._save_and_requeue = getattr(trainer._signal_connector, _REQUEUE_HANDLER, None)
        self._signal = 0  # that this rank was sent

    def request(self, signum: int, frame: Any) -> None:
        """Handle the signal: ask every worker to stop."""
        if not self._signal:
            rank_zero_info(
                f"Signal {signum} of SLURM: all ranks save a checkpoint behind the same step, and "
                "the job is requeued"
            )
        self._signal = signum
        self._session.request_stop()

    def is_put_off(self) -> bool:
        """Requeue the job, if any rank was asked to; all ranks have agreed to stop here.

        Returns:
            Whether they are to go on until the gradients that they have added up are applied:
            no checkpoint has these.
        """
        if self._save_and_requeue is None:
            return False
        strategy: Any = self._trainer.strategy
        asked = torch.tensor(self._signal, device=strategy.root_device)
        with strategy.naming("to hear whether SLURM requeues the job"):
            dist.all_reduce(asked, dist.ReduceOp.MAX)
        if not asked:
            return False
        if _accumulates(self._trainer):
            return True
        self._save_and_requeue(int(asked), None)
        return False


def _accumulates(trainer: Trainer) -> bool:
    """Say whether gradients of batches before this one wait for those of others."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    # no batch comes behind the last one of an epoch, which ends its window
    return bool(done % trainer.accumulate_grad_batches)


def replace_stop_broadcast(
    trainer: Trainer, session: Asked, has_agreed: Callable[[], bool]
) -> None:
    """Ask the session instead of all workers, and tell it of signals."""
    signals: Any = trainer._signal_connector
    requeue = Requeue(trainer, session)

    def stop_if_agreed() -> None:
        if has_agreed() and not requeue.is_put_off():
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
        (signals, _REQUEUE_HANDLER, requeue.request),
    ):
        if hasattr(holder, name):
            setattr(holder, name, replacement)


def restore_stop_broadcast(trainer: Trainer) -> None:
    """Undo the replacement."""
    for holder, name in (
        (trainer.fit_loop.epoch_loop, _ASKED_EVERY_BATCH),
        (trainer._signal_connector, _SIGNAL_HANDLER),
        (trainer._signal_connector, _REQUEUE_HANDLER),
    ):
        if name in vars(holder):
            delattr(holder, name)
