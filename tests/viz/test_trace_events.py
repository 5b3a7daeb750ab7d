"""A plan as a trace: its timetable in time, and numbers that say what names say."""

import json

import pytest

from lightning_cyclic.plan import PRESETS, make_plan
from lightning_cyclic.viz import save_picture
from lightning_cyclic.viz.picture import cells_of


@pytest.mark.parametrize("preset", PRESETS)
def test_a_plan_is_its_timetable_in_time(preset, tmp_path):
    plan = make_plan(preset, num_stages=4, num_workers=4, num_steps=3)
    save_picture(plan, tmp_path / "plan.json")
    events = json.loads((tmp_path / "plan.json").read_text())
    spans = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"] - 1, e["ts"], e["args"]["action"]) for e in spans} == {
        (c.w, round(1000 * c.x, 3), str(c.action)) for c in cells_of(plan.programs)
    }
    assert all(0 < e["dur"] <= 1000 for e in spans)
    made = ((w, a) for w, program in enumerate(plan.programs) for a in program)
    assert {(e["pid"] - 1, e["ts"]) for e in events if e["ph"] == "i"} == {
        (w, 1000 * a.s) for w, a in made if a.kind == "UPDATE"
    }
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == [
        f"worker {w}" for w in range(4)
    ]


def test_numbers_of_an_event_say_what_its_name_says(tmp_path):
    save_picture(make_plan("1f1b", num_stages=2, num_workers=2, num_steps=1), tmp_path / "a.json")
    event = json.loads((tmp_path / "a.json").read_text())[2]
    assert (
        event["name"] == "forward, stage 0, micro-batch 0, of step 0, on version 0 of the weights"
    )
    assert event["args"] == {
        "step": 0, "stage": 0, "micro-batch": 0, "version": 0, "action": "0F0@0#0",
    }  # fmt: skip
