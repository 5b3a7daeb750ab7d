"""Who runs what, and who owns a stage."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.placement import Pipelined, Replicated, Shared, Single
from lightning_cyclic.plan.schedules import Cyclic


def table(placement):
    return [
        [placement.worker(0, i, j) for j in range(placement.num_stages)]
        for i in range(placement.num_microbatches)
    ]


def test_replicated_gives_a_worker_whole_micro_batches():
    placement = Replicated(num_stages=2, num_workers=3, num_microbatches=3)
    assert table(placement) == [[0, 0], [1, 1], [2, 2]]
    assert placement.workers_of(1) == (0, 1, 2)


def test_pipelined_gives_a_worker_a_stage_or_neighbouring_stages():
    assert table(Pipelined(num_stages=3, num_workers=3, num_microbatches=1)) == [[0, 1, 2]]
    assert table(Pipelined(num_stages=5, num_workers=2, num_microbatches=1)) == [[0, 0, 0, 1, 1]]


def test_replicas_of_a_pipeline_take_micro_batches_in_turn():
    placement = Pipelined(num_stages=3, num_workers=4, num_microbatches=3, replicas=2)
    assert table(placement) == [[0, 0, 1], [2, 2, 3], [0, 0, 1]]
    assert [placement.workers_of(j) for j in range(3)] == [(0, 2), (0, 2), (1, 3)]
    assert [list(placement.replica(w)) for w in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("cls", [Replicated, Single])
def test_elsewhere_a_worker_is_a_replica_of_its_own(cls):
    placement = cls(num_stages=3, num_workers=3, num_microbatches=3)
    assert [list(placement.replica(w)) for w in range(3)] == [[0], [1], [2]]


def test_those_who_take_turns_are_one_replica():
    placement = Shared(num_stages=3, num_workers=3, num_microbatches=3)
    assert {placement.replica(w) for w in range(3)} == {range(3)}


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "repeats"), [(2, 2, 1), (3, 3, 2), (4, 4, 3)]
)
def test_turns_repeat(num_stages, num_microbatches, repeats):
    placement = Shared(num_stages=num_stages, num_workers=1, num_microbatches=num_microbatches)
    assert placement.repeats == repeats
    wide = Shared(
        num_stages=num_stages, num_workers=placement.num_places, num_microbatches=num_microbatches
    )
    steps = [[wide.worker(t, i, j) for i in range(num_microbatches) for j in range(num_stages)]
             for t in range(2 * repeats)]  # fmt: skip
    assert steps[:repeats] == steps[repeats:]
    assert all(steps[0] != steps[t] for t in range(1, repeats))


def test_shared_gives_a_stage_as_many_places_as_it_has_live_activations():
    placement = Shared(num_stages=3, num_workers=6, num_microbatches=3)
    assert table(placement) == [[0, 3, 5], [1, 4, 5], [2, 3, 5]]
    assert [placement.worker(1, i, 1) for i in range(3)] == [4, 3, 4]  # goes on from step 0
    assert [placement.workers_of(j) for j in range(3)] == [(0, 1, 2), (3, 4), (5,)]


def test_shared_by_fewer_workers_keeps_neighbouring_places_together():
    placement = Shared(num_stages=3, num_workers=2, num_microbatches=3)
    assert [placement.workers_of(j) for j in range(3)] == [(0,), (1,), (1,)]


@settings(deadline=None)
@given(num_stages=st.integers(1, 6), num_microbatches=st.integers(1, 8))
def test_shared_with_all_places_never_holds_two_activations(num_stages, num_microbatches):
    num_places = num_stages * (num_stages + 1) // 2
    placement = Shared(
        num_stages=num_stages, num_workers=num_places, num_microbatches=num_microbatches
    )
    schedule = Cyclic(num_stages=num_stages, num_microbatches=num_microbatches)
    held = Counter(
        (placement.worker(t, i, j), s)
        for t in range(3)
        for i in range(num_microbatches)
        for j in range(num_stages)
        for s in range(
            schedule.slot(t, schedule.start(Kind.F, i, j)),
            schedule.slot(t, schedule.start(Kind.B, i, j)) + 1,
        )
    )
    assert set(held.values()) == {1}
    assert {w for w, _ in held} <= set(range(num_places))


def test_single_gives_everything_to_one():
    assert table(Single(num_stages=2, num_workers=1, num_microbatches=2)) == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("cls", "num_workers", "num_microbatches", "text"),
    [
        (Replicated, 2, 3, "use num_microbatches=2"),
        (Pipelined, 4, 4, "use num_stages=4 or num_workers=3"),
        (Shared, 7, 3, "use num_workers=6 or fewer"),
        (Single, 2, 3, "use num_workers=1"),
    ],
)
def test_misfits_say_what_to_do(cls, num_workers, num_microbatches, text):
    problem = cls(
        num_stages=3, num_workers=num_workers, num_microbatches=num_microbatches
    ).misfit()
    assert problem is not None
    assert f"num_workers={num_workers}" in problem
    assert problem.endswith(text)


@pytest.mark.parametrize("cls", [Replicated, Pipelined, Shared])
def test_fitting_numbers(cls):
    assert cls(num_stages=3, num_workers=3, num_microbatches=3).misfit() is None


def owners(preset, num_stages, num_workers, **options):
    plan = make_plan(
        preset, num_stages=num_stages, num_workers=num_workers, proved=False, **options
    )
    return [plan.owner(j) for j in range(num_stages)]


def test_lockstep_deals_the_stages_out():
    assert owners("lockstep_dp", 4, 4) == [3, 2, 1, 0]
    assert owners("lockstep_dp", 5, 2) == [1, 1, 1, 0, 0]
    assert owners("lockstep_dp", 2, 4) == [3, 1]


def test_where_nobody_is_fresh_worker_0_reads_first():
    assert owners("cyclic_dp_v1", 3, 3, sharding="optimizer") == [0, 0, 0]
    assert owners("cyclic_dp", 3, 3, slack=100) == [0, 0, 0]
    assert owners("cyclic_dp", 4, 2, slack=3) == [0, 0, 1, 1]


def test_without_sharding_the_last_worker_owns():
    for preset in ("cyclic_dp", "cyclic_dp_v1", "lockstep_dp"):
        assert owners(preset, 3, 3, sharding="none") == [2, 2, 2]


@settings(deadline=None)
@given(
    num_stages=st.integers(1, 9),
    num_workers=st.integers(1, 6),
    slack=st.sampled_from([0, 1, 2, 3, 5, 8, 100]),
)
def test_owner_is_the_first_fresh_worker(num_stages, num_workers, slack):
    d = Fraction(2 * num_stages, num_workers)
    for j, owner in enumerate(owners("cyclic_dp", num_stages, num_workers, slack=slack)):
        fresh = [i for i in range(num_workers) if d * i + 2 * j >= d * (num_workers - 1) + slack]
        assert owner == (fresh[0] if fresh else 0)


@pytest.mark.parametrize(("preset", "expected"), [("gpipe", [0, 1, 2]), ("cyclic_mp", [0, 1, 2])])
def test_in_pipelines_a_worker_of_the_stage_owns_it(preset, expected):
    assert owners(preset, 3, 3) == expected
