"""The flush: finish updates in flight where the loop shows weights to others.

Strategy's own hooks of the same names come after the callbacks that read weights (checkpoints,
averaging), so the strategy inserts this callback in front of all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from typing_extensions import override

from lightning_cyclic.compat import Callback, SIGTERMException, WeightAveraging
from lightning_cyclic.plugin.stop_signal import AgreedInterrupt
from lightning_cyclic.plugin.training import AbstractTraining

_LAST_SAVED: Final = "_last_global_step_saved"  # of a ModelCheckpoint
STATE_KEY: Final = (
    "the strategy of lightning_cyclic (without it this run goes on from the newest weights "
    "alone, not with the same bits)"
)


@final
class FlushCallback(Callback):
    """Flush before validation, at the end of epoch and fit, and where weights are averaged.

    On exceptions, stop talking.
    """

    def __init__(
        self,
        training: Callable[[], AbstractTraining | None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._training = training
        self._fail = fail

    @property
    @override
    def state_key(self) -> str:
        """Return what Lightning says is missing where another strategy reads a checkpoint."""
        return STATE_KEY

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return something if a strategy that does not know it would lose versions of weights."""
        training = self._training()
        return {"has_versions": True} if training and training.has_versions else {}

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check a run that goes on in mid-epoch; no callback is to save what is saved already.

        ModelCheckpoint does not remember the step of the file from which a run goes on. It would
        save it once more behind the first batch, in the middle of gradients that are added up.
        """
        if (training := self._training()) is None or not trainer.fit_loop.restarting:
            return
        for callback in trainer.callbacks:
            if vars(callback).get(_LAST_SAVED) == 0:
                setattr(callback, _LAST_SAVED, trainer.global_step)
        if trainer.fit_loop.restarted_mid_epoch:  # no hook says that an epoch begins
            training.begin_epoch()

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if training := self._training():
            training.begin_epoch()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Finish the updates that a callback is about to take into an average of the weights."""
        if (training := self._training()) is None:
            return
        training.end_batch()
        if not training.is_between_steps:  # no update has been made since the last average
            return
        for callback in trainer.callbacks:
            if isinstance(callback, WeightAveraging) and callback.should_update(
                step_idx=trainer.global_step - 1
            ):
                training.flush()
                training.bring()
                return

    @override
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if training := self._training():
            sanity = trainer.sanity_checking
            training.flush()  # first: others may wait for what is sent by it
            if not sanity:
                training.agree_to_stop()
            training.bring()
            numbers = trainer.num_sanity_val_batches if sanity else trainer.num_val_batches
            training.begin_evaluation("validation", numbers)

    @override
    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        if training := self._training():
            training.begin_evaluation("test", trainer.num_test_batches)

    @override
    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        if training := self._training():
            training.begin_evaluation("predict", trainer.num_predict_batches)

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if training := self._training():
            training.flush()  # first, as before validation
            training.agree_to_stop()
            training.end_epoch()
            training.bring()

    @override
    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if training := self._training():
            training.end_epoch()

    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if training := self._training():
            training.end_fit()
            training.bring()

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, (SIGTERMException, AgreedInterrupt)):
            self._fail(exception)
        elif training := self._training():  # all workers stop here, at the same step
            training.flush()
