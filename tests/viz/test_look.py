"""The look: rows say what their cells have in common, and cells the rest."""

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import parse
from lightning_cyclic.viz.look import Look


def of(preset, **numbers):
    return Look.of(make_plan(preset, **{"num_stages": 4, "num_workers": 4, **numbers}))


FORWARD = parse("1F2@0#3")


@pytest.mark.parametrize(
    ("look", "row", "cell"),
    [
        (of("1f1b"), "stage 3", ["F2"]),
        (of("cyclic_dp"), "micro-batch 3", ["F1"]),
        (of("pipedream"), "stage 3", ["F3"]),  # one micro-batch per step: steps are counted
        (of("gpipe", num_stages=2, width=2), "stage 1", ["F2"]),
        (of("cyclic_mp"), "", ["F2", "stage 1"]),
        (of("cyclic_dp", num_stages=1), "stage 0, micro-batch 3", ["F2"]),
    ],
)
def test_rows_and_cells(look, row, cell):
    assert (look.row(3), look.cell(FORWARD)) == (row, cell)


def test_a_backward_has_the_full_colour_of_its_forward():
    look = of("1f1b")
    forward, backward = look.paint(FORWARD), look.paint(parse("1B2@0#3"))
    assert forward.edge == backward.fill
    assert forward.fill != backward.fill
    assert look.paint(parse("1F3@0#3")).edge != forward.edge


def test_old_weights_are_those_that_plain_training_would_not_read():
    look = of("pipedream_2bw")
    assert not look.is_old(parse("0F0@0#0"))
    assert look.is_old(parse("0F0@0#1"))
    assert not look.is_old(parse("0F0@1#1"))


def test_titles():
    assert of("1f1b", num_micro=8).title == "1f1b: 4 workers, 4 stages, 8 micro-batches per step"
    one = of("cyclic_dp", num_workers=1, num_stages=1)
    assert one.title == "cyclic_dp: 1 worker, 1 stage, 1 micro-batch per step"
