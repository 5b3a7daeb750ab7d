"""Tracing: folders that cannot be written, and files that are put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind, parse
from lightning_cyclic.plugin.tracing import Tracing
from lightning_cyclic.strategy import CyclicStrategy


@pytest.mark.parametrize("trace", [3, "", True, ["trace"]])
def test_what_is_no_folder_is_refused_at_once(trace: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"is no folder; allowed: a path, or None"):
        CyclicStrategy(trace=trace)


def test_a_path_may_be_text_or_a_path(tmp_path: Path) -> None:
    for trace in (str(tmp_path), tmp_path):
        assert CyclicStrategy(trace=trace)._options.trace == tmp_path
    assert CyclicStrategy()._options.trace is None


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"file.* cannot be written on rank 0 \("):
        Tracing(tmp_path / "file" / "trace", 0, 1, 0)


def test_files_are_put_together_below_what_was_planned(tmp_path: Path) -> None:
    folder, plan = tmp_path / "made" / "here", make_plan("1f1b", num_stages=2, num_workers=2)
    tracing = Tracing(folder, 0, 1, 1)
    tracing._num_ranks = 4
    for a in plan.programs[1][:5]:
        tracing.recorder.recorded(a.kind, lambda a: None)(a)
    tracing.save()
    events = json.loads((folder / "rank0.json").read_text())
    # of rank 1 a file that ends in the middle of an event, and of 3 one of a run before it
    other = [json.dumps({"ph": "X", "name": name}) for name in ("whole", "torn")]
    (folder / "rank1.json").write_text("[\n" + ",\n".join(other)[:-3])
    tracing.join(plan)
    together = json.loads((folder / "all.json").read_text())
    ran = [e for e in together if e.get("pid") not in (1, 3)]
    assert ran == [*events, {"ph": "X", "name": "whole"}]
    as_planned = [e for e in together if e.get("pid") in (1, 3) and e["ph"] == "X"]
    assert len(as_planned) == 8  # of the only step of the run
    begins = [
        next(e["ts"] for e in shown if e.get("args", {}).get("action") == "1F0@0#0")
        for shown in (events, as_planned)
    ]
    assert begins[1] == pytest.approx(begins[0], abs=0.01)  # both in the slot that it has


def test_a_fit_that_ended_before_its_first_step_has_files_too(tmp_path: Path) -> None:
    tracing = Tracing(tmp_path, 0, 1, 0)
    tracing.save()
    tracing.join(None)
    names = {e["name"] for e in json.loads((tmp_path / "all.json").read_text())}
    assert names == {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def test_another_fit_begins_anew(tmp_path: Path) -> None:
    for _ in range(2):
        tracing = Tracing(tmp_path, 0, 1, 0)
        tracing.recorder.recorded(Kind.F, lambda a: None)(parse("0F0@0#0"))
        tracing.save()
    events = json.loads((tmp_path / "rank0.json").read_text())
    assert sum(e["ph"] == "X" for e in events) == 1


def test_a_disk_that_was_full_is_said_once_by_its_rank(tmp_path: Path) -> None:
    tracing = Tracing(tmp_path, 0, 1, 0)
    tracing._rank = 3
    tracing.recorder.problem = OSError(28, "No space left on device")
    with pytest.warns(UserWarning, match="trace of rank 3 is not complete: .*No space left"):
        tracing.save()
    tracing.save()


def test_files_that_cannot_be_put_together_are_no_failure(tmp_path: Path) -> None:
    tracing = Tracing(tmp_path, 0, 1, 0)
    tracing.save()
    (tmp_path / "all.json").mkdir()
    with pytest.warns(UserWarning, match="could not be put together: .*Is a directory"):
        tracing.join(None)
