"""Traces of real fits over gloo: all that the plan has is in them, in its order."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.viz.trace_events import run_process
from tests import processes
from tests.corpus import (
    Classifier,
    assert_same,
    make_trainer,
    outcome,
    train_data,
    valid_data,
    weights_of,
)
from tests.rows import more
from tests.stagewise_runs import Job, loader, pipelines, prepare

pytestmark = pytest.mark.multi

Event = dict[str, Any]
NUM_BATCHES = 6
JOB = Job(case="resnet")


def replicas(strategy: dict[str, Any]) -> dict[str, Any]:
    """Train whole micro-batches, with a validation."""
    module = Classifier("batchnorm_mlp", "sgd")
    trainer = make_trainer(strategy, max_epochs=1, limit_val_batches=1)
    trainer.fit(module, train_data(module, NUM_BATCHES), valid_data(module))
    return outcome(trainer, module)


def stages(job: Job, strategy: dict[str, Any]) -> dict[str, Any]:
    """Train stage by stage, with a validation."""
    run = prepare(job, strategy, [], limit_val_batches=1)
    run.trainer.fit(run.module, run.batches, loader(job, 1))
    return run.outcome()


def fitted(preset: str, **flags: Any) -> list[dict[str, Any]]:
    if preset in ("cyclic_dp", "cyclic_dp_v1", "lockstep_dp"):
        return processes.run(replicas, 2, {"preset": preset, "stages": 2} | flags)
    return pipelines(JOB, 2, function=stages, preset=preset, stages=2, **flags)


def read(path: Path, *, whole: bool = True) -> list[Event]:
    text = path.read_text()
    events: list[Event] = json.loads(text if whole else text + "]")
    return events


def spans(events: list[Event], process: int, *categories: str) -> list[Event]:
    """Return what a worker did, in the order in which it began."""
    found = [
        e for e in events if e["ph"] == "X" and e["pid"] == process and e["cat"] in categories
    ]
    return sorted(found, key=lambda e: e["ts"])


def actions(events: list[Event], process: int, *kinds: Kind) -> list[str]:
    """Return the forwards, backwards and so on of training, as actions."""
    texts = [e["args"].get("action", "") for e in spans(events, process, "compute", "update")]
    pattern = rf"\d+({'|'.join(kinds)})\d*(@\d+)?#\d+(~.*)?"
    return [text for text in texts if re.fullmatch(pattern, text)]


def of_program(
    preset: str, w: int, num_steps: int, *kinds: Kind, num_micro: int | None = None
) -> list[str]:
    plan = make_plan(preset, num_stages=2, num_workers=2, num_micro=num_micro, num_steps=num_steps)
    return [str(a) for a in plan.programs[w] if a.kind in kinds]


def assert_nested(events: list[Event]) -> None:
    """Check that no span of a thread ends within another: no viewer could show it."""
    threads = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            threads[e["pid"], e["tid"]].append((e["ts"], -e["dur"], e["name"]))
    slack = 0.002  # microseconds: of rounding
    for found in threads.values():
        ends: list[float] = []
        for begin, minus_dur, name in sorted(found):
            while ends and ends[-1] <= begin + slack:
                ends.pop()
            assert not ends or begin - minus_dur <= ends[-1] + slack, name
            ends.append(begin - minus_dur)


def assert_messages_meet(events: list[Event], payloads: set[str]) -> None:
    """Check that all messages have two ends, at which the worker sends and waits."""
    ends = {p: {e["id"]: e["ts"] for e in events if e["ph"] == p} for p in "sf"}
    assert set(ends["s"]) == set(ends["f"])
    names = {e["args"]["action"] for e in events if e["ph"] == "X" and e["cat"] == "message"}
    sent = {m[1] for text in names if (m := re.search(r"SEND_(\w)", text))}
    assert payloads <= sent


@pytest.mark.parametrize("preset", ["cyclic_dp", more("cyclic_dp_v1"), "lockstep_dp"])
def test_replicas(preset: str, tmp_path: Path) -> None:
    traced = fitted(preset, trace=str(tmp_path))
    events = read(tmp_path / "all.json")
    assert_nested(events)
    assert_messages_meet(events, {Payload.P, Payload.R})
    for w in range(2):
        assert_covered(events, read(tmp_path / f"rank{w}.json"), w)
        computed = actions(events, run_process(w), Kind.F, Kind.B)
        expected = of_program(preset, w, NUM_BATCHES, Kind.F, Kind.B)
        # the forward of the first step finds the stages, and is one span
        assert computed == [text for text in expected if not re.search(r"F.*#0$", text)]
        names = [e["name"] for e in spans(events, run_process(w), "other")]
        assert names[0] == "forward of step 0, which finds the stages"
    updates = [e for e in events if e["ph"] == "X" and e["cat"] == "update"]
    assert {e["args"]["version"] for e in updates} == set(range(1, NUM_BATCHES + 1))
    for given, expected_run in zip(traced, fitted(preset), strict=True):
        assert_same(given["weights"], expected_run["weights"], "with and without a trace")


@pytest.mark.parametrize("preset", ["1f1b", more("pipedream_2bw"), "cyclic_mp"])
def test_pipelines(preset: str, tmp_path: Path) -> None:
    traced = fitted(preset, trace=str(tmp_path))
    events = read(tmp_path / "all.json")
    assert_nested(events)
    assert_messages_meet(events, {Payload.A, Payload.G, Payload.D, Payload.L})
    num_steps = traced[0]["global_step"]
    for w in range(2):
        assert_covered(events, read(tmp_path / f"rank{1 - w}.json"), w)  # rank 0 has the last
        for kinds in ((Kind.F, Kind.B), (Kind.UPDATE,)):
            computed = actions(events, run_process(w), *kinds)
            planned = of_program(preset, w, num_steps, *kinds, num_micro=JOB.num_micro)
            assert sorted(computed) == sorted(planned)
            assert computed == planned or preset != "1f1b"  # others are flushed between epochs
        shown = spans(events, run_process(w), "compute")
        assert any("of evaluation 1" in e["name"] for e in shown)
        assert max(e["dur"] for e in shown) > 10  # microseconds: they did compute
    for given, expected in zip(traced, fitted(preset), strict=True):
        assert_same(given["weights"], expected["weights"], "with and without a trace")


def assert_covered(together: list[Event], alone: list[Event], w: int) -> None:
    """Check that a rank's file is in that of all, and what was planned above it."""
    assert {e["pid"] for e in alone} == {run_process(w)}
    assert [e for e in together if e["pid"] == run_process(w)] == alone
    planned = [e for e in together if e["pid"] == run_process(w) - 1]
    assert "as planned" in planned[0]["args"]["name"]
    done = {e["args"]["action"] for e in alone if e["ph"] == "X" and e["cat"] == "compute"}
    assert {e["args"]["action"] for e in planned if e["ph"] == "X"} & done


