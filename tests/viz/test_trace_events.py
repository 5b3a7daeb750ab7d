"""Trace events: what viewers ask of them, and a plan as a trace."""

import json
from dataclasses import replace

import pytest

from lightning_cyclic.plan import PRESETS, make_plan
from lightning_cyclic.plan.actions import parse
from lightning_cyclic.viz.picture import cells_of
from lightning_cyclic.viz.trace_events import (
    MAIN,
    Place,
    Times,
    end_of_message,
    lines,
    moment,
    names,
    plan_process,
    planned,
    run_process,
    span,
)

HERE = Place(4, MAIN)


def test_a_span_says_in_numbers_what_its_name_says_in_words():
    a = parse("2F0@3#4")
    assert span("forward", a, Times(10.0, 12.3456), HERE) == {
        "name": "forward", "cat": "compute", "ph": "X", "ts": 10.0, "dur": 2.346, "pid": 4,
        "tid": 1,
        "args": {"step": 4, "stage": 2, "micro-batch": 0, "version": 3, "planned slot": 0,
                 "action": "2F0@3#4"},
    }  # fmt: skip
    assert span("wait", parse("2RECV_A0<1#4"), Times(1, 2), HERE, "wait")["cat"] == "wait"
    numbers = span("forward", replace(a, t=-1), Times(1, 2), HERE)["args"]
    assert numbers.keys() == {"stage", "micro-batch", "planned slot", "action"}  # of no step
    assert span("beside", None, Times(1, 2), HERE)["args"] == {}


def test_both_ends_of_a_message_have_one_number_and_others_have_another():
    send, recv = parse("1SEND_A0>1#4"), parse("1RECV_A0<0#4")
    begin = end_of_message(send, 0, 1, 1.0, Place(2))
    end = end_of_message(recv, 0, 1, 2.0, Place(4))
    assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
    assert begin["id"] == end["id"]
    others = [parse("1SEND_A1>1#4"), parse("1SEND_A0>1#5"), parse("1SEND_G0>1#4")]
    assert begin["id"] not in {end_of_message(a, 0, 1, 1.0, Place(2))["id"] for a in others}
    assert begin["id"] != end_of_message(send, 1, 0, 1.0, Place(4))["id"]


def test_a_plan_stands_above_the_run_of_its_worker():
    order = [f(w) for w in range(3) for f in (plan_process, run_process)]
    assert order == sorted(set(order))
    assert min(order) > 0  # which viewers keep for the system
    events = {e["name"]: e["args"] for e in names(3, "worker 1", {MAIN: "compute"})}
    assert events["process_name"] == {"name": "worker 1"}
    assert events["thread_name"] == {"name": "compute"}
    assert events["process_sort_index"] == {"sort_index": 3}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_plan_is_its_timetable_in_time(preset):
    plan = make_plan(preset, num_stages=4, num_workers=4, num_steps=3)
    events = list(planned(plan, 3, slot_us=100.0, begin_us=1000.0))
    spans = {(e["pid"], e["ts"], e["args"]["action"]) for e in events if e["ph"] == "X"}
    cells = list(cells_of(plan.programs))
    assert spans == {(plan_process(c.w), round(1000 + 100 * c.x, 3), str(c.action)) for c in cells}
    assert all(0 < e["dur"] <= 100 for e in events if e["ph"] == "X")
    updates = {(e["pid"], e["ts"]) for e in events if e["ph"] == "i"}
    made = ((w, a) for w, program in enumerate(plan.programs) for a in program)
    assert updates == {(plan_process(w), 1000 + 100 * a.s) for w, a in made if a.kind == "UPDATE"}


def test_an_event_is_a_line():
    text = list(lines([moment("here", 1.23456, HERE)]))
    assert [json.loads(line)["ts"] for line in text] == [1.235]
    assert "\n" not in text[0]
