"""The failure file: it tells each attempt, has a bound, and never hides or holds up the error."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import parse
from lightning_cyclic.plugin import failure_file as module
from lightning_cyclic.plugin.failure_file import Place, report, written
from lightning_cyclic.runtime.flight_recorder import FlightRecorder

PLAN = make_plan("cyclic_dp", num_stages=2, num_workers=2)
PLACE = Place("rank 1 on node7 (stage 0)", 1, PLAN, "in step 3")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "failure-rank1.txt"


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger(module._log.name), "warning", lines.append)
    return lines


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def write(path: Path, text: str) -> BaseException:
    """Write a text; return its error."""
    error = ZeroDivisionError("the batch is broken")
    with written(path, lambda: f"{text}\n", error):
        pass
    return error


def test_a_report_says_who_failed_where_with_what_and_what_was_done_last() -> None:
    flight = FlightRecorder()
    flight.recorded(lambda a: None)(parse("0F1@2#3"))
    error = ZeroDivisionError("the batch is broken\nin its third row")
    make = report(error, lambda: PLACE, flight)
    flight.recorded(lambda a: None)(parse("0B1@2#3"))  # behind the failure
    head, reason, numbers, blank, *rest = make().splitlines()
    assert head.endswith(": rank 1 on node7 (stage 0) ended in step 3")
    assert abs(time.mktime(time.strptime(head[:19], "%Y-%m-%d %H:%M:%S")) - time.time()) < 60
    assert reason == "ZeroDivisionError: the batch is broken"
    assert numbers == (
        f"worker 1, process {os.getpid()}, cyclic_dp: num_workers=2, num_stages=2, "
        "num_microbatches=2, "
        "replicas=1, schedule=cyclic, placement=replicated, weights=freshest, sharding=optimizer"
    )
    assert blank == ""
    (action,) = [line for line in rest if "#3" in line]
    assert re.search(r"0F1@2#3 +forward, stage 0, micro-batch 1, of step 3, on version 2", action)


def test_a_rank_that_has_begun_nothing_says_so() -> None:
    assert report(ValueError(), lambda: PLACE, None)().endswith("\n\nIt had begun no action.\n")


def test_the_error_says_where_the_file_is(path: Path, logged: list[str]) -> None:
    error = write(path, "one")
    assert notes_of(error) == [f"What this rank did last is in {path}"]
    assert path.read_text() == f"{module._RULE}one\n"
    assert list(path.parent.iterdir()) == [path]
    assert logged == []


def test_later_attempts_add_to_the_first_up_to_a_bound(path: Path) -> None:
    for attempt in range(module._MOST_REPORTS + 3):
        write(path, f"attempt {attempt}")
    kept = path.read_text().split(module._RULE)[1:]
    last = range(4, module._MOST_REPORTS + 3)
    assert kept == [f"attempt {attempt}\n" for attempt in (0, *last)]


def test_a_folder_that_cannot_be_made_is_said_in_the_log_alone(
    tmp_path: Path, logged: list[str]
) -> None:
    (tmp_path / "made").touch()
    error = write(tmp_path / "made" / "failure-rank1.txt", "one")
    assert notes_of(error) == []
    assert len(logged) == 1
    assert "failure-rank1.txt is not written: " in logged[0]


def test_a_full_disk_leaves_what_was_told_before(
    path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, "one")

    def fill(whole: Path, *args: Any) -> None:
        whole.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fill)
        error = write(path, "two")
    assert notes_of(error) == []
    assert "No space left on device" in logged[0]
    assert path.read_text() == f"{module._RULE}one\n"
    assert list(path.parent.iterdir()) == [path]


def test_a_disk_that_hangs_holds_up_nobody_for_long(
    path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(module, "_LIMIT_S", 0.1)
    monkeypatch.setattr(module, "_add", lambda *args: goes_on.wait(20))
    began = time.monotonic()
    error = write(path, "one")
    took_s = time.monotonic() - began
    goes_on.set()
    assert took_s < 5
    assert notes_of(error) == []
    assert logged == [f"{path} is not written: TimeoutError: it takes longer than 0.1 s"]


def test_a_text_that_cannot_be_made_is_said_in_the_log_alone(
    path: Path, logged: list[str]
) -> None:
    with written(path, lambda: str(1 / 0), ValueError()):
        pass
    (line,) = logged
    assert line.startswith(f"{path} is not written: ZeroDivisionError: division by zero (")


def test_where_no_thread_can_be_had_nothing_is_written(
    path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        error = write(path, "one")
    assert notes_of(error) == []
    (line,) = logged
    assert line.startswith(f"{path} is not written: RuntimeError: can't start new thread (")
