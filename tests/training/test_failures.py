"""A worker or stage that dies, hangs, fails or is asked to stop: no other one waits for ever."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic.errors import PeerError
from lightning_cyclic.plugin.strategy import PlannedStrategy
from lightning_cyclic.registration import make_strategy
from lightning_cyclic.runtime.transport.choice import Route
from tests.harness import processes
from tests.harness.trainers import Said, assert_same, make_trainer, train_data, weights_of
from tests.modules.chains import Chain
from tests.modules.classifier import Classifier, MicroBatches, loader

pytestmark = pytest.mark.multi

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
    silent = f"(?:; {name_of('[0-9]')} did not answer)?"
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
    preset: str, num_ranks: int, timeout_s: float = TIMEOUT_S, route: Route = "auto"
) -> PlannedStrategy:
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "transport": route}
    if preset in PIPELINES:
        starts = ["layers.2"] if num_ranks == 2 else ["layers.1", "layers.2", "layers.3"]
        options |= {"stages": starts, "num_microbatches": NUM_MICRO}
    return make_strategy(preset, **options)


def fit(
    trouble: Callable[[], None], culprit: int, preset: str, timeout_s: float = TIMEOUT_S,
    bad_batch: int = BAD_BATCH, route: Route = "auto", phase: str = "train", rounds: int = 1,
) -> Troubled | TroubledStage:  # fmt: skip
    """Train, with trouble on a worker; in a pipeline, in a layer."""
    n = processes.here().num_ranks
    strategy = strategy_of(preset, n, timeout_s, route)
    if preset in PIPELINES:
        stage = TroubledStage(trouble, culprit, phase)
        trainer = make_trainer(
            strategy, max_epochs=2 * rounds, limit_val_batches=2 if phase == "val" else 0,
            num_sanity_val_steps=0,
        )  # fmt: skip
        MADE.append(stage)
        trainer.fit(stage, batches(), batches())
        return stage
    module = Troubled(trouble, culprit, bad_batch)
    MADE.append(module)
    trainer = make_trainer(strategy, max_epochs=1)
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


@pytest.mark.parametrize(
    ("num_ranks", "culprit", "preset"),
    [
        (4, 2, "cyclic_dp"), (4, 0, "cyclic_dp_v1"), (4, 2, "lockstep_dp"),
        (2, 0, "gpipe"), (2, 3, "1f1b"), (4, 1, "gpipe"), (4, 3, "1f1b"),
    ],
)  # fmt: skip
def test_when_a_worker_dies_every_other_one_says_for_what_it_waited(
    num_ranks: int, culprit: int, preset: str
) -> None:
    errors = errors_of(fit, num_ranks, die, culprit, preset)
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


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "culprit", "preset"), [(4, 2, "cyclic_dp"), (2, 0, "1f1b")])
def test_when_a_worker_is_silent_every_other_one_says_for_what_it_waited(
    num_ranks: int, culprit: int, preset: str
) -> None:
    bad = rank_of(culprit, preset, num_ranks)
    errors = errors_of(fit, num_ranks, freeze, culprit, preset, 3.0, frozen={bad})
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "culprit", "preset", "step", "more"),
    [
        (4, 1, "cyclic_dp", 0, {"bad_batch": 0}),
        (4, 1, "cyclic_dp", BAD_BATCH, {"route": "edges"}),
        (4, 1, "cyclic_dp", BAD_BATCH, {"route": "host_staged"}),
        (2, 0, "gpipe", BAD_STEP, {}),
        (4, 2, "1f1b", NUM_STEPS, {"phase": "val"}),
    ],
)
def test_a_worker_that_fails_and_lives_on_holds_up_nobody(
    num_ranks: int, culprit: int, preset: str, step: int, more: dict[str, Any], tmp_path: Path
) -> None:
    args = (tmp_path, partial(fit, **more), fail, culprit, preset, 40.0)
    ends = processes.run(fit_and_linger, num_ranks, *args, time_limit_s=55)
    bad = rank_of(culprit, preset, num_ranks)
    _, failed_at = ends.pop(bad)
    for r, (text, ended_at) in zip(set(range(num_ranks)) - {bad}, ends, strict=True):
        reason = (
            f"{name_of(bad)} failed in step {step}: ZeroDivisionError: the batch is broken "
            r"\(test_failures.py:\d+\);"
        )
        assert re.match(reason, text), text
        assert preset not in PIPELINES or f"(stage {num_ranks - 1 - bad}) failed" in text
        assert_stopped(text, r, bad)
        assert ended_at < failed_at + LINGERS_S / 2


def fit_until_asked(
    culprit: int, preset: str, how: str
) -> tuple[int, dict[str, Tensor], float, float, list[str]]:
    """Return batches done, weights, when this rank was asked (0: it was not), the end, its log."""
    ask, ends_with = STOPS[how]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    said = Said(LOGGER)
    with pytest.raises(ends_with) as ended:
        fit(ask, culprit, preset, rounds=2)
    assert ended.type is ends_with
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)
    (module,) = MADE
    return module.done, weights_of(module), module.met_at, time.monotonic(), said.lines


@pytest.mark.parametrize(
    ("num_ranks", "culprit", "how", "preset"),
    [
        (2, 0, "SIGTERM", "cyclic_dp"), (2, 1, "SIGTERM", "cyclic_dp_v1"),
        (4, 2, "SIGTERM", "lockstep_dp"), (2, 1, "SIGINT", "cyclic_dp"),
        (2, 0, "SIGTERM", "gpipe"), (2, 3, "SIGINT", "1f1b"), (4, 1, "SIGTERM", "gpipe"),
    ],
)  # fmt: skip
def test_all_stop_at_the_same_step_soon_after_one_is_asked_to(
    num_ranks: int, culprit: int, how: str, preset: str
) -> None:
    ends = processes.run(fit_until_asked, num_ranks, culprit, preset, how, time_limit_s=50)
    done = {done for done, *_ in ends}
    asked_at = max(asked for _, _, asked, *_ in ends)
    assert_told_of_stop([said for *_, said in ends], rank_of(culprit, preset, num_ranks), how)
    assert len(done) == 1, done
    assert BAD_STEP < done.pop() <= BAD_STEP + (3 if preset in PIPELINES else 5)
    for _, weights, _, ended_at, _ in ends:
        assert ended_at < asked_at + TIMEOUT_S / 2
        assert_same(weights, ends[0][1])
        assert all(bool(torch.isfinite(x.float()).all()) for x in weights.values())


def fit_and_save(
    trouble: Callable[[], None], culprit: int, strategy: dict[str, Any], folder: Path
) -> tuple[str, list[str], dict[str, Tensor], list[str]]:
    """Return with what a fit ends, the files it wrote, its weights, and its log."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, said = Troubled(trouble, culprit), Said(LOGGER)
    callbacks = [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=100, save_on_exception=True),
        OnExceptionCheckpoint(folder, "last"),
    ]
    limit = timedelta(seconds=TIMEOUT_S)
    trainer = make_trainer(
        {**strategy, "timeout": limit},
        max_epochs=1,
        callbacks=callbacks,
        enable_checkpointing=True,
    )
    with pytest.raises(BaseException) as ended:  # noqa: PT011  (each rank has its own)
        trainer.fit(module, loader(MicroBatches(module.kind, 20 * trainer.world_size)))
    assert trainer.save_checkpoint.__self__ is trainer  # its own again
    files = sorted(path.name for path in folder.iterdir())
    return ended.type.__name__, files, weights_of(module), said.lines


