"""Stopping: a signal travels with the sums instead of a broadcast at the start of every batch.

Lightning's broadcast makes worker 0 wait for all others once per batch: a barrier, which undoes
the stagger. Here the request reaches every worker with the parameters, and all stop at the same
step. Each attribute is replaced on one Trainer's objects only.

The stages of a pipeline have no such sums between steps: :class:`StopBoard`.

Ctrl-C goes the same way, and SLURM's signal to requeue a job. Lightning saves a checkpoint within
its handler, in the middle of a step, while other ranks wait for messages of that step. Here all
save it behind the step at which they stop, when no gradient is accumulated that it would lose.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, final

import torch.distributed as dist

from lightning_cyclic.compat import SIGTERMException, Trainer, logger
from lightning_cyclic.errors import PeerError
from lightning_cyclic.runtime.assembly import Assembly

_ASKED_EVERY_BATCH = "_broadcast_sigterm_tensor"  # of the epoch loop, since Lightning 2.5.2
_SIGNAL_HANDLER = "_sigterm_notifier_fn"  # of the signal connector
_REQUEUE_HANDLER = "_slurm_sigusr_handler_fn"  # of the same: saves, and calls scontrol
_TERMINATED, _INTERRUPTED, _REQUEUED = range(3)  # why ranks stop

# below Lightning's, which is printed
_log = logger()


class AgreedInterrupt(KeyboardInterrupt):
    """End training on every rank at the same step, after Ctrl-C on any of them."""


class Asked(Protocol):
    """Be what a signal tells."""

    @property
    def stop_requested(self) -> bool: ...

    def request_stop(self) -> None: ...


@final
class StopBoard:
    """Let any worker of a pipeline ask for a stop, over the store of the default process group.

    Who was asked writes it before his next step. The last stage's worker looks when it has had
    everybody's part of a step, and all learn of it with what that step gave.
    """

    def __init__(self, assembly: Assembly) -> None:
        assert assembly.crew is not None
        self.stop_requested = False
        self.agreed = False
        self._told = False
        self._store, self._key = assembly.crew.store, f"{assembly.crew.key}/stop"

    def request_stop(self) -> None:
        self.stop_requested = True

    def tell(self) -> None:
        if self.stop_requested and not self._told:
            self._told = True
            with suppress(dist.DistError):  # the store is gone, which all see
                self._store.set(self._key, "asked")

    def look(self) -> bool:
        """Say whether any worker was asked before the step under way.

        Nobody can be where the store is gone, with torchrun's agent or with rank 0: all stop.
        """
        try:
            return self._told or bool(self._store.check([self._key]))
        except dist.DistError:
            return True

    def agree(self, step: int) -> int:
        return int(self._store.compare_set(f"{self._key}/step", "", str(step)))


@final
class StopSignals:
    """Let all ranks stop behind the same step, whichever of them a signal was sent to.

    Args:
        session: is asked to stop.
        has_agreed: says, before a batch, whether all ranks stop there.
    """

    def __init__(self, trainer: Trainer, session: Asked, has_agreed: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._session = session
        self._has_agreed = has_agreed
        self._save_and_requeue = getattr(trainer._signal_connector, _REQUEUE_HANDLER)
        self._received = [0, 0, 0]  # by this rank: the numbers of the signals, by what they ask
        self._handled: Any = None  # what handled Ctrl-C before
        self._replaced: list[tuple[Any, str]] = []

    def begin(self) -> None:
        """Take the place of Lightning's broadcast, and of its handlers."""
        for holder, name, replacement in (
            (self._trainer.fit_loop.epoch_loop, _ASKED_EVERY_BATCH, self._stop_if_agreed),
            (self._trainer._signal_connector, _SIGNAL_HANDLER, self._terminate),
            (self._trainer._signal_connector, _REQUEUE_HANDLER, self._requeue),
        ):
            setattr(holder, name, replacement)
            self._replaced.append((holder, name))

    def hear_interrupts(self) -> None:
        """Handle Ctrl-C from here on; behind the point at which Lightning notes who handles what.

        What a user has installed stays.
        """
        here = threading.current_thread() is threading.main_thread()  # others may set no handlers
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handled = signal.signal(signal.SIGINT, self._interrupt)

    def end(self) -> None:
        for holder, name in self._replaced:
            vars(holder).pop(name, None)
        self._replaced.clear()
        if self._handled is not None and signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, self._handled)
        self._handled = None

    # ------------------------------------------------------------------ signals

    def _terminate(self, signum: int, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._session.stop_requested and launcher is not None:
            launcher.kill(signum)
        self._ask(_TERMINATED, signum, "all ranks stop behind the same step")

    def _requeue(self, signum: int, frame: Any) -> None:
        self._ask(
            _REQUEUED, signum,
            "all ranks save a checkpoint behind the same step, and the job is requeued",
        )  # fmt: skip

    def _interrupt(self, signum: int, frame: Any) -> None:
        if self._received[_INTERRUPTED]:
            raise KeyboardInterrupt
        self._ask(
            _INTERRUPTED, signum,
            "all ranks stop behind the same step of training; interrupt once more to end at once",
        )  # fmt: skip

    def _ask(self, why: int, signum: int, what_follows: str) -> None:
        if not self._received[why]:
            rank = self._trainer.global_rank
            _log.info(f"Rank {rank} received {signal.Signals(signum).name}: {what_follows}")
        self._received[why] = signum
        self._session.request_stop()

    # ------------------------------------------------------------------ where all stop

    def _stop_if_agreed(self) -> None:
        """End training, or requeue the job, before a batch; all ranks come here at the same one.

        Where gradients have been added up that no checkpoint has, a job is requeued later.
        """
        if not self._has_agreed():
            return
        strategy: Any = self._trainer.strategy
        what = "to hear which signals made ranks stop"
        received: list[list[int]] = strategy.assembly.share(self._received, what)
        signums = list(map(max, *received, [0, 0, 0]))
        if not any(signums):  # nobody was asked, but could be any more: no end to exit with 0 for
            raise PeerError(
                f"training ends behind step {self._trainer.global_step}: the store in which ranks "
                "meet is gone, with rank 0 or with the torchrun agent that had it. Look at their "
                "logs, and go on from the newest checkpoint."
            )
        if signums[_REQUEUED] and _accumulates(self._trainer):
            return
        if self._trainer.is_global_zero:
            names = ", ".join(signal.Signals(x).name for x in signums if x)
            _log.info(f"All ranks stop behind step {self._trainer.global_step} ({names})")
        if signums[_REQUEUED]:
            self._save_and_requeue(signums[_REQUEUED], None)
        if signums[_INTERRUPTED]:
            raise AgreedInterrupt
        self._trainer._signal_connector.received_sigterm = True
        raise SIGTERMException


def _accumulates(trainer: Trainer) -> bool:
    """Say whether gradients of batches before this one wait for those of others."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    # no batch comes behind the last one of an epoch, which ends its window
    return bool(done % trainer.accumulate_grad_batches)
