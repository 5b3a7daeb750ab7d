"""Runs in which a rank dies, hangs, fails or is asked to stop, and what the others say of it."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic.errors import PeerError
from lightning_cyclic.plugin.strategy import PlannedStrategy
from lightning_cyclic.registration import make_strategy
from lightning_cyclic.runtime.transport.choice import Route
from tests.harness import processes
from tests.harness.trainers import make_trainer
from tests.modules.chains import Chain
from tests.modules.classifier import Classifier, MicroBatches, loader

LINGERS_S, TIMEOUT_S = 12.0, 20.0
BAD_BATCH = BAD_STEP = 5  # of twenty, or twelve: in mid-epoch
NUM_STEPS, NUM_MICRO = 12, 4
PIPELINES = ("gpipe", "1f1b")
LOGGER = "lightning.pytorch.lightning_cyclic"
MADE: list[Any] = []  # modules of this process
NAME = r"rank {r} on \S+(?: \(stages? [^)]+\))?"
DO = r"to (?:send|be ready for) [a-z ]+(?:, stage \d+)?(?:, micro-batch \d+)?"


def name_of(rank: int | str) -> str:
    """Return the pattern of what a rank is called; any rank is one digit."""
    return NAME.format(r=rank)


def waited(rank: int | str, peer: int | str, phase: str = r"in step \d+") -> str:
    """Return the pattern of a first line: who waited for whom, for how long, for what, when."""
    by = name_of(rank)
    alone = f"{name_of(0)}, through which ranks find each other, cannot be reached from {by}"
    silent = f"(?:; {name_of('[0-9]')} did not answer|; {alone})?"
    what = f"{DO}, {phase}: it did not come in time"
    return f"^{by} waited [0-9.]+ s for {name_of(peer)} {what}{silent}\\.$"


def gone(rank: int | str, by: int | str, phase: str = r"in step \d+") -> str:
    """Return the pattern of the line of whoever saw another rank go."""
    return (
        f"{name_of(rank)} ended without a word of why: {name_of(by)} waited for it {DO}, {phase}"
    )


def said_by(text: str) -> str:
    """Return the message behind a traceback, without the name of its kind, and without notes."""
    said = text[text.rindex("lightning_cyclic.errors.") :].partition(": ")[2]
    return said.partition("\nWhat this rank did last is in ")[0].strip()


def assert_stopped(text: str, rank: int, *culprits: int) -> None:
    """Look for one line in which a rank names the culprit first, and then what to do."""
    said = said_by(text) if "lightning_cyclic.errors." in text else text
    assert len(said.splitlines()) == 1, text
    culprit: int | str = next(c for c in culprits if re.match(name_of(c), said))
    because = rf"; this rank \({rank}\) stopped because of it"
    if "did not come in time" in said:  # whom everybody waits for may wait itself
        culprit = r"\d"
    assert re.search(rf"{because}\. Look at the log of rank {culprit}\.$", said), text


def assert_told(text: str, rank: int, *peers: int) -> None:
    """Look for what to do behind the first line, and for the timetable behind that."""
    first, todo, causes, arrow, *timetable = said_by(text).splitlines()
    assert any(f"Look at the log of rank {peer}." == todo for peer in peers), text
    assert not re.search(r"[A-Z]_|[<>@]", first), text  # no codes of actions
    assert causes.startswith("Possible causes: "), text
    assert arrow.startswith("The arrow shows the action, "), text
    assert re.search(rf"w\d is rank {rank}\b", arrow), text
    assert any(line.strip() == "^" for line in timetable), text


class Troubled(Classifier):
    """Meet trouble in one batch of one worker.

    Args:
        trouble: what happens.
        culprit: on which worker.
        bad_batch: in which batch.
    """

    def __init__(
        self, trouble: Callable[[], None], culprit: int, bad_batch: int = BAD_BATCH
    ) -> None:
        super().__init__("batchnorm_mlp")
        self.trouble, self.culprit, self.bad_batch = trouble, culprit, bad_batch
        self.met_at = 0.0  # on the clock that all processes share

    @property
    def done(self) -> int:
        return len(self.losses)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == self.bad_batch and int(os.environ["NODE_RANK"]) == self.culprit:
            self.met_at = time.monotonic()
            self.trouble()
        return super().training_step(batch, batch_idx)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def be_asked_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def be_interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)


STOPS: dict[str, tuple[Callable[[], None], type[BaseException]]] = {
    "SIGTERM": (be_asked_to_stop, SIGTERMException),
    "SIGINT": (be_interrupted, SystemExit),  # Lightning ends the program after Ctrl-C
}


def assert_told_of_stop(said: list[list[str]], culprit: int, signal_name: str) -> None:
    """Look for who says that it was asked, and what all do; on rank 0 also where they stopped."""
    asked = rf"Rank {culprit} received {signal_name}: all ranks stop behind the same step"
    assert [bool(re.match(asked, line)) for line in said[culprit][:1]] == [True]
    assert re.match(rf"All ranks stop behind step \d+ \({signal_name}\)$", said[0][-1])
    assert sum(line.startswith("All ranks") for lines in said for line in lines) == 1


def fail() -> None:
    raise ZeroDivisionError("the batch is broken")


def run_out_of_memory() -> None:
    """Ask for more than any machine can address, of the GPU where this rank has one."""
    torch.empty(10**17, dtype=torch.uint8, device="cuda" if torch.cuda.is_initialized() else "cpu")


class Trap(nn.Module):
    """Meet trouble in the forward of one micro-batch; what goes in comes out.

    Args:
        trouble: what happens.
    """

    def __init__(self, trouble: Callable[[], None]) -> None:
        super().__init__()
        self.trouble = trouble
        self.armed = False
        self.met_at = 0.0  # on the clock that all processes share

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            self.armed = False
            self.met_at = time.monotonic()
            self.trouble()
        return x


class TroubledStage(Chain):
    """Meet trouble inside one layer, which one stage alone runs, in mid-epoch and mid-step.

    Args:
        trouble: what happens.
        culprit: in which layer.
        phase: "train" or "val".
    """

    def __init__(self, trouble: Callable[[], None], culprit: int, phase: str) -> None:
        super().__init__()
        self.traps = [Trap(trouble)]  # in a list: no submodule
        self.culprit, self.phase = culprit, phase
        self.calls = {"train": 0, "val": 0}
        self.done = 0
        self.layers[culprit].register_forward_hook(self.meet)

    def meet(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        phase, place = "train" if self.training else "val", processes.here()
        if phase == "val" and place.rank != rank_of_layer(self.culprit, place.num_ranks):
            return output  # rank 0 looks at the whole of a validation step, before the first one
        if self.trainer.global_step >= BAD_STEP and phase == self.phase:
            self.calls[phase] += 1
            self.traps[0].armed = self.calls[phase] == (2 if phase == "train" else 1)
        return self.traps[0](output)

    @property
    def met_at(self) -> float:
        return self.traps[0].met_at

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def on_train_batch_end(self, *args: Any) -> None:
        self.done += 1


def batches() -> DataLoader[Any]:
    data = torch.randn(NUM_STEPS, 8, 6, generator=torch.Generator().manual_seed(3))
    return DataLoader([[x] for x in data], batch_size=None)


def strategy_of(
    preset: str, num_ranks: int, timeout_s: float = TIMEOUT_S, route: Route = "auto",
    backend: str | None = None,
) -> PlannedStrategy:  # fmt: skip
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "transport": route}
    options |= {"process_group_backend": backend}
    if preset in PIPELINES:
        starts = ["layers.2"] if num_ranks == 2 else ["layers.1", "layers.2", "layers.3"]
        options |= {"stages": starts, "num_microbatches": NUM_MICRO}
    return make_strategy(preset, **options)


def fit(
    trouble: Callable[[], None], culprit: int, preset: str, timeout_s: float = TIMEOUT_S,
    bad_batch: int = BAD_BATCH, route: Route = "auto", phase: str = "train", rounds: int = 1,
    on_gpu: bool = False,
) -> Troubled | TroubledStage:  # fmt: skip
    """Train, with trouble on a worker; in a pipeline, in a layer; on a GPU over NCCL."""
    n = processes.here().num_ranks
    strategy = strategy_of(preset, n, timeout_s, route, "nccl" if on_gpu else None)
    place: dict[str, Any] = {"accelerator": "gpu", "devices": [0]} if on_gpu else {}
    if on_gpu:
        warnings.simplefilter("ignore")  # what torch says of a GPU is no matter here
    if preset in PIPELINES:
        stage = TroubledStage(trouble, culprit, phase)
        trainer = make_trainer(
            strategy, max_epochs=2 * rounds, limit_val_batches=2 if phase == "val" else 0,
            num_sanity_val_steps=0, **place,
        )  # fmt: skip
        MADE.append(stage)
        trainer.fit(stage, batches(), batches())
        return stage
    module = Troubled(trouble, culprit, bad_batch)
    MADE.append(module)
    trainer = make_trainer(strategy, max_epochs=1, **place)
    trainer.fit(module, loader(MicroBatches(module.kind, 20 * rounds * n)))
    return module


def rank_of_layer(culprit: int, num_ranks: int) -> int:
    """Return the rank of the stage that runs a layer: the last stage is on rank 0."""
    return num_ranks - 1 - culprit * num_ranks // 4


def worker_of(rank: int, num_ranks: int) -> int:
    return num_ranks - 1 - rank


def assert_drawn(text: str, rank: int, num_ranks: int) -> None:
    """Look for the arrow, under the action in this rank's row, and for which row is whose."""
    rows = [f"w{worker_of(r, num_ranks)} is rank {r}" for r in reversed(range(num_ranks))]
    assert ", ".join(rows) + ":" in text, text
    timetable = text[text.index("The arrow shows the action") :].splitlines()
    arrow = next(line for line in timetable if line.strip() == "^")
    row = timetable[timetable.index(arrow) - 1]
    action = re.findall(r"the action, (\S+)#-?\d+ in slot", text)[0]
    assert row.startswith(f"w{worker_of(rank, num_ranks)} "), text
    assert row[: len(arrow)].endswith(action), text
    assert re.search(r" \dF\d@\d", row[: len(arrow)]), text  # among what the worker does