@pytest.mark.parametrize(
    ("trouble", "culprit", "preset", "num_ranks"),
    [
        (fail, 0, "cyclic_dp", 2), (fail, 1, "cyclic_dp", 2), (fail, 1, "cyclic_zero", 2),
        (fail, 0, "cyclic_pipeline", 2), (fail, 0, "1f1b", 2), (be_interrupted, 0, "cyclic_dp", 1),
    ],
)  # fmt: skip
def test_no_checkpoint_is_written_where_a_step_fails(
    trouble: Any, culprit: int, preset: str, num_ranks: int, tmp_path: Path
) -> None:
    strategy = {"preset": preset, "num_microbatches": 2}
    ends = processes.run(fit_and_save, num_ranks, trouble, culprit, strategy, tmp_path)
    names = {fail: "ZeroDivisionError", be_interrupted: "SystemExit"}
    for rank, (ended, files, _, said) in enumerate(ends):
        assert ended == (names[trouble] if rank == culprit else "PeerError")
        assert files == []
        told = [line for line in said if line.startswith("No checkpoint is written on this exc")]
        assert bool(told) == (rank == 0)


def test_where_all_stop_together_checkpoints_have_weights_and_counters_of_one_step(
    tmp_path: Path,
) -> None:
    strategy = {"preset": "cyclic_dp"}
    ends = processes.run(fit_and_save, 2, be_interrupted, 1, strategy, tmp_path)
    for ended, files, weights, _ in ends:
        assert (ended, len(files)) == ("SystemExit", 2)
        saved = [torch.load(tmp_path / name, weights_only=False) for name in files]
        assert {f"step={x['global_step']}.ckpt" for x in saved} == set(files) - {"last.ckpt"}
        for x in saved:
            assert_same(x["state_dict"], weights)


