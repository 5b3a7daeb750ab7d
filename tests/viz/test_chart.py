"""The chart: what is in the picture, read back from the SVG; and its bytes."""

import subprocess
import sys
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.viz.chart import chart
from lightning_cyclic.viz.scene import scene

SVG = "{http://www.w3.org/2000/svg}"


def of(preset, n=2, **numbers):
    return scene(make_plan(preset, num_stages=n, num_workers=n, **{"num_steps": 1, **numbers}))


def texts(seen):
    """Return all that is written in a picture, in the order in which it is painted."""
    return [e.text for e in ET.fromstring(chart(seen, "svg")).iter(f"{SVG}text")]


def test_cells_say_what_runs_on_which_version():
    seen = of("1f1b", num_steps=2)
    written = texts(seen)
    of_cells, of_updates, of_legend = 8, 2, 1
    assert written.count("v0") == of_cells + of_legend
    assert written.count("v1") == of_cells + of_updates + of_legend
    assert written.count("v2") == of_updates
    for name in ("F0", "F1", "B0", "B1"):
        explained = 1 if name in ("F0", "B0") else 0
        assert written.count(name) == 4 + explained  # two stages, two steps
    assert written.count("step 1") == 2
    assert {"worker 0", "worker 1", "stage 0", "stage 1", "slot", "11"} <= set(written)


def test_the_legend_explains_what_is_there_and_nothing_else():
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
    shared = scene(make_plan("cyclic_mp", num_stages=4, num_workers=2, num_steps=2))
    assert "share a slot" in " ".join(texts(shared))


def test_a_mouse_finds_what_each_sign_is():
    seen = of("cyclic_dp", num_steps=3)
    root = ET.fromstring(chart(seen, "svg"))
    titles = {e.get("id"): e.findtext(f"{SVG}title") for e in root.iter(f"{SVG}g")}
    known = {name: text for name, text in titles.items() if text is not None}
    assert len(known) == len(seen.cells) + len(seen.updates) + len(seen.arrows)
    assert (
        known["cell0"] == "forward, stage 0, micro-batch 0, of step 0, on version 0 of the weights"
    )
    assert known["update0"].startswith("update, stage 1, of step 0, makes version 1")
    assert any(text.startswith("send new weights, stage 0") for text in known.values())


@pytest.mark.parametrize("form", ["svg", "png"])
def test_the_bytes_are_the_same_whatever_the_user_has_set(form):
    seen = of("1f1b")
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.hashsalt": None}):
        other = chart(seen, form)
        assert mpl.rcParams["font.size"] == 30
    assert chart(seen, form) == other


def test_another_process_makes_the_same_bytes():
    code = (
        "import sys; from lightning_cyclic.plan import make_plan\n"
        "from lightning_cyclic.viz.chart import chart\n"
        "from lightning_cyclic.viz.scene import scene\n"
        "plan = make_plan('1f1b', num_stages=2, num_workers=2, num_steps=1)\n"
        "sys.stdout.buffer.write(chart(scene(plan), 'svg'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == chart(of("1f1b"), "svg")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlanError, match=r"matplotlib.*not installed.*lightning-cyclic\[viz\]"):
        chart(of("1f1b"), "svg")