def fit_and_linger(folder: Path, fit: Callable[..., Any], *args: Any) -> tuple[str, float]:
    """Return the error and when it came; the worker that fails lives on until the others end."""
    try:
        fit(*args)
    except PeerError as error:
        (folder / str(processes.here().rank)).touch()
        return str(error), time.monotonic()
    except ZeroDivisionError:
        failed_at = time.monotonic()
        linger(folder)
        return "", failed_at
    raise AssertionError("nothing failed")


def linger(folder: Path) -> None:
    """Keep this process until all others have ended, at most LINGERS_S."""
    until, others = time.monotonic() + LINGERS_S, processes.here().num_ranks - 1
    while time.monotonic() < until and len(list(folder.iterdir())) < others:
        time.sleep(0.05)


def errors_of(
    function: Callable[..., Any], num_ranks: int, *args: Any, **limits: Any
) -> dict[int, str]:
    """Return rank -> with what it failed."""
    limits = {"time_limit_s": 55, "after_failure_s": 15} | limits
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(function, num_ranks, *args, **limits)
    return caught.value.errors


def rank_of(culprit: int, preset: str, num_ranks: int) -> int:
    return rank_of_layer(culprit, num_ranks) if preset in PIPELINES else culprit


def assert_death_is_told(
    errors: dict[int, str], num_ranks: int, culprit: int, preset: str
) -> None:
    """Look for who died, in what every other rank says, and for what it waited then."""
    victim = rank_of(culprit, preset, num_ranks)
    assert errors.pop(victim) == processes.WORDLESS
    assert len(errors) == num_ranks - 1
    for r, text in errors.items():
        assert "PeerError: " in text, text
        assert re.match(name_of(victim) + " ended without a word of why", said_by(text)), text
        if "Possible causes" not in text:
            assert_stopped(text, r, victim)
            continue
        assert re.match(gone(victim, r), said_by(text)), text
        assert_told(text, r, victim)
        if preset in PIPELINES:
            assert f"(stage {num_ranks - 1 - victim}) ended" in text
            assert_drawn(text, r, num_ranks)
    # with rank 0 goes the store, and that is known everywhere
    assert victim == 0 or any("Possible causes" in text for text in errors.values())


