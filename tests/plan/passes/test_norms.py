"""norms: who is told of a step's gradients, and before what."""

from __future__ import annotations

import pytest

from lightning_cyclic.plan import Plan, make_plan
from lightning_cyclic.plan.actions import Action, Kind, Payload


def heard(plan: Plan, w: int) -> dict[int, set[int]]:
    """Return step -> stages of whose norms a worker hears."""
    found: dict[int, set[int]] = {}
    for a in plan.programs[w]:
        if a.kind is Kind.RECV and a.payload is Payload.N:
            found.setdefault(a.t, set()).add(a.j)
    return found


def begins(plan: Plan, w: int, t: int) -> int:
    """Return where a worker makes the version of step t, or, if it makes none, runs B again."""
    owns = any(a.kind is Kind.UPDATE for a in plan.programs[w])
    kind, step = (Kind.UPDATE, t) if owns else (Kind.B, t + 1)
    return next(n for n, a in enumerate(plan.programs[w]) if a.kind is kind and a.t == step)


def last_heard(plan: Plan, w: int, t: int) -> int:
    each = enumerate(plan.programs[w])
    return max(n for n, a in each if _is_heard(a) and a.t == t)


def _is_heard(a: Action) -> bool:
    return a.kind is Kind.RECV and a.payload is Payload.N


@pytest.mark.parametrize(
    ("preset", "num_workers", "replicas"),
    [("1f1b", 2, 1), ("1f1b", 4, 1), ("gpipe", 4, 1), ("1f1b", 4, 2), ("gpipe", 6, 3)],
)
def test_all_workers_of_a_pipeline_with_a_flush_hear_before_the_new_version(
    preset: str, num_workers: int, replicas: int
) -> None:
    plan = make_plan(
        preset, num_stages=4, num_workers=num_workers, replicas=replicas,
        num_microbatches=4 * replicas,
        norms="all", num_steps=3,
    )  # fmt: skip
    for w in range(num_workers):
        others = {j for j in range(4) if plan.owner(j) != w}
        assert heard(plan, w) == dict.fromkeys(range(3), others)
        assert all(last_heard(plan, w, t) < begins(plan, w, t) for t in range(2))


def test_owners_alone_hear_where_they_alone_clip() -> None:
    plan = make_plan(
        "1f1b",
        num_stages=2,
        num_workers=4,
        replicas=2,
        num_microbatches=4,
        norms="owners",
        num_steps=2,
    )
    owners = {plan.owner(j) for j in range(2)}
    assert [bool(heard(plan, w)) for w in range(4)] == [w in owners for w in range(4)]


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize(
    ("preset", "weights"),
    [("pipedream_2bw", "delayed"), ("cyclic_mp", "delayed"), ("cyclic_mp", "freshest")],
)
def test_the_first_backward_of_a_step_waits_for_those_that_its_scale_follows_from(
    preset: str, weights: str, num_steps: int
) -> None:
    plan = make_plan(
        preset, num_stages=4, num_workers=4, num_microbatches=4, norms="all", weights=weights,
        late_updates=weights == "delayed", num_steps=num_steps,
    )  # fmt: skip
    for w in range(4):
        known = -1
        for a in plan.programs[w]:
            known = max(known, a.t) if _is_heard(a) else known
            if a.kind is Kind.B:
                assert known >= plan.ended_before(a.t) - 1


def test_owners_tell_the_norms_of_totals_that_come_long_before_they_are_applied() -> None:
    """Else each owner would wait with its own update for the norms that another tells late."""
    plan = make_plan(
        "cyclic_mp", num_stages=3, num_workers=3, num_microbatches=4, weights="delayed",
        norms="all",
        late_updates=True, num_steps=4,
    )  # fmt: skip
    told = 0
    for w, program in enumerate(plan.programs):
        for a in program:
            if a.payload is Payload.N and a.kind is Kind.SEND:
                s = plan.slot(Kind.B, a.t, plan.num_microbatches - 1, a.j)
                update = next(u for u in program if (u.kind, u.t, u.j) == (Kind.UPDATE, a.t, a.j))
                came = plan.worker_of(plan.num_microbatches - 1, a.j, a.t) != w
                told += came
                assert a.s == s + came < update.s
    assert told > 0


@pytest.mark.parametrize(
    ("preset", "slack", "late"),
    [("lockstep_dp", 0, 0), ("cyclic_dp", 0, 1), ("cyclic_dp_v1", 0, 1),
     ("cyclic_dp", 4, 1), ("cyclic_zero", 0, 1)],
)  # fmt: skip
def test_whole_steps_know_of_the_updates_that_all_workers_have_read(
    preset: str, slack: int, late: int
) -> None:
    plan = make_plan(preset, num_stages=4, num_workers=4, slack=slack)
    for t in range(6):
        read = [plan.reads(t, i, j) for i in range(4) for j in range(4)]
        assert plan.ended_before(t) == min(read) == max(t - late, 0)
