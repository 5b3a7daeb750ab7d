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
from torch import Tensor

from lightning_cyclic.errors import PeerError
from tests.harness import processes
from tests.harness.rows import more
from tests.harness.trainers import Said, assert_same, make_trainer, train_data, weights_of
from tests.harness.troubles import (
    BAD_BATCH,
    BAD_STEP,
    LINGERS_S,
    LOGGER,
    MADE,
    NUM_STEPS,
    PIPELINES,
    STOPS,
    TIMEOUT_S,
    Troubled,
    assert_death_is_told,
    assert_lack_of_memory_is_told,
    assert_silence_is_told,
    assert_stopped,
    assert_told_of_stop,
    be_interrupted,
    die,
    errors_of,
    fail,
    fit,
    fit_and_linger,
    freeze,
    name_of,
    rank_of,
    run_out_of_memory,
    said_by,
)
from tests.modules.classifier import Classifier, MicroBatches, loader

pytestmark = pytest.mark.multi


@pytest.mark.parametrize(
    ("num_ranks", "culprit", "preset"),
    [
        (4, 2, "cyclic_dp"), (2, 0, "cyclic_dp_v1"), more(4, 2, "lockstep_dp"),
        more(2, 0, "gpipe"), (2, 3, "1f1b"), more(4, 1, "gpipe"), more(4, 3, "1f1b"),
    ],
)  # fmt: skip
def test_when_a_worker_dies_every_other_one_says_for_what_it_waited(
    num_ranks: int, culprit: int, preset: str
) -> None:
    errors = errors_of(fit, num_ranks, die, culprit, preset)
    assert_death_is_told(errors, num_ranks, culprit, preset)


@pytest.mark.parametrize(("num_ranks", "culprit", "preset"), [(4, 2, "cyclic_dp"), (2, 0, "1f1b")])
def test_when_a_worker_is_silent_every_other_one_says_for_what_it_waited(
    num_ranks: int, culprit: int, preset: str
) -> None:
    bad = rank_of(culprit, preset, num_ranks)
    errors = errors_of(fit, num_ranks, freeze, culprit, preset, 3.0, frozen={bad})
    assert_silence_is_told(errors, num_ranks, culprit, preset)


@pytest.mark.parametrize(
    ("num_ranks", "culprit", "preset"), [(2, 1, "cyclic_dp"), more(4, 1, "1f1b")]
)
def test_a_worker_that_runs_out_of_memory_says_so_to_all(
    num_ranks: int, culprit: int, preset: str
) -> None:
    errors = errors_of(fit, num_ranks, run_out_of_memory, culprit, preset)
    assert_lack_of_memory_is_told(errors, num_ranks, culprit, preset, "host")


@pytest.mark.parametrize(
    ("num_ranks", "culprit", "preset", "step", "options"),
    [
        (4, 1, "cyclic_dp", 0, {"bad_batch": 0}),
        (2, 1, "cyclic_dp", BAD_BATCH, {"route": "edges"}),
        more(2, 1, "cyclic_dp", BAD_BATCH, {"route": "host_staged"}),
        (2, 0, "gpipe", BAD_STEP, {}),
        (2, 0, "1f1b", NUM_STEPS, {"phase": "val"}),
    ],
)
def test_a_worker_that_fails_and_lives_on_holds_up_nobody(
    num_ranks: int, culprit: int, preset: str, step: int, options: dict[str, Any], tmp_path: Path
) -> None:
    args = (tmp_path, partial(fit, **options), fail, culprit, preset, 40.0)
    ends = processes.run(fit_and_linger, num_ranks, *args, time_limit_s=55)
    bad = rank_of(culprit, preset, num_ranks)
    _, failed_at = ends.pop(bad)
    for r, (text, ended_at) in zip(set(range(num_ranks)) - {bad}, ends, strict=True):
        reason = (
            f"{name_of(bad)} failed in step {step}: ZeroDivisionError: the batch is broken "
            r"\(troubles.py:\d+\);"
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
        more(2, 0, "SIGTERM", "cyclic_dp"), more(2, 1, "SIGTERM", "cyclic_dp_v1"),
        (3, 2, "SIGTERM", "lockstep_dp"), (2, 1, "SIGINT", "cyclic_dp"),
        (2, 0, "SIGTERM", "gpipe"), (2, 3, "SIGINT", "1f1b"), more(4, 1, "SIGTERM", "gpipe"),
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
        (fail, 0, "cyclic_dp", 2), more(fail, 1, "cyclic_dp", 2), (fail, 1, "cyclic_zero", 2),
        more(fail, 0, "cyclic_pipeline", 2), (fail, 0, "1f1b", 2),
        (be_interrupted, 0, "cyclic_dp", 1),
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


@pytest.mark.parametrize(
    ("preset", "culprit"), [("cyclic_dp", 0), more("cyclic_dp", 1), ("1f1b", 2)]
)
def test_a_worker_that_dies_where_all_have_met_is_named(
    preset: str, culprit: int, tmp_path: Path
) -> None:
    errors = errors_of(meet_with_a_death, 3, preset, culprit, tmp_path)
    assert errors.pop(culprit) == processes.WORDLESS
    assert len(errors) == 2
    for text in errors.values():
        assert re.match(f"{name_of(culprit)} ended without a word of why", said_by(text)), text
        assert f"Look at the log of rank {culprit}." in text
