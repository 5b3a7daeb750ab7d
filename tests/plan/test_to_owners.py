"""Gradients that go straight to owners: no sums travel, and all else is as it was."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan, make_plan, program_of, programs_of
from lightning_cyclic.plan.actions import Kind, Lane, Payload
from tests.harness.programs import replayed

PRESETS = ["cyclic_dp", "cyclic_dp_v1", "cyclic_zero", "lockstep_dp"]


def test_a_step_as_text() -> None:
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, num_steps=2, to_owners=True)
    first, second = (
        " ".join(str(a) for a in program if a.t == 0) for program in programs_of(plan)
    )
    assert first == (
        "1RECV_H1<1#0~sums 0F0@0#0 1F0@0#0 0SEND_K>1#0 1B0@0#0 1ADD0#0~sums 0B0@0#0 "
        "0SEND_H0>1#0~sums 1ADD1#0~sums 1UPDATE@1#0"
    )
    assert second == (
        "0RECV_H0<0#0~sums 0RECV_K<0#0 0F1@0#0 1F1@0#0 0ADD0#0~sums 1B1@0#0 1SEND_H1>0#0~sums "
        "0B1@0#0 0ADD1#0~sums 0UPDATE@1#0"
    )


@given(
    preset=st.sampled_from(PRESETS), num_stages=st.integers(1, 6), num_workers=st.integers(2, 5)
)
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_owners_get_each_gradient_once_and_add_them_in_order(
    preset: str, num_stages: int, num_workers: int
) -> None:
    n, numbers = num_workers, {"num_stages": num_stages, "num_workers": num_workers}
    plan = make_plan(preset, to_owners=True, **numbers)
    usual = make_plan(preset, **numbers)
    replayed(plan, {2})
    programs = programs_of(plan)
    for j in range(num_stages):
        owner = plan.owner(j)
        assert owner == usual.owner(j)
        added = [a.i for a in programs[owner] if a.kind is Kind.ADD and (a.t, a.j) == (1, j)]
        assert added == list(range(n))
    for w, program in enumerate(programs):
        sent = [a for a in program if a.kind is Kind.SEND and a.t == 1]
        assert not {a.payload for a in sent} & {Payload.S, Payload.T}
        gradients = [a for a in sent if a.payload is Payload.H]
        assert [a.peer for a in gradients] == [plan.owner(a.j) for a in gradients]
        assert sorted(a.j for a in gradients) == [
            j for j in range(num_stages) if plan.owner(j) != w
        ]
        assert all(a.lane is Lane.SUMS for a in gradients)


def shown(plan: Plan) -> list[list[str]]:
    """Return what each worker computes, with its versions."""
    kinds = {Kind.F, Kind.B, Kind.UPDATE}
    return [[str(a) for a in p if a.kind in kinds] for p in program_of(plan).first(4)]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("slack", [0, 2])
def test_weights_are_as_late_as_they_were(preset: str, slack: int) -> None:
    numbers = {"num_stages": 4, "num_workers": 4, "slack": 0 if preset == "lockstep_dp" else slack}
    assert shown(make_plan(preset, to_owners=True, **numbers)) == shown(
        make_plan(preset, **numbers)
    )


def test_groups_send_theirs_to_owners_too() -> None:
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=4, group_size=2, to_owners=True)
    replayed(plan, {2})
    sent = [a for p in programs_of(plan) for a in p if a.kind is Kind.SEND and a.t == 1]
    gradients = [a for a in sent if a.payload is Payload.H]
    assert len(gradients) == 2 * 3
    assert all(a.peer == plan.owner(a.j) for a in gradients)


def test_one_worker_adds_what_workers_would_send() -> None:
    numbers = {"num_stages": 2, "num_workers": 1, "num_microbatches": 3, "placement": "single"}
    plan = make_plan("cyclic_dp", to_owners=True, **numbers)
    replayed(plan, {2})
    (program,) = programs_of(plan)
    for j in range(2):
        kinds = [
            (a.kind, a.i) for a in program
            if (a.t, a.j) == (1, j) and a.kind in (Kind.B, Kind.ADD)
        ]  # fmt: skip
        assert kinds == [(kind, i) for i in range(3) for kind in (Kind.B, Kind.ADD)]


def test_pipelines_have_none_that_could_go() -> None:
    with pytest.raises(PlanError, match="to_owners=True with placement 'pipelined'"):
        make_plan("1f1b", num_stages=2, num_workers=2, to_owners=True)
