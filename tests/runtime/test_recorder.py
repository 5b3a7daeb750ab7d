"""The recorder: what a worker does is in its file, whatever happens, and the file has a bound."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from inspect import getclosurevars
from pathlib import Path
from typing import Any

import pytest

from lightning_cyclic.plan.actions import Action, Kind, Lane, parse
from lightning_cyclic.runtime import recorder as module
from lightning_cyclic.runtime.recorder import Recorder, add_updates
from tests.runtime.test_worker import Pair

FORWARD = parse("0F0@0#0")


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path / "rank1.json", 1, "worker 1", time.time_ns())
    yield recorder
    recorder.close()


def events_of(recorder: Recorder, *phases: str) -> list[dict[str, Any]]:
    """Return the events of a closed file."""
    recorder.close()
    return [e for e in json.loads(recorder.path.read_text()) if e["ph"] in (phases or "X")]


def test_actions_waits_and_messages_of_a_worker(recorder: Recorder) -> None:
    pair = Pair()
    pair.workers[1].record(recorder)
    pair.run(0, "0SEND_P@1>1#1")
    pair.run(1, "0RECV_P@1<0#1", "1F1@0#1", "0F1@1#1", "0SEND_G1>0#1")
    assert [e["name"] for e in events_of(recorder)] == [
        "be ready for new weights, stage 0, of step 1, version 1, from worker 0",
        "forward, stage 1, micro-batch 1, of step 1, on version 0 of the weights",
        "wait for new weights, stage 0, of step 1, version 1, from worker 0",
        "forward, stage 0, micro-batch 1, of step 1, on version 1 of the weights",
        "send gradients of activations, stage 0, micro-batch 1, of step 1, to worker 0",
    ]
    assert [e["ph"] for e in events_of(recorder, "s", "f")] == ["f", "s"]
    assert pair.logs[1].seen[-1] == "0SEND_G1>0#1"  # which was done, too
    spans = events_of(recorder)
    ends = [round(e["ts"] + e["dur"], 3) for e in spans]
    assert all(end <= e["ts"] + 0.002 for end, e in zip(ends, spans[1:], strict=False))


def test_lanes_are_threads_of_the_trace_and_the_main_thread_waits_for_them(
    recorder: Recorder,
) -> None:
    pair = Pair(Lane.SUMS, timeout_s=5.0)
    pair.workers[1].record(recorder)
    pair.run(1, "0RECV_S0<0#1~sums", "0ADD1#1~sums")
    late = threading.Timer(0.1, pair.run, (0, "0SEND_S0>1#1~sums"))
    late.start()
    pair.run(1, "0UPDATE@2#1")
    late.join()
    by_thread: dict[int, list[str]] = {}
    for e in events_of(recorder):
        by_thread.setdefault(e["tid"], []).append(e["name"].partition(",")[0])
    assert by_thread == {
        1: ["wait for sums of gradients", "update"],
        2: ["be ready for the sum of gradients so far", "wait for the sum of gradients so far",
            "add gradients"],
    }  # fmt: skip
    (wait,) = [e for e in events_of(recorder) if e["tid"] == 1 and e["cat"] == "wait"]
    assert wait["dur"] > 50_000  # microseconds: most of the time until it was sent
    for worker in pair.workers:
        worker.close()


def test_what_fails_is_recorded(recorder: Recorder) -> None:
    pair = Pair(timeout_s=0.05)
    pair.workers[1].record(recorder)
    with pytest.raises(TimeoutError):
        pair.run(1, "0RECV_P@1<0#1", "0F1@1#1")
    assert [e["cat"] for e in events_of(recorder)] == ["message", "wait"]

    def fail(a: Action) -> None:
        raise ZeroDivisionError

    other = Recorder(recorder.path, 1, "worker 1", time.time_ns())
    with pytest.raises(ZeroDivisionError):
        other.recorded(Kind.F, fail)(FORWARD)
    assert len(events_of(other)) == 1


def test_a_worker_that_nobody_traces_is_wrapped_by_its_flight_recorder_alone() -> None:
    pair = Pair()
    worker, log = pair.workers[0], pair.logs[0]
    assert getclosurevars(worker._do[Kind.F]).nonlocals["do"] == log.forward
    assert getclosurevars(worker._take_message).nonlocals["receive"] == worker._receive


def test_the_file_can_be_read_while_it_is_written(recorder: Recorder) -> None:
    do = recorder.recorded(Kind.F, lambda a: None)
    for _ in range(module._CHUNK):
        do(FORWARD)
    written = json.loads(recorder.path.read_text() + "]")  # as viewers read it
    assert sum(e["ph"] == "X" for e in written) == module._CHUNK


def test_the_first_and_the_last_events_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_FIRST", 10)
    monkeypatch.setattr(module, "MOST_LAST", 5)
    monkeypatch.setattr(module, "_CHUNK", 4)
    recorder = Recorder(tmp_path / "rank0.json", 0, "worker 0", time.time_ns())
    do = recorder.recorded(Kind.F, lambda a: None)
    for t in range(100):
        do(parse(f"0F0@0#{t}"))
        assert len(recorder._rows) + len(recorder._last) <= 4 + 5
    steps = [e["args"]["step"] for e in events_of(recorder)]
    assert steps == [*range(10), *range(95, 100)]
    (gap,) = events_of(recorder, "i")
    assert gap["name"] == "85 events are left out before this one"
    assert recorder.num_steps == 10


def test_a_disk_that_is_full_ends_the_file_and_not_the_training(recorder: Recorder) -> None:
    class Full:
        closed = False

        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self.closed = True

    recorder._file.close()
    recorder._file = Full()  # type: ignore[assignment]
    do = recorder.recorded(Kind.F, lambda a: None)
    for _ in range(3 * module._CHUNK):
        do(FORWARD)
    recorder.close()
    assert recorder.problem is not None
    assert "No space left" in str(recorder.problem)


def test_what_comes_behind_the_end_is_dropped(recorder: Recorder) -> None:
    do = recorder.recorded(Kind.F, lambda a: None)
    do(FORWARD)
    recorder.close()
    for _ in range(2 * module._CHUNK):
        do(FORWARD)
    assert len(events_of(recorder)) == 1


def test_times_are_on_the_clock_that_all_ranks_share(tmp_path: Path) -> None:
    zero_ns = time.time_ns() - 10**9
    recorder = Recorder(tmp_path / "rank0.json", 0, "worker 0", zero_ns)
    recorder.recorded(Kind.F, lambda a: time.sleep(0.01))(FORWARD)
    (event,) = events_of(recorder)
    assert 1e6 <= event["ts"] < 1.5e6  # a second behind the zero, in microseconds
    assert 1e4 <= event["dur"] < 1e5
    assert recorder.slot_us == pytest.approx(event["dur"], rel=0.01)


def test_updates_of_several_stages_are_one_event(recorder: Recorder) -> None:
    add_updates(recorder, 3, [], time.perf_counter_ns())
    add_updates(recorder, 3, [1], time.perf_counter_ns())
    add_updates(recorder, 4, [0, 2], time.perf_counter_ns())
    assert [e["name"] for e in events_of(recorder)] == [
        "update, stage 1, of step 3, makes version 4 of the weights",
        "update, stages 0, 2, of step 4, makes version 5 of the weights",
    ]
