"""How much optimizer state stays in memory under a limit: as much as any choice could."""

import math
import re
from dataclasses import replace
from itertools import product

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.plan.check.proof import proof_of
from lightning_cyclic.plan.tiers import Tiers
from lightning_cyclic.planner.tiers import Chunks, in_tiers, most_that_stays, rooms_beside
from lightning_cyclic.simulate import Costs, memory
from lightning_cyclic.simulate.memory import memory_by_place

CHUNK = 10


def a_plan(preset, num_workers, num_stages):
    return make_plan(preset, num_stages=num_stages, num_workers=num_workers, num_steps=6)


def costs_of(sizes, activations):
    return replace(
        Costs.even(len(sizes)), param_bytes=tuple(map(float, sizes)),
        activation_bytes=tuple(map(float, activations)),
    )  # fmt: skip


def peak(plan, costs):
    return max(m.total for m in memory(plan, costs))


def best_by_brute_force(plan, costs, chunks, limit):
    """Return the most chunks that can stay, of all choices; None where even none can."""
    best = None
    for ahead in (1, 0):
        for kept in product(*(range(n + 1) for n in chunks)):
            moved = tuple((n - k) * CHUNK for n, k in zip(chunks, kept, strict=True))
            tiers = Tiers(moved=moved, kept=tuple(k * CHUNK for k in kept), ahead=ahead)
            if peak(replace(plan, tiers=tiers), costs) <= limit:
                best = max(sum(kept), -1 if best is None else best)
        if best is not None:  # copies that overlap come first
            return best
    return None


CASES = [
    ("cyclic_dp", 1, (2, 2, 2, 2), (5, 5, 5, 5), (0, 0, 0, 0)),
    ("cyclic_dp", 1, (1, 3, 2, 0), (4, 9, 7, 2), (30, 10, 20, 5)),
    ("lockstep_dp", 1, (3, 1, 2), (4, 9, 7), (1, 2, 40)),
    ("cyclic_dp", 2, (2, 1, 2, 1), (8, 4, 8, 4), (3, 3, 3, 3)),
    ("lockstep_dp", 2, (2, 2, 1, 1), (8, 4, 8, 4), (3, 9, 3, 9)),
    ("cyclic_zero", 2, (2, 1, 1, 2), (8, 4, 8, 4), (3, 3, 3, 3)),
    ("1f1b", 1, (1, 3, 2, 0), (4, 9, 7, 2), (30, 10, 20, 5)),
    ("gpipe", 1, (2, 2, 2, 2), (5, 5, 5, 5), (3, 3, 3, 3)),
    ("pipedream_2bw", 1, (1, 3, 2), (4, 9, 7), (30, 10, 20)),
    ("pipedream", 1, (2, 1, 2), (5, 9, 3), (30, 1, 20)),
    ("cyclic_pipeline", 1, (2, 1, 2), (5, 9, 3), (0, 1, 2)),
    ("interleaved_1f1b", 2, (2, 1, 2, 1), (8, 8, 8, 8), (3, 3, 3, 3)),
    ("cyclic_mp", 2, (2, 1, 2, 1), (8, 8, 8, 8), (3, 3, 3, 3)),
]


