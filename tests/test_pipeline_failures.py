"""A stage that dies, hangs, fails or is asked to stop: no other waits for ever, all say why."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic.plugin.strategy import PlannedStrategy
from lightning_cyclic.registration import make_strategy
from tests import processes
from tests.corpus import assert_same, make_trainer, weights_of
from tests.rows import chosen, in_turn
from tests.spoiled_chains import Chain
from tests.test_failures import (
    LINGERS_S,
    STOPS,
    TIMEOUT_S,
    Said,
    assert_stopped,
    assert_told,
    assert_told_of_stop,
    die,
    errors_of,
    fail,
    fit_and_linger,
    freeze,
    gone,
    name_of,
    said_by,
    waited,
)

pytestmark = pytest.mark.multi

NUM_STEPS, NUM_MICRO, BAD_STEP = 12, 4, 5
PRESETS = ["gpipe", "1f1b"]


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


class Troubled(Chain):
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
        self.batches = 0
        self.layers[culprit].register_forward_hook(self.meet)

    def meet(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        phase, place = "train" if self.training else "val", processes.here()
        if phase == "val" and place.rank != rank_of_layer(self.culprit, place.num_ranks):
            return output  # rank 0 looks at the whole of a validation step, before the first one
        if self.trainer.global_step >= BAD_STEP and phase == self.phase:
            self.calls[phase] += 1
            self.traps[0].armed = self.calls[phase] == (2 if phase == "train" else 1)
        return self.traps[0](output)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1


def batches() -> DataLoader[Any]:
    data = torch.randn(NUM_STEPS, 8, 6, generator=torch.Generator().manual_seed(3))
    return DataLoader([[x] for x in data], batch_size=None)


def strategy_of(preset: str, num_ranks: int, timeout_s: float = TIMEOUT_S) -> PlannedStrategy:
    starts = ["layers.2"] if num_ranks == 2 else ["layers.1", "layers.2", "layers.3"]
    limit = timedelta(seconds=timeout_s)
    return make_strategy(preset, stages=starts, num_microbatches=NUM_MICRO, timeout=limit)


def fit(
    trouble: Callable[[], None], culprit: int, preset: str, timeout_s: float = TIMEOUT_S,
    phase: str = "train",
) -> Troubled:  # fmt: skip
    module = Troubled(trouble, culprit, phase)
    strategy = strategy_of(preset, processes.here().num_ranks, timeout_s)
    trainer = make_trainer(
        strategy, max_epochs=2, limit_val_batches=2 if phase == "val" else 0,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, batches(), batches())
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


@pytest.mark.parametrize(
    ("num_ranks", "culprit", "preset"), in_turn([(2, 0), (2, 3), (4, 1), (4, 3)], PRESETS)
)
def test_when_a_worker_dies_every_other_one_says_for_what_it_waited(
    num_ranks: int, culprit: int, preset: str
) -> None:
    errors = errors_of(fit, num_ranks, die, culprit, preset)
    victim = rank_of_layer(culprit, num_ranks)
    assert errors.pop(victim) == "died without a word"
    assert len(errors) == num_ranks - 1
    for r, text in errors.items():
        assert "PeerError: " in text, text
        assert re.match(name_of(victim) + " ended without a word of why", said_by(text)), text
        if "Possible causes" in text:
            assert re.match(gone(victim, r), said_by(text)), text
            assert f"(stage {num_ranks - 1 - victim}) ended" in text
            assert_told(text, r, victim)
            assert_drawn(text, r, num_ranks)
        else:
            assert_stopped(text, r, victim)
    assert victim == 0 or any("Possible causes" in text for text in errors.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "culprit", "preset"),
    chosen([(*who, preset) for who in [(2, 0), (4, 2)] for preset in PRESETS], [(2, 0, "1f1b")]),
)
def test_when_a_worker_is_silent_every_other_one_says_for_what_it_waited(
    num_ranks: int, culprit: int, preset: str
) -> None:
    bad = rank_of_layer(culprit, num_ranks)
    errors = errors_of(fit, num_ranks, freeze, culprit, preset, 3.0, frozen={bad})
    assert errors.pop(bad).startswith("did not end")
    assert len(errors) == num_ranks - 1
    assert any("WaitTimeoutError: " in text for text in errors.values())
    assert any(f"Look at the log of rank {bad}." in text for text in errors.values())
    for r, text in errors.items():
        if "WaitTimeoutError: " in text:
            assert re.match(waited(r, r"\d"), said_by(text), re.MULTILINE), text
            assert_told(text, r, *range(num_ranks))
            assert_drawn(text, r, num_ranks)
        else:
            assert_stopped(text, r, *range(num_ranks))


@pytest.mark.parametrize(
    ("num_ranks", "culprit", "phase", "preset"),
    chosen(
        [
            (*who, phase, preset)
            for who in [(2, 0), (2, 3), (4, 0), (4, 2), (4, 3)]
            for phase in ("train", "val")
            for preset in PRESETS
        ],
        [(2, 0, "train", "gpipe"), (4, 2, "val", "1f1b")],
    ),
)
def test_a_stage_that_fails_and_lives_on_holds_up_nobody(
    num_ranks: int, culprit: int, phase: str, preset: str, tmp_path: Path
) -> None:
    args = (tmp_path, fit, fail, culprit, preset, 40.0, phase)
    ends = processes.run(fit_and_linger, num_ranks, *args, time_limit_s=55)
    bad = rank_of_layer(culprit, num_ranks)
    _, failed_at = ends[bad]
    for r, (text, ended_at) in enumerate(ends):
        if r != bad:
            when = f"in step {BAD_STEP if phase == 'train' else NUM_STEPS}"
            reason = f"{name_of(bad)} failed {when}: ZeroDivisionError: the batch is broken \\("
            assert re.match(reason, text), text
            assert f"(stage {num_ranks - 1 - bad}) failed" in text
            assert_stopped(text, r, bad)
            assert ended_at < failed_at + LINGERS_S / 2


def fit_until_asked(
    culprit: int, preset: str, how: str
) -> tuple[int, dict[str, Tensor], float, float, list[str]]:
    """Return batches done, weights, when this rank was asked (0: it was not), the end, its log."""
    ask, ends_with = STOPS[how]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    module, said = Troubled(ask, culprit, "train"), Said()
    trainer = make_trainer(strategy_of(preset, processes.here().num_ranks), max_epochs=4)
    with pytest.raises(ends_with) as ended:
        trainer.fit(module, batches())
    assert ended.type is ends_with
    met_at = module.traps[0].met_at
    return module.batches, weights_of(module), met_at, time.monotonic(), said.lines


@pytest.mark.parametrize(
    ("num_ranks", "culprit", "how", "preset"),
    in_turn([(2, 0, "SIGTERM"), (2, 3, "SIGINT"), (4, 1, "SIGTERM")], PRESETS),
)
def test_all_stop_at_the_same_step_soon_after_one_is_asked_to(
    num_ranks: int, culprit: int, how: str, preset: str
) -> None:
    ends = processes.run(fit_until_asked, num_ranks, culprit, preset, how, time_limit_s=50)
    done = {batches for batches, *_ in ends}
    asked_at = max(asked for _, _, asked, *_ in ends)
    asked = rank_of_layer(culprit, num_ranks)
    assert_told_of_stop([said for *_, said in ends], asked, how)
    assert len(done) == 1, done
    assert BAD_STEP < done.pop() <= BAD_STEP + 3
    for _, weights, _, ended_at, _ in ends:
        assert ended_at < asked_at + TIMEOUT_S / 2
        assert_same(weights, ends[0][1])
        assert all(bool(torch.isfinite(x).all()) for x in weights.values())
