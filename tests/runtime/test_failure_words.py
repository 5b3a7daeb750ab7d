from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cyclic import PRESETS, make_plan
from lightning_cyclic.errors import PeerError, StepError, WaitTimeoutError
from lightning_cyclic.plan import programs_of
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.runtime.failure_words import (
    Waiter,
    lack_of_memory,
    reason_of,
    relief,
    words_of,
)
from lightning_cyclic.runtime.transport.crew import Names
from tests.harness.local_transport import LocalTransport, PostOffice
from tests.harness.programs import shaped
from tests.runtime.whole_step.test_engine import Worker, find_stages, loss, mlp, run_workers, sgd

NAMES = Names(2, ["a", "b", "node7", "d"])


def test_all_that_an_own_error_says_is_told_on_one_line_but_for_the_timetable() -> None:
    error = StepError("given\n  allowed: this\ndo that\nThe arrow shows it:\nslot 0 1\nw0 0F0 .")
    assert reason_of(error) == "StepError: given allowed: this do that"


def test_of_other_errors_the_first_line_is_told() -> None:
    assert (
        reason_of(RuntimeError("\nout of memory\nframe #0: ...")) == "RuntimeError: out of memory"
    )
    assert len(reason_of(ValueError("x" * 5000))) < 500
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"


class Broken:
    """Has one sample, which fails as a library does that it calls."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, k: int) -> None:
        json.loads("no JSON")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_of_other_errors_the_innermost_line_that_is_the_users_is_told(num_workers: int) -> None:
    data: Any = Broken()
    with pytest.raises((ValueError, RuntimeError), match="Expecting value") as caught:
        next(iter(DataLoader(data, num_workers=num_workers)))
    said, line = "JSONDecodeError: Expecting value: line 1 column 1 (char 0)", 1
    line += Broken.__getitem__.__code__.co_firstlineno
    in_worker = f"json.decoder.{said}"  # the last line of its traceback
    assert reason_of(caught.value) == (
        in_worker if num_workers else f"{said} (test_failure_words.py:{line})"
    )


def test_a_failure_names_the_culprit_first_with_host_and_stages() -> None:
    NAMES.know_stages({2: (0, 2)})
    words = words_of(ZeroDivisionError("broken"), NAMES, "in step 12")
    assert words == (
        "rank 2 on node7 (stages 0 and 2) failed in step 12: ZeroDivisionError: broken\n"
        "Look at the log of rank 2."
    )


def test_what_a_rank_met_in_a_wait_is_told_as_it_is() -> None:
    error = WaitTimeoutError("rank 2 waited: it did not come in time.\nLook there.\nslot 0\n^")
    words = words_of(error, NAMES, "in step 12")
    assert words == "rank 2 waited: it did not come in time.\nLook there."
    assert words_of(PeerError("gone"), NAMES, "in step 12") == "gone\n"


MOST = 10**17  # bytes: more than any machine can address
CUDA = "CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has a total capacity of 15.77 GiB"


@pytest.mark.parametrize(
    ("ask", "asked"),
    [
        (lambda: torch.empty(MOST, dtype=torch.uint8), r" \(asked for 1e\+05 TB\)"),
        (lambda: np.empty(MOST, np.uint8), r" \(asked for 88\.8 PiB\)"),
        (lambda: bytearray(MOST), ""),
    ],
)
def test_what_really_runs_out_of_the_hosts_memory_is_said_to(
    ask: Callable[[], Any], asked: str
) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        ask()
    assert re.fullmatch(f"out of the host's memory{asked}", lack_of_memory(caught.value))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(CUDA), "out of the device's memory (asked for 20.50 MiB)"),
        (RuntimeError(CUDA), "out of the device's memory (asked for 20.50 MiB)"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel"), "out of the device's memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of the host's memory"),
        (OSError(errno.ENOSPC, "No space left on device"), ""),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ""),
        (PeerError(f"rank 1 failed in step 2: {CUDA}; this rank (0) stopped"), ""),
        (KeyboardInterrupt(), ""),
    ],
)
def test_which_memory_and_how_much(error: BaseException, said: str) -> None:
    assert lack_of_memory(error) == said


def test_what_fails_beside_the_compute_is_known_by_its_cause() -> None:
    error = StepError("cyclic-sums failed: OutOfMemoryError: ...")
    error.__cause__ = torch.OutOfMemoryError(CUDA)
    assert reason_of(error).startswith("out of the device's memory (asked for 20.50 MiB): StepErr")


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = ValueError("broken")
    error.__cause__ = error
    assert lack_of_memory(error) == ""


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_what_to_do_fits_the_preset(preset: str) -> None:
    plan = make_plan(preset, **shaped(preset, 4, 2))
    ways = relief(plan, "never")
    assert "smaller batches" in ways
    is_whole = plan.placement == "replicated" and not plan.axes.sharding.gathers
    is_cut = plan.placement in ("pipelined", "shared")
    assert ('activation_checkpointing="always"' in ways) is is_cut
    assert 'activation_checkpointing="always"' not in relief(plan, "always")
    of_optimal = relief(plan, "optimal")
    assert ("a smaller memory_limit_bytes" in of_optimal) is is_cut
    assert "memory_limit_bytes=..." not in of_optimal
    assert ("memory_limit_bytes" in ways) is (plan.placement == "pipelined")
    assert ("cyclic_zero" in ways) is is_whole
    assert ("accumulate_grad_batches" in ways) is not is_cut


def test_a_wait_at_its_limit_says_who_waited_for_whom_and_then_draws_it() -> None:
    stages = find_stages(mlp(), 2)
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, relayed=stages.relayed)
    alone = Worker(mlp(), plan, stages, LocalTransport(PostOffice(), 1, 2, 0.2), sgd, 1)
    alone.run()
    assert isinstance(alone.error, WaitTimeoutError)
    text = str(alone.error)
    lines = text.splitlines()
    assert lines[0] == (
        "rank 1 waited 0.2 s for rank 0 to send the signal to start, in step 0: "
        "it did not come in time."
    )
    assert lines[1] == "Look at the log of rank 0."
    assert "timeout=timedelta(minutes=...)" in lines[2]
    assert lines[3] == (
        "The arrow shows the action, 0RECV_K<0#0 in slot 2; w0 is rank 0, w1 is rank 1:"
    )
    arrow = next(k for k, line in enumerate(lines) if line.strip() == "^")
    assert lines[arrow - 1].startswith("w1")
    at = lines[arrow].index("^")
    assert "0RECV_K<0" in lines[arrow - 1][max(0, at - 24) : at + 24]


def test_the_reason_that_a_failing_worker_left_is_in_the_message() -> None:
    office = PostOffice()
    words = "rank 0 failed in step 3: ValueError: bad batch\nLook at the log of rank 0."
    LocalTransport(office, 0, 2).crew.tell(words)
    stages = find_stages(mlp(), 2)
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, relayed=stages.relayed)
    alone = Worker(mlp(), plan, stages, LocalTransport(office, 1, 2, 0.2), sgd, 1)
    alone.run()
    assert isinstance(alone.error, PeerError)
    assert str(alone.error) == (
        "rank 0 failed in step 3: ValueError: bad batch; this rank (1) stopped because of it. "
        "Look at the log of rank 0."
    )


def test_a_worker_that_dies_leaves_the_others_with_a_named_wait() -> None:
    def dying(module: object, t: int, i: int) -> object:
        if (t, i) == (4, 2):
            raise ValueError("out of data")
        return loss(module, t, i)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.runtime.whole_step.test_engine.loss", dying)
        workers = run_workers(mlp(), "cyclic_dp", 4, 4, 0, sgd, 8, timeout_s=1.0, check=False)
    errors = [w.error for w in workers]
    assert isinstance(errors[2], ValueError)
    for w in (0, 1, 3):
        assert isinstance(errors[w], WaitTimeoutError)
        assert f"rank {w} waited 1 s for rank" in str(errors[w])
        assert " in slot " in str(errors[w])


def test_an_action_of_any_step_is_drawn_where_a_short_timetable_has_one_like_it() -> None:
    plan = make_plan(
        "pipedream_2bw", num_stages=3, num_workers=3, num_microbatches=4, num_steps=12
    )
    waiter = Waiter(plan, LocalTransport(PostOffice(), 1, 3))
    short = replace(plan, num_steps=4)
    drawn = {(a.kind, a.t, a.i, a.j): a.s for a in programs_of(short)[1] if a.i is not None}
    for a in (a for a in programs_of(plan)[1] if a.kind in (Kind.F, Kind.B)):
        moved, shift = waiter._drawable(a)
        assert moved.t + shift == a.t
        assert drawn[a.kind, moved.t, moved.i, moved.j] == moved.s
