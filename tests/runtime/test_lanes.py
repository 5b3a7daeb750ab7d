"""A lane: actions in their order, waits for a number of them, and errors for who waits."""

from __future__ import annotations

import threading

import pytest

from lightning_cyclic.errors import PlanError, StepError
from lightning_cyclic.plan.actions import Action, parse
from lightning_cyclic.runtime.worker import LaneThread

ACTIONS = tuple(parse(f"0ADD{i}#0~sums") for i in range(1, 5))


def test_who_waits_for_an_action_waits_for_none_behind_it() -> None:
    goes_on, seen = threading.Event(), list[Action]()

    def do(a: Action) -> None:
        if a == ACTIONS[2]:
            assert goes_on.wait(20)
        seen.append(a)

    lane = LaneThread("lane", do)
    lane.put(ACTIONS[:1])
    lane.put(ACTIONS[1:])
    lane.wait_for(2)  # of a batch whose third action waits for this thread
    assert seen == list(ACTIONS[:2])
    goes_on.set()
    lane.wait_for(lane.num_put)
    assert seen == list(ACTIONS)
    lane.close()


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (PlanError("no plan"), PlanError, "^no plan$"),
        (KeyError("v"), StepError, "^lane failed: KeyError: 'v'$"),
    ],
)
def test_an_error_ends_the_lane_and_reaches_who_waits(
    error: Exception, kind: type[Exception], said: str
) -> None:
    seen: list[Action] = []

    def do(a: Action) -> None:
        seen.append(a)
        raise error

    lane = LaneThread("lane", do)
    lane.put(ACTIONS)
    with pytest.raises(kind, match=said) as caught:
        lane.wait_for(lane.num_put)
    assert caught.value is error or caught.value.__cause__ is error
    with pytest.raises(kind, match=said):
        lane.check()
    assert seen == [ACTIONS[0]]
    lane.close()
