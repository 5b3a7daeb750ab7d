"""The picture: where cells and messages lie, what is written, and the bytes of the file."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import PRESETS, make_plan, programs_of
from lightning_cyclic.plan.actions import Kind, parse
from lightning_cyclic.viz import draw, save_picture
from lightning_cyclic.viz.picture import Rows, arrows_of, cells_of
from tests.harness.programs import shaped

SVG = "{http://www.w3.org/2000/svg}"
PLAN = make_plan("1f1b", num_stages=2, num_workers=2, num_steps=2)


def of(preset, n=2, **numbers):
    return make_plan(preset, **shaped(preset, n, n), **{"num_steps": 1, **numbers})


def places(plan, *payloads):
    return {
        (str(a.action).partition("#")[0], a.x, a.w, a.end_x, a.end_w)
        for a in arrows_of(plan)
        if a.action.payload in payloads
    }


def test_messages_go_from_behind_their_compute_to_their_first_reader():
    # slot   0   1   2   3   4   5
    # w0   0F0 0F1   . 0B0   . 0B1
    # w1     . 1F0 1B0 1F1 1B1   .
    plan = of("1f1b")
    assert places(plan, "A") == {("1SEND_A0>1", 1, 0, 1, 1), ("1SEND_A1>1", 2, 0, 3, 1)}
    assert places(plan, "G") == {("0SEND_G0>0", 3, 1, 3, 0), ("0SEND_G1>0", 5, 1, 5, 0)}
    assert places(plan, "D") == {("1SEND_D>1", 0, 0, 1, 1)}  # before any compute


def test_sums_end_behind_the_backward_and_weights_begin_with_their_update():
    # slot   0   1   2   3   4   5   6   7   8   9
    # w0   0F0 1F0 1B0 0B0 0F0 1F0 ...
    # w1     .   . 0F1 1F1 1B1 0B1 0F1 1F1 ...
    plan = of("cyclic_dp", num_steps=3)
    sums, weights = places(plan, "S"), places(plan, "P")
    assert {a for a in sums if a[0] == "1SEND_S0>1"} == {
        ("1SEND_S0>1", 3, 0, 5, 1),
        ("1SEND_S0>1", 7, 0, 9, 1),
        ("1SEND_S0>1", 11, 0, 13, 1),
    }
    assert {("1SEND_P@1>1", 5, 0, 7, 1), ("0SEND_P@1>0", 6, 1, 8, 0)} <= weights


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("n", [2, 4])
def test_what_is_seen_is_what_the_text_says(preset, n):
    plan = of(preset, n, num_steps=3)
    drawn = draw(plan).replace("+", " ").split()
    found = [c.action for c in cells_of(programs_of(plan))]
    cells = [f"{a.j}{a.kind}{a.i}@{a.v}" for a in found]
    assert sorted(cells) == sorted(text for text in drawn if "@" in text)
    arrows = any(arrow.x <= arrow.end_x for arrow in arrows_of(plan))
    assert arrows is (plan.num_workers > 1 and plan.local is None)  # which exchanges later


def test_cells_of_one_slot_share_it_in_the_order_in_which_they_run():
    cells = list(cells_of(programs_of(make_plan("cyclic_mp", num_stages=4, num_workers=2))))
    slot = [c for c in cells if c.w == 0 and c.action.s == 6]
    assert [(c.x, c.width, c.action.kind) for c in slot] == [
        (6.0, 0.5, Kind.F),
        (6.5, 0.5, Kind.B),
    ]
    by_worker = [[c.x for c in cells if c.w == w] for w in range(2)]
    assert all(len(set(xs)) == len(xs) for xs in by_worker)


# ---------------------------------------------------------------------- rows and cells


def rows(preset, **numbers):
    return Rows(make_plan(preset, **{"num_stages": 4, "num_workers": 4, **numbers}))


FORWARD = parse("1F2@0#3")


@pytest.mark.parametrize(
    ("found", "row", "cell"),
    [
        (rows("1f1b"), "stage 3", ["F2"]),
        (rows("cyclic_dp"), "micro-batch 3", ["F1"]),
        (rows("pipedream"), "stage 3", ["F3"]),  # one micro-batch per step: steps are counted
        (rows("gpipe", num_stages=2, replicas=2), "stage 1", ["F2"]),
        (rows("cyclic_mp"), "", ["F2", "stage 1"]),
        (rows("cyclic_dp", num_stages=1), "stage 0, micro-batch 3", ["F2"]),
    ],
)
def test_rows_say_what_their_cells_have_in_common_and_cells_the_rest(found, row, cell):
    assert (found.row(3), found.cell(FORWARD)) == (row, cell)


def test_a_backward_has_the_full_colour_of_its_forward():
    found = rows("1f1b")
    (light, edge, _), (full, *_) = (found.colours(parse(a)) for a in ("1F2@0#3", "1B2@0#3"))
    assert edge == full != light
    assert found.colours(parse("1F3@0#3"))[1] != edge


# ---------------------------------------------------------------------- what is written


@pytest.fixture
def texts(tmp_path):
    """A plan, and the slot to begin at -> all that is written in its picture."""

    def written(plan, first_slot=0):
        save_picture(plan, tmp_path / "a.svg", first_slot=first_slot)
        found = ET.parse(tmp_path / "a.svg").iter(f"{SVG}text")
        return ["".join(e.itertext()).strip() for e in found]

    return written


def test_cells_say_what_runs_on_which_version(texts):
    written = texts(PLAN)
    of_cells, of_updates = 8, 2
    assert written.count("v0") == of_cells
    assert written.count("v1") == of_cells + of_updates
    assert written.count("v2") == of_updates
    for name in ("F0", "F1", "B0", "B1"):
        assert written.count(name) == 4  # two stages, two steps
    assert written.count("step 1") == 2
    names = {"worker 0", "worker 1", "stage 0", "stage 1", "slot", "11"}
    assert names <= set(written)
    assert "1f1b: 2 workers, 2 stages, 2 micro-batches per step" in written


def test_the_legend_explains_what_is_there_and_nothing_else(texts):
    flush, flow = " ".join(texts(of("1f1b"))), " ".join(texts(of("pipedream_2bw", num_steps=2)))
    replicas = " ".join(texts(of("cyclic_dp", num_steps=2)))
    for everywhere in ("the worker waits", "an update: the optimizer makes", "forward "):
        assert everywhere in flush
        assert everywhere in replicas
    assert "in red: older than in plain training" not in flush
    assert "in red: older than in plain training" in flow
    assert "message: activations" in flush
    assert "message: activations" not in replicas
    assert "message: new weights" in replicas
    assert "message: new weights" not in flush
    assert "each stage has its colour" in replicas
    assert "each micro-batch has its colour" in flush
    assert "share a slot" not in replicas
    assert "predict" in " ".join(texts(of("spectrain")))
    shared = make_plan("cyclic_mp", num_stages=4, num_workers=2, num_steps=2)
    assert "share a slot" in " ".join(texts(shared))


def test_a_later_slot_to_begin_with(texts):
    written = texts(PLAN, 6)
    assert "step 1" in written
    assert "step 0" not in written
    assert "5" not in written
    with pytest.raises(PlanError, match="nothing happens from slot 12 on; allowed: slots of"):
        texts(PLAN, 12)


def test_what_nobody_could_read_is_refused_before_any_program_is_made(texts):
    with pytest.raises(PlanError, match="1000 workers over 2000 slots .* allowed: up to 32"):
        texts(of("1f1b", 1000, num_microbatches=1))
    with pytest.raises(PlanError, match="2 workers over 300 slots .* allowed: .* 256 slots"):
        texts(of("1f1b", num_steps=50))


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize(("ending", "begin"), [("svg", b"<?xml"), ("png", b"\x89PNG\r\n")])
def test_the_bytes_are_the_same_whatever_the_user_has_set(tmp_path, ending, begin):
    first, second = tmp_path / f"one.{ending}", tmp_path / f"two.{ending.upper()}"
    save_picture(PLAN, first)
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.hashsalt": None}):
        save_picture(PLAN, str(second))
        assert mpl.rcParams["font.size"] == 30
    assert first.read_bytes().startswith(begin)
    assert first.read_bytes() == second.read_bytes()


def test_another_process_makes_the_same_bytes(tmp_path):
    code = (
        "from lightning_cyclic.plan import make_plan\n"
        "from lightning_cyclic.viz import save_picture\n"
        "plan = make_plan('1f1b', num_stages=2, num_workers=2, num_steps=2)\n"
        f"save_picture(plan, {str(tmp_path / 'other.svg')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    save_picture(PLAN, tmp_path / "one.svg")
    assert (tmp_path / "other.svg").read_bytes() == (tmp_path / "one.svg").read_bytes()


@pytest.mark.parametrize("name", ["picture.pdf", "picture", "picture.svg.gz", "picture.html"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(PlanError, match=r"allowed: \.svg, \.png, \.json; write it like picture"):
        save_picture(PLAN, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"x\.svg cannot be written \(No such file"):
        save_picture(PLAN, tmp_path / "nowhere" / "x.svg")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlanError, match=r"matplotlib.*not installed.*lightning-cyclic\[viz\]"):
        save_picture(PLAN, tmp_path / "x.svg")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_plan_is_its_timetable_in_time(preset, tmp_path):
    plan = of(preset, 4, num_steps=3)
    save_picture(plan, tmp_path / "plan.json")
    events = json.loads((tmp_path / "plan.json").read_text())
    spans = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"] - 1, e["ts"], e["args"]["action"]) for e in spans} == {
        (c.w, round(1000 * c.x, 3), str(c.action)) for c in cells_of(programs_of(plan))
    }
    longest = 2000 if plan.axes.schedule.splits else 1000  # of a backward that is not split
    assert all(0 < e["dur"] <= longest for e in spans)
    made = ((w, a) for w, program in enumerate(programs_of(plan)) for a in program)
    assert {(e["pid"] - 1, e["ts"]) for e in events if e["ph"] == "i"} == {
        (w, 1000 * a.s) for w, a in made if a.kind == "UPDATE"
    }
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == [
        f"worker {w}" for w in range(plan.num_workers)
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
