"""Memory over time: what the text says, and what the picture shows."""

import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.viz import Row, draw_memory, save_memory
from lightning_cyclic.viz.memory import MOST_ROWS

ROWS = [
    Row("w0", {"parameters": [4e3, 4e3, 4e3], "activations": [0, 2e6, 5e5]}, (3e6, "planned")),
    Row("w1", {"parameters": [4e3, 4e3, 4e3], "activations": [0, 0, 1e9]}),
]


def test_the_text():
    assert (
        draw_memory(ROWS)
        == """\
slot   0   1     2
w0    4k  2M  504k
w1    4k  4k    1G

w0: 2 MB at most, in slot 1: activations 2 MB, parameters 4 kB
w1: 1 GB at most, in slot 2: activations 1 GB, parameters 4 kB"""
    )


def test_later_moments_are_left_out():
    lines = draw_memory(ROWS, width=16).splitlines()
    assert lines[:3] == ["slot   0   1 ...", "w0    4k  2M", "w1    4k  4k"]
    assert draw_memory(ROWS, width=14, first=2).splitlines()[0] == "slot     2"


def drawn(path, rows=ROWS, **how):
    save_memory(path, "what 2 workers keep", rows, **how)
    return path.read_bytes()


def test_the_picture_names_what_it_shows_and_nothing_else(tmp_path):
    text = drawn(tmp_path / "a.svg").decode()
    ET.fromstring(text)
    words = "what 2 workers keep", "w0", "w1", "activations", "parameters", "planned", "slot"
    assert [word for word in words if f">{word}<" not in text] == []
    assert ">gradients<" not in text


def test_the_picture_is_the_same_in_every_run(tmp_path):
    first = drawn(tmp_path / "a.svg")
    with mpl.rc_context({"font.size": 30, "axes.grid": True}):
        assert drawn(tmp_path / "b.svg") == first
    assert drawn(tmp_path / "a.png").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "rows", "how", "parts"),
    [
        ("a.json", ROWS, {}, ["'.json'; allowed: .svg, .png"]),
        ("a.svg", ROWS[:1] * (MOST_ROWS + 1), {}, ["of 17 workers", f"up to {MOST_ROWS}"]),
        ("a.svg", ROWS, {"first": 3}, ["slot 3 on", "slots below 3"]),
        ("none/a.svg", ROWS, {}, ["cannot be written", "a folder that exists"]),
    ],
)
def test_what_cannot_be_drawn(tmp_path, name, rows, how, parts):
    with pytest.raises(PlanError) as error:
        drawn(tmp_path / name, rows, **how)
    assert [part for part in parts if part not in str(error.value)] == []