class DiesWhileSaving(Callback):
    """Ends the process of rank 1 when it is asked for the state of callbacks."""

    def state_dict(self) -> dict[str, Any]:
        if int(os.environ["NODE_RANK"]) == 1:
            die()
        return {}


def save_with_a_death(strategy: dict[str, Any], path: Path) -> None:
    timeout = timedelta(seconds=TIMEOUT_S)
    trainer = make_trainer(
        {**strategy, "timeout": timeout}, max_epochs=1, callbacks=[DiesWhileSaving()]
    )
    module = Classifier("batchnorm_mlp")
    module.on_train_batch_end = lambda *_: trainer.save_checkpoint(path)  # type: ignore[method-assign]
    with pytest.raises(PeerError, match=f"{name_of(1)} ended .* to write a checkpoint, in step"):
        trainer.fit(module, train_data(module, 4))


def test_a_worker_that_dies_while_a_checkpoint_is_put_together_is_named(tmp_path: Path) -> None:
    strategy = {"preset": "1f1b", "num_microbatches": 2}
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(save_with_a_death, 2, strategy, tmp_path / "a.ckpt")
    assert caught.value.errors == {1: processes.WORDLESS}


def meet_with_a_death(preset: str, culprit: int, folder: Path) -> None:
    """Kill a rank at a barrier of all in a step, when all others have come to it."""
    timeout = timedelta(seconds=TIMEOUT_S)
    trainer = make_trainer({"preset": preset, "timeout": timeout}, max_epochs=1)
    module, rank = Classifier("batchnorm_mlp"), processes.here().rank

    def wait_and_die(*_: Any, **__: Any) -> None:
        while len(list(folder.iterdir())) < processes.here().num_ranks:
            time.sleep(0.01)
        time.sleep(0.2)
        die()

    def meet(*_: Any) -> None:
        (folder / str(rank)).touch()
        if rank == culprit:
            torch.distributed.barrier = wait_and_die
        trainer.strategy.barrier()

    module.on_train_batch_end = meet  # type: ignore[method-assign]
    trainer.fit(module, train_data(module, 4))


@pytest.mark.parametrize(("preset", "culprit"), [("cyclic_dp", 0), ("cyclic_dp", 1), ("1f1b", 2)])
def test_a_worker_that_dies_where_all_have_met_is_named(
    preset: str, culprit: int, tmp_path: Path
) -> None:
    errors = errors_of(meet_with_a_death, 3, preset, culprit, tmp_path)
    assert errors.pop(culprit) == processes.WORDLESS
    assert len(errors) == 2
    for text in errors.values():
        assert re.match(f"{name_of(culprit)} ended without a word of why", said_by(text)), text
        assert f"Look at the log of rank {culprit}." in text
