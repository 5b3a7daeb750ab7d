"""Plain words: every action of every program has some, and nobody sees a letter of ours."""

import re
from dataclasses import replace

import pytest

from lightning_cyclic.plan import PRESETS, make_plan, programs_of
from lightning_cyclic.plan.actions import Kind, Payload, parse
from lightning_cyclic.viz.words import CARRIED, sentence, title, waiting
from tests.harness.programs import shaped


@pytest.mark.parametrize("preset", PRESETS)
def test_all_actions_have_words(preset):
    plan = make_plan(preset, **shaped(preset, 4, 4), num_steps=3)
    for program in programs_of(plan):
        for a in program:
            assert re.fullmatch(r"[a-z ]+(, stage \d+)?(, micro-batch \d+)?", title(a)), a
            assert title(a) in sentence(a)
            assert f"of step {a.t}" in sentence(a)
            if a.kind is Kind.RECV:
                assert waiting(a) == sentence(a).replace("be ready for", "wait for")


def test_all_payloads_have_words():
    assert set(CARRIED) == set(Payload)
    assert len(set(CARRIED.values())) == len(CARRIED) - 1  # buffers travel in two ways


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0B3@1#2", "backward, stage 0, micro-batch 3, of step 2, on version 1 of the weights"),
        ("2ADD1#4", "add gradients, stage 2, micro-batch 1, of step 4"),
        ("0F0#4", "forward, stage 0, micro-batch 0, of step 4"),
        ("0TELL#4", "note losses and logs, of step 4"),
        ("2SEND_D>1#4", "send the batch, of step 4, to worker 1"),
        (
            "2RECV_P@3<0#4",
            "be ready for new weights, stage 2, of step 4, version 3, from worker 0",
        ),
    ],
)
def test_sentences(text, words):
    assert sentence(parse(text)) == words


def test_evaluations_are_counted_by_themselves():
    assert sentence(replace(parse("0F0@0#4"), t=-2)) == (
        "forward, stage 0, micro-batch 0, of evaluation 2, on the newest weights"
    )
    assert sentence(replace(parse("0TELL#4"), t=-1)) == "note losses and logs, of evaluation 1"
