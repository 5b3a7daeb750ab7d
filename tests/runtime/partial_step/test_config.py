from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from lightning_cyclic.plan import Plan, make_plan, program_of
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.partial_step.config import Plans, StagewiseConfig
from lightning_cyclic.runtime.stages.cuts import Cuts

CUTS = Cuts(
    starts=("b",), split=frozenset(), parameters=(("a",), ("b",)), tied={},
    buffers=((), ("mean",)), changed=frozenset({"mean"}), metrics={},
)  # fmt: skip


def plans_of(
    preset: str, *, num_workers: int = 2, replicas: int = 1, offloads: bool = False,
    cuts: Cuts = CUTS,
) -> Plans:  # fmt: skip
    def planned(num_stages: int, num_microbatches: int, tied: Any, relayed: Any) -> Plan:
        numbers = {"replicas": replicas} if replicas > 1 else {}
        return make_plan(
            preset, num_stages=num_stages, num_workers=num_workers,
            num_microbatches=num_microbatches,
            tied=tied, relayed=relayed, offloads=offloads, **numbers,
        )  # fmt: skip

    config = StagewiseConfig(
        make_plan=planned, find_cuts=lambda module, step: cuts, num_microbatches=4,
        replicas=replicas,
        remat="never", seed=0,
    )  # fmt: skip
    return Plans(config, cuts, num_workers)


def computed(actions: Iterable[Action]) -> list[tuple[Kind, int, int | None]]:
    return [(a.kind, a.t, a.i) for a in actions if a.kind in (Kind.F, Kind.B)]


@pytest.mark.parametrize("num_microbatches", [4, 3, 1])
def test_a_step_has_the_micro_batches_that_its_batch_gave(num_microbatches: int) -> None:
    expected = [(kind, 5, i) for kind in (Kind.F, Kind.B) for i in range(num_microbatches)]
    assert computed(program_of(plans_of("gpipe").of(num_microbatches)).step(0, 5)) == expected


@pytest.mark.parametrize("preset", ["gpipe", "1f1b", "pipedream_2bw"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_batch_of_evaluation_goes_forward_alone(preset: str, worker: int) -> None:
    plans = plans_of(preset)
    for t in (-3, -4):
        forward = plans.evaluation(worker, t)
        assert computed(forward) == [(Kind.F, t, 0)]
        messages = {a.payload for a in forward if a.kind in (Kind.SEND, Kind.RECV)}
        assert messages == {Payload.D, Payload.A, Payload.L}
        assert [a.kind for a in forward].count(Kind.TELL) == 1
        assert all(a.t == t for a in forward)


@pytest.mark.parametrize("preset", ["gpipe", "pipedream_2bw"])
def test_a_batch_of_evaluation_leaves_nothing_that_would_be_away(preset: str) -> None:
    cuts = replace(CUTS, starts=("b", "c"), parameters=(("a",), ("b",), ("c",)), buffers=((),) * 3)
    plans = plans_of(preset, num_workers=1, offloads=True, cuts=cuts)
    moves = Kind.EVICT, Kind.FREE, Kind.FETCH
    assert any(a.kind in moves for a in program_of(plans.of(1)).first(2)[0])
    assert not [a for a in plans.evaluation(0, -1) if a.kind in moves]


def test_workers_without_a_part_in_an_evaluation_are_told_what_came_out() -> None:
    plans = [plans_of("cyclic_mp", num_workers=3) for _ in range(3)]
    forward = [each.evaluation(w, -1) for w, each in enumerate(plans)]
    assert list(map(computed, forward)) == [[(Kind.F, -1, 0)], [], [(Kind.F, -1, 0)]]
    assert [[str(a) for a in x if a.payload is Payload.L] for x in forward] == [
        ["0RECV_L<2#-1"], ["0RECV_L<2#-1"], ["0SEND_L>0#-1", "0SEND_L>1#-1"],
    ]  # fmt: skip
    assert [sum(a.kind is Kind.TELL for a in x) for x in forward] == [1, 1, 1]