# ---------------------------------------------------------------------- failures


class Failing(Classifier):
    """Fail, or be killed, in mid-epoch on rank 1."""

    def __init__(self, kill: bool) -> None:
        super().__init__("batchnorm_mlp")
        self.kill = kill

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 4 and int(os.environ["NODE_RANK"]) == 1:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("the batch is broken")
        return super().training_step(batch, batch_idx)


def fail(preset: str, trace: str, kill: bool) -> None:
    module = Failing(kill)
    trainer = make_trainer({"preset": preset, "stages": 2, "trace": trace}, max_epochs=1)
    trainer.fit(module, train_data(module, 20))


@pytest.mark.parametrize("preset", ["cyclic_dp", "1f1b"])
def test_a_fit_that_fails_leaves_its_trace(preset: str, tmp_path: Path) -> None:
    with pytest.raises(processes.RanksFailedError, match="the batch is broken"):
        processes.run(fail, 2, preset, str(tmp_path), False, after_failure_s=15.0)
    for rank in range(2):
        steps = {
            e["args"].get("step") for e in read(tmp_path / f"rank{rank}.json") if e["ph"] == "X"
        }
        assert {1, 2, 3} <= steps
    waits = [e for e in read(tmp_path / "rank0.json") if e.get("cat") == "wait"]
    assert waits  # for the worker that failed, at last
    together = read(tmp_path / "all.json")
    assert {2, 4} <= {e["pid"] for e in together}


def test_a_rank_that_is_killed_leaves_what_it_had_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(processes.RanksFailedError, match="died without a word"):
        processes.run(fail, 2, "cyclic_dp", str(tmp_path), True, after_failure_s=15.0)
    assert read(tmp_path / "rank1.json", whole=False)[0]["args"]["name"].startswith("worker 1")
    read(tmp_path / "rank0.json")  # has an end
    assert {4, 2} <= {e["pid"] for e in read(tmp_path / "all.json")}


def fit_into(folders: list[str]) -> None:
    module = Classifier("mlp")
    trainer = make_trainer(
        {"preset": "cyclic_dp", "trace": folders[processes.here().rank]}, max_epochs=1
    )
    trainer.fit(module, train_data(module, 2))


def test_a_folder_that_one_rank_cannot_write_is_refused_on_all_at_set_up(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = [str(tmp_path / "good"), str(tmp_path / "file" / "bad")]
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(fit_into, 2, folders)
    assert set(caught.value.errors) == {0, 1}
    for text in caught.value.errors.values():
        assert "ConfigurationError" in text
        assert "cannot be written on rank 1 (Not a directory); allowed: a folder" in text


# ---------------------------------------------------------------------- one worker


def alone(strategy: dict[str, Any]) -> dict[str, Tensor]:
    module = Classifier("mlp")
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(module, train_data(module, 3))
    return weights_of(module)


def test_one_worker_that_runs_a_program_is_traced(tmp_path: Path) -> None:
    processes.run(alone, 1, {"preset": "gpipe", "num_micro": 7, "trace": str(tmp_path)})
    assert len(actions(read(tmp_path / "all.json"), run_process(0), Kind.F)) > 0


def test_one_worker_that_runs_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(processes.RanksFailedError, match="stays empty: one worker runs"):
        processes.run(alone, 1, {"preset": "cyclic_dp", "trace": str(tmp_path / "none")})
    assert not (tmp_path / "none").exists()
