from __future__ import annotations

from typing import Any

import pytest

from lightning_cyclic.plan import Plan, make_plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig
from lightning_cyclic.runtime.partial_step.plans import Plans, flows, slots_per_step
from lightning_cyclic.runtime.stages.cuts import Cuts

CUTS = Cuts(
    starts=("b",), split=frozenset(), parameters=(("a",), ("b",)), tied={},
    buffers=((), ("mean",)), changed=frozenset({"mean"}), metrics={},
)  # fmt: skip


def plans_of(preset: str, worker: int, *, num_workers: int = 2, width: int = 1) -> Plans:
    def planned(num_stages: int, num_micro: int, tied: Any, relayed: Any) -> Plan:
        numbers = {"width": width} if width > 1 else {}
        return make_plan(
            preset, num_stages=num_stages, num_workers=num_workers, num_micro=num_micro,
            tied=tied, relayed=relayed, **numbers,
        )  # fmt: skip

    config = StagewiseConfig(
        make_plan=planned, find_cuts=lambda module, step: CUTS, num_micro=4, width=width,
        remat="never", seed=0,
    )  # fmt: skip
    return Plans(config, worker, num_workers)


def computed(actions: list[Action]) -> list[tuple[Kind, int, int]]:
    return [(a.kind, a.t, a.i) for a in actions if a.kind in (Kind.F, Kind.B)]


def test_until_the_stages_are_known_a_plan_has_those_that_are_expected() -> None:
    plans = plans_of("gpipe", 0)
    assert plans.usual is None
    assert plans.provisional().num_stages == 2


@pytest.mark.parametrize("num_micro", [4, 3, 1])
def test_a_step_has_the_micro_batches_that_its_batch_gave(num_micro: int) -> None:
    plans = plans_of("gpipe", 0)
    plans.begin(CUTS)
    expected = [(kind, 5, i) for kind in (Kind.F, Kind.B) for i in range(num_micro)]
    assert computed(plans.before_update(num_micro, 5)) == expected
    assert computed(plans.after_update(num_micro, 5)) == []


def test_actions_of_a_later_step_have_later_slots() -> None:
    plans = plans_of("1f1b", 1)
    usual = plans.begin(CUTS)
    first, third = plans.before_update(4, 0), plans.before_update(4, 2)
    assert [a.s for a in third] == [a.s + 2 * slots_per_step(usual) for a in first]


@pytest.mark.parametrize("preset", ["gpipe", "1f1b", "pipedream_2bw"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_batch_of_evaluation_goes_forward_alone(preset: str, worker: int) -> None:
    plans = plans_of(preset, worker)
    plans.begin(CUTS)
    forward = plans.forward(-3)
    assert computed(forward) == [(Kind.F, -3, 0)]
    assert [a.payload for a in forward if a.kind is not Kind.F] == [Payload.A]
    assert all(a.t == -3 for a in forward)


def test_buffers_go_from_the_last_micro_batch_to_the_other_replicas() -> None:
    sent, received = (plans_of("gpipe", w, num_workers=4, width=2) for w in (3, 1))
    for plans in (sent, received):
        plans.begin(CUTS)
    assert [[(a.kind, a.j, a.peer) for a in stage] for stage in sent.relays(2)] == [
        [(Kind.SEND, 1, 1)]
    ]
    assert [[(a.kind, a.j, a.peer) for a in stage] for stage in received.relays(2)] == [
        [(Kind.RECV, 1, 3)]
    ]


@pytest.mark.parametrize(
    ("preset", "expected"), [("gpipe", False), ("1f1b", False), ("pipedream_2bw", True)]
)
def test_steps_flow_where_no_flush_is_between(preset: str, expected: bool) -> None:
    assert flows(plans_of(preset, 0).begin(CUTS)) is expected
