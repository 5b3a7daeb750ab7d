"""Peaks, counted along a program."""

from lightning_cyclic.plan.actions import parse
from lightning_cyclic.plan.dataflow import live_activations, live_versions


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
