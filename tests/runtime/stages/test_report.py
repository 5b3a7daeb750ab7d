"""The report: asserted as a picture, from a survey with round numbers."""

from dataclasses import replace

from lightning_cyclic.runtime.stages.cuts import choose_cuts
from lightning_cyclic.runtime.stages.report import report

from .scripts import Writer

LAYER = ("layer", 2_000_000, 4000, 1000)
BOX = ("box", [LAYER, LAYER])
SEEN = Writer([LAYER, BOX, ("read",), LAYER, ("old", 3)]).survey()

PICTURE = """\
Script: calls of modules with parameters, forward of one micro-batch
times are counted, at 1 TFLOP/s and 100 GB/s: the same in every run

  module       time   params   keeps   crossing   a stage
 ────────────────────────────────────────────────────────────────────
  0            2 ms         4 kB          1 kB
  1            4 ms         8 kB          2 kB        0 B   1 begins
  1.0          2 ms         4 kB          1 kB              as above
  1.1          2 ms         4 kB          1 kB        0 B   can begin
  3            2 ms         4 kB          1 kB        0 B   cannot [1]
  3 (call 2)   2 ms         4 kB          1 kB

  [1] Python reads a value that an earlier stage computes, by item
      at script.py:1

Stages

  stage   begins at                time   share   params   keeps   receives
 ─────────────────────────────────────────────────────────────────────────────────────
      0   the step's beginning     2 ms     20%         4 kB          1 kB        0 B
      1   1                        8 ms     80%        12 kB          4 kB        0 B

stages=["1"]"""


def squeezed(text):
    return [" ".join(line.replace("─", "").split()) for line in text.splitlines()]


def test_a_report():
    text = report(SEEN, choose_cuts(SEEN, ["1"]))
    assert squeezed(text) == squeezed(PICTURE)


def test_measured_times_are_said_to_be():
    text = report(replace(SEEN, clock="measured"), choose_cuts(SEEN, ["1"]))
    second = squeezed(PICTURE)[1]
    now = "times are measured, in this run on this machine"
    assert squeezed(text) == [now if line == second else line for line in squeezed(PICTURE)]


def test_a_remark_comes_last_and_is_wrapped():
    text = report(SEEN, choose_cuts(SEEN, ["1"]), remark=f"one [1] {'word ' * 30}")
    assert squeezed(text)[:-2] == squeezed(PICTURE)
    assert text.splitlines()[-2].startswith("one [1] word word")


def test_no_line_is_wider_than_100_columns_but_what_is_to_be_pasted():
    long = [("box", [("box", [("box", [LAYER] * 3)] * 3)] * 3)] * 3
    seen = Writer(long).survey()
    text = report(seen, choose_cuts(seen, 40))
    pasted = [line for line in text.splitlines() if len(line) > 100]
    assert [line.partition("=")[0] for line in pasted] == ["stages"]


def test_of_deep_modules_the_inner_calls_are_left_out_but_none_that_begins_a_stage():
    seen = Writer([LAYER, BOX, BOX, LAYER]).survey()
    text = report(seen, choose_cuts(seen, ["2.1"]), rows=4)
    listed = [line.split()[0] for line in text.splitlines() if " ms " in line]
    assert listed[:5] == ["0", "1", "2", "2.1", "3"]
    assert "3 inner calls are left out" in text


def test_a_shared_module_is_named_and_a_tied_parameter_too():
    seen = Writer([LAYER, LAYER, ("old", 0), LAYER]).survey()
    text = report(seen, choose_cuts(seen, ["1"]))
    assert "[1] '0' runs on both sides" in text
    assert "0 is used in stages 0, 1: kept alike" in text
