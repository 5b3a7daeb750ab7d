"""A rank that fails, dies or does not come before training begins: the others name it."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest

from lightning_cyclic.registration import make_strategy
from tests.harness import processes
from tests.harness.trainers import make_trainer
from tests.harness.troubles import assert_stopped, name_of
from tests.modules.classifier import Classifier, MicroBatches, loader

pytestmark = pytest.mark.multi

LIMIT_S = 3.0


class Unlucky(Classifier):
    """Meet trouble on rank 1 before training begins.

    Args:
        trouble: "fails" as a download does, or "dies".
        hook: in which it happens.
    """

    def __init__(self, trouble: str, hook: str) -> None:
        super().__init__("batchnorm_mlp")
        self.trouble, self.hook = trouble, hook

    def meet(self, hook: str) -> None:
        if hook == self.hook and processes.here().rank == 1:
            if self.trouble == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the hub does not answer")

    def setup(self, stage: str) -> None:
        self.meet("setup")

    def configure_optimizers(self) -> Any:
        self.meet("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.meet("on_fit_start")


def attempt(trouble: str, hook: str, preset: str) -> tuple[str, str]:
    """Return with what a fit ends on this rank."""
    if trouble == "does not come" and processes.here().rank == 1:
        time.sleep(2 * LIMIT_S)
        return "nothing", ""
    module = Unlucky(trouble, hook)
    limit = timedelta(seconds=LIMIT_S if trouble == "does not come" else 40.0)
    trainer = make_trainer(make_strategy(preset, timeout=limit), max_epochs=1)
    try:
        trainer.fit(module, loader(MicroBatches(module.kind, 8)))
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("hook", "preset"),
    [("setup", "cyclic_dp"), ("configure_optimizers", "1f1b"), ("on_fit_start", "1f1b")],
)
def test_the_others_name_the_reason_of_one_that_fails(hook: str, preset: str) -> None:
    ends = processes.run(attempt, 3, "fails", hook, preset, time_limit_s=30)
    assert ends.pop(1) == ("OSError", "the hub does not answer")
    when = "in step 0" if hook == "on_fit_start" else "before training began"
    for rank, (kind, text) in zip((0, 2), ends, strict=True):
        assert kind == "PeerError", text
        reason = f"{name_of(1)} failed {when}: OSError: the hub does not answer \\("
        assert re.match(reason, text), text
        assert_stopped(text, rank, 1)


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers"])
def test_the_others_name_one_that_dies(hook: str) -> None:
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(survive, 2, "dies", hook, "cyclic_dp", time_limit_s=30)
    errors = caught.value.errors
    assert errors.pop(1) == "died without a word"
    text = errors[0]
    gone = r"rank 1 on \S+ ended without a word of why: rank 0 on \S+ waited for all ranks to "
    assert re.search(gone, text), text
    assert "\nLook at the log of rank 1.\nPossible causes: it was killed" in text


def survive(*args: Any) -> None:
    """Fail with what a fit ends with on this rank."""
    raise AssertionError(": ".join(attempt(*args)))


def test_a_rank_that_does_not_come_at_all_is_missed() -> None:
    (kind, text), _ = processes.run(attempt, 2, "does not come", "", "1f1b", time_limit_s=40)
    assert kind == "PeerError", text
    assert text.startswith(
        f"rank 0 waited up to {LIMIT_S:g} s for all other ranks to come to the start"
    )
    assert "\nLook at the logs of the other ranks.\n" in text
    assert "timeout=timedelta(minutes=...)" in text
