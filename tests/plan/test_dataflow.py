"""What programs keep, and pictures of timetables."""

from fractions import Fraction
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan.actions import parse
from lightning_cyclic.plan.clock import Entry, picture
from lightning_cyclic.plan.dataflow import live_activations, live_versions
from lightning_cyclic.plan.schedules import ceil_div


def program(text):
    return tuple(map(parse, text.split()))


def test_live_activations():
    assert live_activations(()) == 0
    assert live_activations(program("0F0#0 0F1#0 0B0#0 0F2#0 0B1#0 0B2#0")) == 2


def test_live_versions_are_kept_until_their_last_read():
    assert live_versions(program("0F0@0#0 0UPDATE@1#0 0F0@1#1 0B0@1#1")) == {0: 1}
    assert live_versions(program("0F0@0#0 0F0@0#1 0B0@0#0 0UPDATE@1#0 0F0@1#2 0B0@0#1")) == {0: 2}


def test_a_version_to_be_sent_is_kept():
    assert live_versions(program("1UPDATE@1#0 1F0@1#1 1UPDATE@2#1 1F0@2#2 1SEND_P@1>0#1")) == {
        1: 2
    }


@settings(deadline=None)
@given(st.integers(-(10**20), 10**20), st.integers(1, 10**6))
def test_ceil_div_is_exact(ticks, unit):
    assert ceil_div(ticks, unit) == ceil(Fraction(ticks, unit))


def test_picture_has_workers_as_rows_and_slots_as_columns():
    entries = [Entry(3, 0, "0F0"), Entry(4, 1, "1F0"), Entry(6, 0, "0B0")]
    assert picture(entries).splitlines() == [
        "slot   3   4   5   6",
        "w0   0F0   .   . 0B0",
        "w1     . 1F0   .   .",
    ]


def test_picture_points_below_the_cell():
    entries = [Entry(0, 0, "0F0"), Entry(1, 0, "1F0"), Entry(1, 1, "0F1")]
    assert picture(entries, arrow=(1, 0)).splitlines() == [
        "slot   0   1",
        "w0   0F0 1F0",
        "           ^",
        "w1     . 0F1",
    ]


def test_picture_joins_what_shares_a_slot_and_may_start_at_a_later_worker():
    entries = [Entry(0, 11, "0F0"), Entry(0, 11, "1F0")]
    assert picture(entries, first_row=10).splitlines() == [
        "slot       0",
        "w10        .",
        "w11  0F0+1F0",
    ]


def test_picture_of_nothing():
    assert picture([]) == "slot"
