import pytest
from rich.text import Text

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.viz import draw


def plan(preset="cyclic_dp", n=3, **numbers):
    return make_plan(preset, num_stages=n, num_workers=n, **{"num_steps": 2, **numbers})


CYCLIC = """\
slot     0     1     2     3     4     5     6     7     8     9    10    11    12    13    14    15
w0   0F0@0 1F0@0 2F0@0 2B0@0 1B0@0 0B0@0 0F0@0 1F0@0 2F0@1 2B0@1 1B0@0 0B0@0     .     .     .     .
w1       .     . 0F1@0 1F1@0 2F1@0 2B1@0 1B1@0 0B1@0 0F1@0 1F1@1 2F1@1 2B1@1 1B1@1 0B1@0     .     .
w2       .     .     .     . 0F2@0 1F2@0 2F2@0 2B2@0 1B2@0 0B2@0 0F2@1 1F2@1 2F2@1 2B2@1 1B2@1 0B2@1
"""  # noqa: E501

CYCLIC_IN_40 = """\
slot     0     1     2     3     4 ...
w0   0F0@0 1F0@0 2F0@0 2B0@0 1B0@0
w1       .     . 0F1@0 1F1@0 2F1@0
w2       .     .     .     . 0F2@0
"""

CYCLIC_FROM_9 = """\
slot     9    10    11    12    13 ...
w0   2B0@1 1B0@0 0B0@0     .     .
w1   1F1@1 2F1@1 2B1@1 1B1@1 0B1@0
w2   0B2@0 0F2@1 1F2@1 2F2@1 2B2@1
"""


def test_a_whole_plan():
    assert draw(plan()) == CYCLIC.rstrip("\n")


def test_no_line_is_wider_than_asked_for():
    assert draw(plan(), width=40) == CYCLIC_IN_40.rstrip("\n")


@pytest.mark.parametrize("width", range(1, 120))
def test_every_width_shows_the_slots_that_fit(width):
    lines = draw(plan(), width=width).splitlines()
    whole = CYCLIC.splitlines()
    cut = len(lines[1])
    assert [line[:cut] for line in whole] == [lines[0].removesuffix(" ..."), *lines[1:]]
    assert lines[0].endswith(" ...") == (cut < len(whole[0]))
    assert max(map(len, lines)) <= max(width, len("w0   0F0@0 ..."))
    if lines[0].endswith(" ..."):  # one slot more would not fit
        assert cut + len(" 0F0@0 ...") > width


def test_a_look_at_later_slots():
    assert draw(plan(), width=40, first_slot=9) == CYCLIC_FROM_9.rstrip("\n")


def test_workers_that_idle_are_drawn():
    lines = draw(plan(n=4), width=12).splitlines()
    assert lines == ["slot     0 ...", "w0   0F0@0", "w1       .", "w2       .", "w3       ."]


@pytest.mark.parametrize(
    "preset", ["cyclic_dp", "lockstep_dp", "gpipe", "1f1b", "pipedream", "pipeoptim"]
)
@pytest.mark.parametrize(("first", "num_slots"), [(0, 4), (3, 7), (11, 2)])
def test_a_look_shows_the_cells_of_the_timetable(preset, first, num_slots):
    given = plan(preset, 4, num_steps=3)
    drawn = draw(given, first_slot=first, width=len("slot") + 6 * num_slots + len(" ..."))
    lines = [line.split() for line in drawn.removesuffix(" ...").splitlines()]
    cells = {
        (int(s), w, text)
        for w, (_, *row) in enumerate(lines[1:])
        for s, text in zip(lines[0][1:], row, strict=False)
        if text != "."
    }
    assert cells == {
        (s, w, str(action).split("#")[0])
        for s, w, action in given.timetable
        if first <= s < first + num_slots
    }


def test_a_thousand_workers_from_the_same_code():
    lines = draw(plan(n=1024), width=60, first_slot=2050).splitlines()
    assert len(lines) == 1 + 1024
    assert lines[1].split() == ["w0", "2F0@0", "3F0@0", "4F0@0", "5F0@0"]
    assert lines[-1].split() == ["w1023", "4F1023@0", "5F1023@0", "6F1023@0", "7F1023@0"]


def test_colours_mark_versions_and_backwards_and_change_no_character():
    coloured = draw(plan(), colour=True)
    assert Text.from_ansi(coloured).plain == CYCLIC.rstrip("\n")
    cyan, yellow, reverse = "\033[36m", "\033[33m", "\033[7;36m"
    assert f"{cyan}1F0@0" in coloured
    assert f"{yellow}2F0@1" in coloured
    assert f"{reverse}2B0@0" in coloured
    assert "\033" not in draw(plan())


def test_slots_behind_the_end_are_refused():
    with pytest.raises(PlanError, match="nothing happens from slot 99 on; allowed"):
        draw(plan(), first_slot=99)