def assert_silence_is_told(
    errors: dict[int, str], num_ranks: int, culprit: int, preset: str
) -> None:
    """Look for who was silent, in what every other rank says, and for what it waited."""
    bad = rank_of(culprit, preset, num_ranks)
    assert errors.pop(bad).startswith("did not end")
    assert len(errors) == num_ranks - 1
    assert any("WaitTimeoutError: " in text for text in errors.values())
    assert any(f"Look at the log of rank {bad}." in text for text in errors.values())
    for r, text in errors.items():
        if "WaitTimeoutError: " not in text:
            assert_stopped(text, r, *range(num_ranks))
            continue
        assert re.match(waited(r, r"\d"), said_by(text), re.MULTILINE), text
        if preset in PIPELINES:
            assert_told(text, r, *range(num_ranks))
            assert_drawn(text, r, num_ranks)
        else:
            assert re.search(rf"; {name_of(bad)} did not answer\.", text), text
            assert_told(text, r, bad)


def assert_lack_of_memory_is_told(
    errors: dict[int, str], num_ranks: int, culprit: int, preset: str, whose: str
) -> None:
    """Look for whose memory was lacking, on the rank itself and in what every other one says."""
    bad = rank_of(culprit, preset, num_ranks)
    lacking = f"out of the {whose}'s memory"
    assert lacking in errors.pop(bad)
    assert len(errors) == num_ranks - 1
    for r, text in errors.items():
        said = said_by(text)
        assert re.match(rf"{name_of(bad)} failed in step \d+: {lacking}", said), text
        because = rf"; this rank \({r}\) stopped because of it\. Look at the log of rank {bad}\."
        assert re.search(rf"{because} To need less memory, use one of: ", said), text
