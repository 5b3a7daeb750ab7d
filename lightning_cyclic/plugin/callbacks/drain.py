"""The drain: finish updates in flight where the loop shows weights to others.

Strategy's own hooks of the same names come after the callbacks that read weights (checkpoints,
averaging), so the strategy inserts this callback in front of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override


class Drained(Protocol):
    """Hold updates in flight."""

    def flush(self) -> None:
        """Finish updates in flight."""

    def fail(self, text: str) -> None:
        """Communicate no more, and tell others why."""

    def begin_epoch(self) -> None:
        """Check what may have changed between epochs."""

    def begin_evaluation(self, what: str, numbers: Sequence[float]) -> None:
        """Check the numbers of batches of each dataloader."""

    def end_epoch(self) -> None:
        """Bring together what is computed at the end of an epoch."""


@final
class DrainCallback(Callback):
    """Flush before validation and at the end of epoch and fit; stop talking on exceptions.

    Args:
        drained: returns what is flushed, if there is anything.
    """

    def __init__(self, drained: Callable[[], Drained | None]) -> None:
        self._drained = drained

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if drained := self._drained():
            drained.begin_epoch()

    @override
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if drained := self._drained():
            drained.flush()
            sanity = trainer.sanity_checking
            numbers = trainer.num_sanity_val_batches if sanity else trainer.num_val_batches
            drained.begin_evaluation("validation", numbers)

    @override
    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        if drained := self._drained():
            drained.begin_evaluation("test", trainer.num_test_batches)

    @override
    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        if drained := self._drained():
            drained.begin_evaluation("predict", trainer.num_predict_batches)

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if drained := self._drained():
            drained.end_epoch()

    @override
    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if drained := self._drained():
            drained.end_epoch()

    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if drained := self._drained():
            drained.flush()

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        drained = self._drained()
        if drained is None:
            return
        if isinstance(exception, SIGTERMException):  # all workers stop here, at the same step
            drained.flush()
        else:
            drained.fail(f"{type(exception).__name__}: {exception}")
