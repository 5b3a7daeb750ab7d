"""The recorder of whole steps: compute lies between what the engine does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_cyclic.plan.actions import Action, Kind, parse
from lightning_cyclic.runtime.recorder import Recorder
from lightning_cyclic.runtime.whole_step.step_recorder import StepRecorder, Unrecorded


class Clock:
    """A clock on which time passes only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us = 0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now_us * 1000)

    def passes(self, us: int) -> None:
        self.now_us += us


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def recorder(tmp_path: Path, clock: Clock) -> Recorder:
    recorder = Recorder(tmp_path / "rank0.json", 0, "worker 0", 0)
    recorder._offset_ns = 0
    return recorder


def spans(recorder: Recorder) -> dict[str, tuple[float, float]]:
    """Return action, or name -> begin and duration."""
    recorder.close()
    events = [e for e in json.loads(recorder.path.read_text()) if e["ph"] == "X"]
    return {e["args"].get("action", e["name"]): (e["ts"], e["dur"]) for e in events}


def engine(step: StepRecorder, clock: Clock) -> Callable[[str], None]:
    """Return what carries out an action in the middle of a step; it takes 5 us before it."""
    does: dict[Kind, Callable[[Action], None]] = {
        kind: step.recorded(kind, lambda a: None) for kind in Kind
    }

    def carry_out(text: str) -> None:
        clock.passes(5)
        a = parse(text)
        does[a.kind](a)

    return carry_out


def test_forwards_and_backwards_last_from_one_call_of_the_engine_to_the_next(
    recorder: Recorder, clock: Clock
) -> None:
    step = StepRecorder(recorder)
    carry_out = engine(step, clock)
    comes = step.interrupting(carry_out)
    carry_out("0F0@0#1")  # before the user's step begins
    with step.running():
        clock.passes(100)
        comes("1F0@0#1")
        clock.passes(200)
    clock.passes(7)
    with step.reversing():
        clock.passes(400)
        comes("1B0@0#1")
        clock.passes(300)
        comes("0B0@0#1")
    assert spans(recorder) == {
        "0F0@0#1": (5, 100),
        "1F0@0#1": (110, 200),
        "1B0@0#1": (317, 400),
        "0B0@0#1": (722, 300),
    }


def test_a_stage_that_a_step_skips_has_no_span(recorder: Recorder, clock: Clock) -> None:
    step = StepRecorder(recorder)
    carry_out = engine(step, clock)
    carry_out("0F0@0#1")
    with step.running():
        clock.passes(100)
    carry_out("1F0@0#1")  # behind the step's forward
    with step.reversing():
        clock.passes(400)
        step.interrupting(carry_out)("1B0@0#1")
    carry_out("0F0@0#2")
    assert list(spans(recorder)) == ["0F0@0#1", "1B0@0#1"]


def test_the_step_that_finds_the_stages_is_one_span(recorder: Recorder, clock: Clock) -> None:
    step = StepRecorder(recorder)
    carry_out = engine(step, clock)
    with step.finding():
        clock.passes(100)
    for text in ("0F0@0#0", "1F0@0#0"):  # which it has run
        carry_out(text)
    with step.reversing():
        clock.passes(400)
        step.interrupting(carry_out)("1B0@0#0")
    assert spans(recorder) == {
        "forward of step 0, which finds the stages": (0, 100),
        "1B0@0#0": (110, 400),
    }


def test_updates_are_timed_as_one_where_they_are_made(recorder: Recorder, clock: Clock) -> None:
    step = StepRecorder(recorder)
    engine(step, clock)("0UPDATE@1#0")  # a mark of the program, like TELL
    engine(step, clock)("0TELL#0")
    step.updating(lambda t, stages: clock.passes(30))(0, [0, 1])
    assert spans(recorder) == {"0UPDATE@1#0": (10, 30)}


def test_other_actions_are_timed_as_ever(recorder: Recorder, clock: Clock) -> None:
    step = StepRecorder(recorder)
    step.recorded(Kind.ADD, lambda a: clock.passes(3))(parse("0ADD1#1"))
    step.awaited(lambda a, incoming: clock.passes(4))(parse("0RECV_T<1#1"), None)
    assert spans(recorder) == {"0ADD1#1": (0, 3), "0RECV_T<1#1": (3, 4)}


def test_where_nothing_is_recorded_nothing_is_touched() -> None:
    class Untouchable:
        def record(self, recorder: StepRecorder) -> None:
            raise AssertionError

    off = Unrecorded()
    off.attach(Untouchable())
    with off.finding(), off.running(), off.reversing():
        pass
