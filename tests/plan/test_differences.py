"""Exchanges of local steps: what is made where, and that nothing of a step waits for them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import ValidationError
from lightning_cyclic.plan import LocalSteps, Plan, make_plan, program_of, programs_of
from lightning_cyclic.plan.actions import Kind, Lane, Payload
from lightning_cyclic.plan.check.proof import validate
from lightning_cyclic.plan.dataflow import Datum
from tests.harness.programs import replayed


def plan_of(rule: LocalSteps, num_stages: int = 2, num_workers: int = 2, **more: object) -> Plan:
    given = {"num_stages": num_stages, "num_workers": num_workers} | more
    return make_plan("diloco", weights=rule, **given)


def test_a_step_as_text() -> None:
    plan = plan_of(LocalSteps(every=2, delay=1), sharding="optimizer")
    first, second = (" ".join(map(str, program_of(plan).step(w, 1))) for w in range(2))
    assert first == (
        "1RECV_T<1#1~sums 0RECV_U<1#1~sums 0F0@1#1 1F0@1#1 1B0@1#1 0B0@1#1 1ADD0#1~sums "
        "1SEND_S0>1#1~sums 0ADD0#1~sums 0SEND_S0>1#1~sums 1OUTER#1~sums 1SEND_U>1#1~sums "
        "0UPDATE@2#1 1UPDATE@2#1"
    )
    assert second == (
        "1RECV_S0<0#1~sums 0RECV_S0<0#1~sums 1RECV_U<0#1~sums 0F1@1#1 1F1@1#1 1B1@1#1 0B1@1#1 "
        "1ADD1#1~sums 1SEND_T>0#1~sums 0ADD1#1~sums 0OUTER#1~sums 0SEND_U>0#1~sums "
        "0UPDATE@2#1 1UPDATE@2#1"
    )


@given(
    every=st.integers(1, 9), data=st.data(), in_turn=st.booleans(), to_owners=st.booleans(),
    num_stages=st.integers(1, 5), num_workers=st.integers(1, 4),
    sharding=st.sampled_from(["none", "optimizer"]),
)  # fmt: skip
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_each_exchange_is_made_once_beside_the_steps_and_used_when_it_is_time(
    every: int, data: st.DataObject, in_turn: bool, to_owners: bool, num_stages: int,
    num_workers: int, sharding: str,
) -> None:  # fmt: skip
    delay = data.draw(st.integers(0, every - 1))
    rule = LocalSteps(every=every, delay=delay, in_turn=in_turn)
    plan = plan_of(rule, num_stages, num_workers, sharding=sharding, to_owners=to_owners)
    replayed(plan, {every})
    program, end = program_of(plan), 3 * every
    for w in range(num_workers):
        blocks = [program.step(w, t) for t in range(end)]
        for t, block in enumerate(blocks):
            own = {a.j for a in block if a.kind is Kind.OUTER}
            begun = {j for j in range(num_stages) if plan.exchanges(t, j)}
            assert own == {j for j in begun if plan.owner(j) == w}
            assert {a.t for a in block} == {t}  # nothing of it is in the block of another step
            beside = [a for a in block if a.kind in (Kind.ADD, Kind.OUTER, Kind.SEND)]
            assert num_workers == 1 or all(a.lane is not Lane.MAIN for a in beside)
            used = {
                (item[1], item[2])
                for a in block if a.kind is Kind.UPDATE
                for item in program.flow(w)(a).reads if item[0] is Datum.OUTER
            }  # fmt: skip
            before = range(num_stages) if t >= delay else ()
            assert used == {(j, t - delay) for j in before if plan.exchanges(t - delay, j)}


def test_what_is_used_after_the_end_must_have_come() -> None:
    plan = plan_of(LocalSteps(every=4, delay=3))  # which begins with the last of four steps
    programs = [
        [a for a in program if a.payload is not Payload.U or a.j != 0]
        for program in programs_of(plan)
    ]
    with pytest.raises(ValidationError, match="ends without what step 3 has made of stage 0"):
        validate(plan, tuple(map(tuple, programs)))