@pytest.mark.parametrize(("preset", "workers", "chunks", "sizes", "activations"), CASES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_as_much_stays_as_any_choice_could_have_stay(
    preset, workers, chunks, sizes, activations, share
):
    plan, costs = a_plan(preset, workers, len(chunks)), costs_of(sizes, activations)
    every = tuple(n * CHUNK for n in chunks)
    none = (0,) * len(chunks)
    low = peak(replace(plan, tiers=Tiers(moved=every, kept=none, ahead=0)), costs)
    high = peak(replace(plan, tiers=Tiers(moved=none, kept=every)), costs)
    limit = low + share * (high - low)
    if workers > 1:  # of all workers together the most is not what each worker's most is
        limit = low + (high - low) * round(share)
    found = in_tiers(plan, costs, Chunks(chunks, CHUNK), limit)
    assert sum(found.tiers.kept) // CHUNK == best_by_brute_force(plan, costs, chunks, limit)
    assert peak(found, costs) <= limit
    assert "replayed" in str(proof_of(found))


def loads_by_belady(trace, *, cycles=40):
    """Return the chunks that are fetched in each cycle of a trace, on average, once it is steady.

    PatrickStar's rule: what is needed last goes, with the next cycle behind this one.

    Args:
        trace: chunks that are needed at once, and how many there is room for.
    """

    def steps_until(chunk, place):
        behind = range(1, len(trace) + 1)
        return next(d for d in behind if chunk in trace[(place + d) % len(trace)][0])

    there, loads = set(), []
    for _ in range(cycles):
        loads.append(0)
        for place, (needed, room) in enumerate(trace):
            loads[-1] += len(needed - there)
            there |= needed
            while len(there) > room:
                there.remove(max(there - needed, key=lambda x: steps_until(x, place)))
    return sum(loads[cycles // 2 :]) / len(loads[cycles // 2 :])


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
@pytest.mark.parametrize(
    ("stages", "each", "activations"), [(4, 1, 0), (4, 4, 0), (6, 2, 0), (4, 4, 60), (8, 4, 30)]
)
def test_no_more_chunks_move_than_by_the_offline_optimum(stages, each, activations, share):
    plan, costs = a_plan("cyclic_dp", 1, stages), costs_of((5,) * stages, (activations,) * stages)
    every, none = (each * CHUNK,) * stages, (0,) * stages
    at_once = replace(plan, tiers=Tiers(moved=every, kept=none, ahead=0))
    least = peak(at_once, costs)
    limit = least + share * sum(every)
    kept = most_that_stays(plan, [each] * stages, CHUNK, rooms_beside(at_once, costs, limit))
    without = replace(plan, tiers=Tiers(moved=none, kept=none, ahead=0))
    (row,), (program,) = memory_by_place(without, costs), programs_of(without)
    trace = []
    for n, a in enumerate(program):
        if a.t == plan.num_steps // 2:
            is_update = a.kind is Kind.UPDATE
            needed = {(a.j, k) for k in range(each)} if is_update else set()
            besides = max(row[n].total, 0.0 if is_update else row[n + 1].total)
            trace.append((needed, int((limit - besides) // CHUNK)))
    # each step of a program is like the last, so what moves in it is a whole number of chunks
    assert stages * each - sum(kept) == math.ceil(loads_by_belady(trace) - 1e-9)


@pytest.mark.parametrize("preset", ["cyclic_dp", "lockstep_dp"])
def test_of_stages_that_are_updated_early_one_has_a_gradient_at_a_time(preset):
    sizes, chunks = (4, 7, 5), (1, 2, 1)
    plan, costs = a_plan(preset, 1, 3), costs_of(sizes, (1, 1, 1))
    least = sum(sizes) + max(1 + 7 + 2 * CHUNK, 2 + 5 + CHUNK, 4 + CHUNK)
    found = in_tiers(plan, costs, Chunks(chunks, CHUNK), least, early=True)
    assert peak(found, costs) == least
    assert "replayed" in str(proof_of(found))
    for limit, early in ((least - 1, True), (least, False)):
        with pytest.raises(PlanError):
            in_tiers(plan, costs, Chunks(chunks, CHUNK), limit, early=early)


@pytest.mark.parametrize(("activation", "ahead"), [(30, 5), (0, 1)])
def test_state_of_pipelines_comes_as_far_ahead_as_what_activations_leave(activation, ahead):
    plan, costs = a_plan("1f1b", 1, 5), costs_of((4,) * 5, (activation,) * 5)
    none, every, chunks = (0,) * 5, (CHUNK,) * 5, (1,) * 5
    least = peak(replace(plan, tiers=Tiers(moved=every, kept=none, ahead=1)), costs)
    found = in_tiers(plan, costs, Chunks(chunks, CHUNK), least)
    assert found.tiers.ahead == ahead
    assert peak(found, costs) <= least
    kept = sum(found.tiers.kept) // CHUNK
    assert kept == best_by_brute_force(plan, costs, chunks, least) < sum(chunks)


def test_nothing_moves_where_all_fits():
    plan, costs = a_plan("cyclic_dp", 1, 3), costs_of((4, 4, 4), (1, 1, 1))
    found = in_tiers(plan, costs, Chunks((1, 2, 1), CHUNK), 10_000)
    assert found.tiers.moved == (0, 0, 0)
    assert found.tiers.kept == (10, 20, 10)


def test_norms_of_all_stages_are_refused():
    plan = make_plan("lockstep_dp", num_stages=2, num_workers=2, norms="owners")
    with pytest.raises(PlanError, match="norms='owners'.*use that"):
        in_tiers(plan, costs_of((4, 4), (1, 1)), Chunks((1, 1), CHUNK), 1000)


def test_a_limit_that_no_plan_meets_is_refused_with_the_nearest():
    plan, costs = a_plan("cyclic_dp", 1, 3), costs_of((4, 4, 4), (1, 1, 1))
    with pytest.raises(PlanError, match=r"a limit of 20 bytes.*needs (\d+) at once") as raised:
        in_tiers(plan, costs, Chunks((1, 1, 1), CHUNK), 20)
    least = int(str(raised.value).partition("needs ")[2].split()[0])
    found = in_tiers(plan, costs, Chunks((1, 1, 1), CHUNK), least)
    assert peak(found, costs) == least
    with pytest.raises(PlanError):
        in_tiers(plan, costs, Chunks((1, 1, 1), CHUNK), least - 1)


def test_what_a_worker_has_besides_takes_room():
    plan, costs = a_plan("cyclic_dp", 1, 3), costs_of((4, 4, 4), (1, 1, 1))
    with_less = in_tiers(plan, costs, Chunks((1, 1, 1), CHUNK), 40)
    assert in_tiers(plan, costs, Chunks((1, 1, 1), CHUNK), 55, besides=15) == with_less
    assert in_tiers(plan, costs, Chunks((1, 1, 1), CHUNK), 55) != with_less
    with pytest.raises(PlanError, match="needs 55 at once"):
        in_tiers(plan, costs, Chunks((1, 1, 1), CHUNK), 54, besides=21)


# ---------------------------------------------------------------------- weights


def moved_per_step(plan):
    """Return the bytes that a steady step copies, both ways."""
    (program,) = programs_of(plan)
    each = {Payload.O: plan.tiers.moved, Payload.P: plan.tiers.weights}
    moves = (a for a in program if a.kind in (Kind.FETCH, Kind.EVICT))
    return sum(each[a.payload][a.j] for a in moves if a.t == plan.num_steps // 2)


def every_choice(plan, state, weights, early):
    """Yield a plan for each choice of chunks that stay."""
    for kept in product(*(range(n + 1) for n in (*state, *weights))):
        of_state, of_weights = kept[: len(state)], kept[len(state) :]
        tiers = Tiers(
            moved=Chunks(state, CHUNK).rest(of_state), kept=Chunks(state, CHUNK).of(of_state),
            weights=Chunks(weights, CHUNK).rest(of_weights), ahead=0, early=early,
        )  # fmt: skip
        yield replace(plan, tiers=tiers)


@pytest.mark.parametrize(
    ("state", "weights", "activations", "early"),
    [
        ((2, 2, 2), (1, 1, 1), (0, 0, 0), True),
        ((2, 1), (1, 2), (15, 3), True),
        ((1, 2, 1), (2, 1, 1), (3, 3, 3), False),
        ((2, 2), (2, 1), (8, 8), False),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8])
def test_no_more_bytes_move_than_by_the_best_of_all_choices(
    state, weights, activations, early, share
):
    plan = a_plan("lockstep_dp", 1, len(state))
    costs = costs_of(Chunks(weights, CHUNK).of(weights), activations)
    rows = [(peak(x, costs), moved_per_step(x)) for x in every_choice(plan, state, weights, early)]
    low, high = min(rows)[0], max(rows)[0]
    limit = low + share * (high - low)
    found = in_tiers(
        plan, costs, Chunks(state, CHUNK), limit, weights=Chunks(weights, CHUNK), early=early
    )
    assert peak(found, costs) <= limit
    assert "replayed" in str(proof_of(found))
    if found.tiers.ahead == 0:  # else copies that overlap come first
        assert moved_per_step(found) == min(moved for most, moved in rows if most <= limit)


def test_weights_stay_as_long_as_state_can_go():
    plan, costs = a_plan("lockstep_dp", 1, 3), costs_of((10, 10, 10), (1, 1, 1))
    state = weights = Chunks((1, 1, 1), CHUNK)
    least = [
        int(re.search(r"(\d+) or more", str(refused(plan, costs, state, given)))[1])
        for given in (None, weights)
    ]
    assert least[1] < least[0]
    with_all = in_tiers(plan, costs, state, least[0], weights=weights, early=True)
    assert not any(with_all.tiers.weights)
    with_some = in_tiers(plan, costs, state, least[0] - 1, weights=weights, early=True)
    assert any(with_some.tiers.weights)
    assert (
        peak(in_tiers(plan, costs, state, least[1], weights=weights, early=True), costs)
        <= (least[1])
    )


def refused(plan, costs, state, weights):
    with pytest.raises(PlanError, match="or more") as raised:
        in_tiers(plan, costs, state, 1, weights=weights, early=True)
    return raised.value


def test_of_a_chunk_that_is_not_full_what_lies_in_it_leaves():
    plan, costs = a_plan("lockstep_dp", 1, 4), costs_of((6,) * 4, (1,) * 4)
    state, weights = Chunks((0,) * 4, CHUNK), Chunks((1,) * 4, CHUNK, [[6]] * 4)
    least = 3 + CHUNK + 6  # activations that are left, one chunk, and one gradient
    found = in_tiers(plan, costs, state, least, weights=weights, early=True)
    assert (found.tiers.weights, found.tiers.away) == ((CHUNK,) * 4, (6,) * 4)
    assert peak(found, costs) == least
    with pytest.raises(PlanError, match=f"{least} or more"):
        in_tiers(plan, costs, state, least - 1, weights=weights, early=True)
