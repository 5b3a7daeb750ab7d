"""The flight recorder: what a worker did last, in its order, with what was not over."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Action, Lane, parse
from lightning_cyclic.runtime.flight_recorder import MOST, FlightRecorder, lines, write_down
from lightning_cyclic.viz.words import sentence
from tests.runtime.test_worker import Pair

FORWARD = parse("0F0@0#0")


def _name_of(what: object) -> str:
    return str(getattr(what, "name", what))  # of a lane, or an action


def taken(flight: FlightRecorder) -> list[tuple[str, str]]:
    """Return whether it was over (" ") or not (">"), and what was done or waited for."""
    return [
        (" " if end_ns else ">", f"{'wait ' * words(what).startswith('wait for')}{_name_of(what)}")
        for _, end_ns, what, words in flight.take()
    ]


def test_actions_and_waits_in_the_order_in_which_they_began() -> None:
    pair = Pair()
    pair.run(0, "0SEND_P@1>1#1")
    pair.run(1, "0RECV_P@1<0#1", "1F1@0#1", "0F1@1#1")
    assert taken(pair.flights[0]) == [(" ", "0SEND_P@1>1#1")]
    assert taken(pair.flights[1]) == [
        (" ", "0RECV_P@1<0#1"), (" ", "1F1@0#1"), (" ", "wait 0RECV_P@1<0#1"), (" ", "0F1@1#1"),
    ]  # fmt: skip
    assert taken(pair.flights[1]) == []  # it was taken


def test_a_wait_that_fails_is_marked_and_so_is_an_action() -> None:
    pair = Pair()
    with pytest.raises(TimeoutError):
        pair.run(1, "0RECV_P@1<0#1", "0F1@1#1")
    assert taken(pair.flights[1]) == [(" ", "0RECV_P@1<0#1"), (">", "wait 0RECV_P@1<0#1")]
    with pytest.raises(AssertionError, match="nothing is freed"):
        pair.run(1, "1F1@0#1", "1FREE@0#1")
    assert taken(pair.flights[1]) == [(" ", "1F1@0#1"), (">", "1FREE@0#1")]


def test_lanes_note_what_they_do_and_who_waits_for_one_notes_that() -> None:
    pair = Pair(Lane.SUMS, timeout_s=5.0)
    pair.run(1, "0RECV_S0<0#1~sums", "0ADD1#1~sums")
    late = threading.Timer(0.1, pair.run, (0, "0SEND_S0>1#1~sums"))
    late.start()
    pair.run(1, "0UPDATE@2#1")  # which reads what the lane makes
    late.join()
    found = taken(pair.flights[1])
    assert found.count((" ", "wait cyclic-sums")) == 1
    own = ["0RECV_S0<0#1~sums", "wait 0RECV_S0<0#1~sums", "0ADD1#1~sums", "0UPDATE@2#1"]
    assert [what for _, what in found if what != "wait cyclic-sums"] == own


def test_updates_that_are_made_outside_are_noted() -> None:
    flight = FlightRecorder()
    flight.note([parse("0UPDATE@1#0"), parse("1UPDATE@1#0")])
    first, second = lines(flight.take(), time.monotonic_ns())
    assert "  0UPDATE@1#0 " in first
    assert second.endswith("update, stage 1, of step 0, makes version 1 of the weights")


def test_the_last_are_kept_and_times_are_seconds_before_the_end() -> None:
    flight = FlightRecorder()
    do = flight.noted(lambda a: None, sentence)
    for t in range(MOST + 3):
        do(parse(f"0F0@0#{t}"))
    rows = flight.take()
    assert [row[2].t for row in rows] == list(range(3, MOST + 3))
    begin_ns, end_ns = 1_000_000_000, 1_500_000_000
    rows = [[begin_ns, end_ns, FORWARD, str]]
    assert lines(rows, 4_000_000_000)[0].split()[:2] == ["3.0000", "0.5000"]
    assert lines(rows, 1_200_000_000)[0].split()[:3] == [">", "0.2000", "0F0@0#0"]  # not over then
    assert lines(rows, begin_ns - 1) == []  # a lane went on


def test_what_was_done_can_be_taken_while_lanes_go_on() -> None:
    flight, stops = FlightRecorder(), threading.Event()
    do = flight.noted(lambda a: None, sentence)

    def go_on() -> None:
        while not stops.is_set():
            do(FORWARD)

    lanes = [threading.Thread(target=go_on) for _ in range(2)]
    for lane in lanes:
        lane.start()
    try:
        counts = [len(flight.take()) for _ in range(200)]
    finally:
        stops.set()
        for lane in lanes:
            lane.join()
    assert max(counts) == MOST


def test_an_error_passes_through_as_it_is() -> None:
    def fail(a: Action) -> None:
        raise ZeroDivisionError("own")

    with pytest.raises(ZeroDivisionError, match="^own$"):
        FlightRecorder().noted(fail, sentence)(FORWARD)


def test_profilers_see_actions_waits_and_updates_by_name() -> None:
    pair = Pair()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        pair.run(0, "0SEND_P@1>1#1")
        pair.run(1, "0RECV_P@1<0#1", "0F1@1#1")
        pair.flights[1].note([parse("0UPDATE@2#1")])
    assert {
        "send new weights, stage 0, of step 1, version 1, to worker 1",
        "wait for new weights, stage 0, of step 1, version 1, from worker 0",
        "forward, stage 0, micro-batch 1, of step 1, on version 1 of the weights",
        "update, stage 0, of step 1, makes version 2 of the weights",
    } <= {event.name for event in found.events() or ()}


# ---------------------------------------------------------------------- files

PLAN = make_plan("cyclic_dp", num_stages=2, num_workers=2)


def write(path: Path, flight: FlightRecorder) -> list[str]:
    """Write down what was done before an error; return its notes."""
    error = ZeroDivisionError("the batch is broken\nin its third row")
    write_down(path, error, "rank 1 on node7 (stage 0) ended in step 3", 1, PLAN, flight.take())
    return getattr(error, "__notes__", [])


def test_a_file_says_who_failed_where_with_what_and_what_was_done_last(tmp_path: Path) -> None:
    path, flight = tmp_path / "made" / "failure-rank1.txt", FlightRecorder()
    flight.noted(lambda a: None, sentence)(parse("0F1@2#3"))
    assert write(path, flight) == [f"What this rank did last is in {path}"]
    rule, head, reason, numbers, blank, *rest = path.read_text().splitlines()
    assert rule == "=" * 80
    assert head.endswith(": rank 1 on node7 (stage 0) ended in step 3")
    assert abs(time.mktime(time.strptime(head[:19], "%Y-%m-%d %H:%M:%S")) - time.time()) < 60
    assert reason == "ZeroDivisionError: the batch is broken"
    assert numbers == (
        f"worker 1, process {os.getpid()}, cyclic_dp: num_workers=2, num_stages=2, "
        "num_microbatches=2, replicas=1, schedule=cyclic, "
        "placement=replicated, weights=freshest, sharding=optimizer"
    )
    assert blank == ""
    (action,) = [line for line in rest if "#3" in line]
    assert re.search(r"0F1@2#3 +forward, stage 0, micro-batch 1, of step 3, on version 2", action)
    write(path, FlightRecorder())  # another attempt, which had begun nothing
    assert path.read_text().count(rule) == 2
    assert path.read_text().endswith("\n\nIt had begun no action.\n")


def test_of_a_folder_that_cannot_be_made_the_error_says_why(tmp_path: Path) -> None:
    (tmp_path / "made").touch()
    (note,) = write(tmp_path / "made" / "failure-rank1.txt", FlightRecorder())
    assert "failure-rank1.txt is not written: " in note
