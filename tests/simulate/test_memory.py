"""Where in a program workers that run whole micro-batches have what."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import PRESETS, make_plan, programs_of
from lightning_cyclic.plan.actions import COMPUTE, MAKE_GRADIENTS, Kind, Payload
from lightning_cyclic.plan.dataflow import live_activations, live_versions
from lightning_cyclic.planner import Stages
from lightning_cyclic.simulate import Costs
from lightning_cyclic.simulate.memory import (
    KINDS,
    Span,
    copies,
    memory,
    memory_by_slot,
    most_at_once,
    spans,
    steps_to_count,
)
from tests.harness.programs import shaped

PIPELINES = (
    "gpipe", "1f1b", "zb_h1", "pipedream", "pipedream_2bw", "cyclic_pipeline", "pipeoptim",
)  # fmt: skip
SUMS = (Payload.S, Payload.T)
ONES = Stages.alike(8).costs()


def _looks_ahead(plan, j):
    cells = range(plan.num_microbatches)
    return any(plan.horizon(plan.late_step, i, j) for i in cells)


def counts(preset, num_stages, num_microbatches, *, remat=False, replicas=1):
    """Count copies: every kind of byte is one."""
    plan = make_plan(
        preset,
        num_stages=num_stages,
        num_workers=num_stages * replicas,
        num_microbatches=num_microbatches,
        num_steps=4 + 2 * num_stages * replicas // num_microbatches,
        replicas=replicas,
    )
    return plan, memory(plan, Stages.alike(num_stages).costs(), remat=remat)


@pytest.mark.parametrize(
    ("preset", "num_microbatches", "weights", "activations"),
    [  # the table of what each system keeps, section 0 of the notes; here it is counted
        ("gpipe", 8, [1, 1, 1, 1], [8, 8, 8, 8]),
        ("1f1b", 8, [1, 1, 1, 1], [4, 3, 2, 1]),
        ("1f1b", 2, [1, 1, 1, 1], [2, 2, 2, 1]),
        ("pipedream", 1, [4, 3, 2, 1], [4, 3, 2, 1]),
        ("pipedream_2bw", 4, [2, 2, 2, 2], [4, 3, 2, 1]),
        ("cyclic_pipeline", 4, [2, 2, 2, 1], [4, 3, 2, 1]),
        ("pipeoptim", 1, [2, 2, 2, 1], [4, 3, 2, 1]),  # the current, and the predicted
    ],
)
def test_what_stages_of_a_pipeline_keep(preset, num_microbatches, weights, activations):
    _, workers = counts(preset, 4, num_microbatches)
    assert [w.parameters + w.versions for w in workers] == weights
    assert [worker.activations for worker in workers] == activations
    assert [worker.inputs for worker in workers] == activations
    assert [worker.returns for worker in workers] == [1, 1, 1, 0]
    assert {worker.gradients for worker in workers} == {1}
    assert {worker.optimizer for worker in workers} == {2}


def sums(program):
    """Count on a program with its messages the buffers of gradients, own and received."""
    live, most = {}, {}
    for a in program:
        each = live.setdefault(a.j, set())
        if a.kind in MAKE_GRADIENTS or (a.kind is Kind.RECV and a.payload in SUMS):
            each.add((a.t, a.kind is not Kind.RECV))
        elif a.kind is Kind.UPDATE or (a.kind is Kind.SEND and a.payload in SUMS):
            each -= {(a.t, True), (a.t, False)}
        most[a.j] = max(most.get(a.j, 0), len(each))
    return sum(most.values())


def returned(program):
    """Say whether gradients of outputs are received."""
    return any(a.kind is Kind.RECV and a.payload is Payload.G for a in program)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(PIPELINES), st.integers(1, 5), st.integers(0, 6), st.sampled_from([1, 2, 3]),
    st.booleans(),
)  # fmt: skip
def test_counts_are_those_of_the_program(preset, num_stages, more, replicas, remat):
    """What cells and updates tell is what programs with all messages have."""
    each = max(num_stages - 1, 1) + more
    plan, workers = counts(preset, num_stages, each * replicas, remat=remat, replicas=replicas)
    for w, (worker, program) in enumerate(zip(workers, programs_of(plan), strict=True)):
        (j,) = {a.j for a in program if a.kind is Kind.F}
        (most,) = live_versions(program).values()
        assert worker.parameters + worker.versions == most + _looks_ahead(plan, j)
        if not (remat and plan.axes.schedule.splits):  # what I leaves waits for W
            assert worker.activations == (1 if remat else live_activations(program))
        assert worker.inputs == live_activations(program)
        assert worker.gradients == sums(program)
        assert worker.returns == returned(program)
        assert worker.optimizer == 2 * (plan.owner(j) == w)
    most = [
        max(workers[w].total for w in plan.axes.placement.workers_of(j)) for j in range(num_stages)
    ]
    assert [copy.total for copy in copies(plan, remat=remat)] == most


@pytest.mark.parametrize("preset", ["interleaved_1f1b", "zb_v", "dualpipe_v"])
def test_copies_of_a_stage_are_counted_whatever_else_its_worker_has(preset):
    plan = make_plan(preset, num_stages=8, num_workers=4, num_microbatches=12)
    found = copies(plan)
    for w, (worker, program) in enumerate(zip(memory(plan, ONES), programs_of(plan), strict=True)):
        own = [j for j in range(8) if plan.worker_of(0, j) == w]
        for j in own:
            assert found[j].activations == live_activations(a for a in program if a.j == j)
        # not all stages are at their most at once
        assert worker.activations <= sum(found[j].activations for j in own)
        assert worker.parameters == sum(found[j].parameters for j in own) == 2


def test_copies_of_many_stages_are_counted_on_the_plan_itself():
    assert [copy.activations for copy in copies_of("1f1b", 64)] == list(range(64, 0, -1))
    assert {copy.activations for copy in copies_of("gpipe", 16)} == {64}


def copies_of(preset, num_stages):
    plan = make_plan(
        preset, num_stages=num_stages, num_workers=num_stages, num_microbatches=64,
        num_steps=steps_to_count(num_stages, 64), proved=False,
    )  # fmt: skip
    return copies(plan)


def test_rematerialisation_keeps_inputs_and_one_forward():
    plan = make_plan("1f1b", num_stages=3, num_workers=3, num_microbatches=6)
    stages = replace(Stages.alike(3), activation_bytes=(100,) * 3, input_bytes=(5,) * 3)
    never, always = (memory(plan, stages.costs(), remat=remat) for remat in (False, True))
    assert [worker.activations for worker in never] == [300, 200, 100]
    assert [worker.activations for worker in always] == [100, 100, 100]
    assert [worker.inputs for worker in always] == [15, 10, 5]


def test_workers_that_run_whole_micro_batches_keep_the_model():
    plan = make_plan("cyclic_dp", num_stages=4, num_workers=4, num_steps=8)
    workers = memory(plan, Stages.alike(4).costs())
    assert {worker.parameters for worker in workers} == {4}
    assert [worker.versions for worker in workers] == [
        6
    ] * 4  # of each of the others', one that has come and one on its way
    # a backward has a gradient in the place of activations, and buffers of sums stay
    assert {worker.activations + worker.gradients for worker in workers} == {4}
    assert [worker.in_flight for worker in workers] == [5, 6, 6, 4]
    assert {worker.optimizer for worker in workers} == {2}  # each owns one stage
    assert {worker.inputs for worker in workers} == {1}  # the batch


def test_one_owner_keeps_all_optimizer_state():
    plan = make_plan("cyclic_dp_v1", num_stages=4, num_workers=4, num_steps=8)
    assert [worker.optimizer for worker in memory(plan, Stages.alike(4).costs())] == [0, 0, 0, 8]


def test_full_sharding_keeps_parts():
    plan = make_plan("cyclic_zero", num_stages=8, num_workers=8, num_steps=8)
    for worker in memory(plan, Stages.alike(8).costs(), state_per_param=2):
        assert worker.parameters <= 3  # own, in use, on its way
        assert worker.versions <= 1  # others are behind
        assert worker.optimizer == 2
        assert worker.gradients <= 1
        assert worker.in_flight <= 3


@pytest.mark.parametrize(("norms", "most"), [("none", [27, 27]), ("owners", [27, 32])])
def test_an_owner_has_an_older_version_or_a_sum_of_each_stage(norms, most):
    """With two workers ZeRO's parameters, gradients and state, and three stages in use.

    Where all stages are clipped together, all gradients are there when all copies are made.
    """
    plan = make_plan("cyclic_zero", num_stages=16, num_workers=2, num_steps=8, norms=norms)
    workers = memory(plan, Costs.even(16, model_bytes=16), state_per_param=1)
    assert [worker.total for worker in workers] == most


def test_replicas_of_a_pipeline_sum_their_gradients():
    _, workers = counts("1f1b", 2, 4, replicas=2)
    assert sum(worker.optimizer > 0 for worker in workers) == 2  # one owner per stage
    assert {(worker.parameters, worker.versions) for worker in workers} == {(1, 0)}


def test_what_the_optimizer_and_the_gradient_take_is_asked():
    plan = make_plan("1f1b", num_stages=2, num_workers=2)
    stages = replace(Stages.alike(2), param_bytes=(10,) * 2)
    first = memory(plan, stages.costs(), state_per_param=6, gradient_per_param=2)[0]
    assert (first.optimizer, first.gradients) == (60, 20)


GRADIENTS = (Payload.S, Payload.T, Payload.H)
WHOLE_MICRO = ("cyclic_dp", "cyclic_dp_v1", "lockstep_dp", "cyclic_zero")


@pytest.mark.parametrize("preset", WHOLE_MICRO)
@pytest.mark.parametrize(("n", "num_stages"), [(2, 2), (3, 5), (4, 8)])
def test_every_gradient_and_every_sum_has_one_place(preset, n, num_stages):
    plan = make_plan(preset, num_stages=num_stages, num_workers=n, num_steps=6)
    for program, found in zip(programs_of(plan), spans(plan), strict=True):
        backwards = [(m, a.j) for m, a in enumerate(program) if a.kind is Kind.B]
        own = [(x.begin, x.j) for x in found if x.kind == "gradients"]
        assert sorted(own) == backwards
        left = sum(a.kind is Kind.SEND and a.payload in GRADIENTS for a in program)
        used = sum(a.kind is Kind.UPDATE for a in program)
        came = [a.i for a in program if a.kind is Kind.RECV and a.payload is Payload.H]
        added = len(came) - came.count(0)  # the first becomes the sum
        assert sum(x.kind == "sums" for x in found) == left + used + added
        assert all(0 <= x.begin < x.end for x in found)


@pytest.mark.parametrize(
    ("preset", "payload", "w"), [("cyclic_zero", Payload.H, 0), ("lockstep_dp", Payload.S, 0)]
)
def test_what_is_sent_waits_until_its_receiver_waits_for_it(preset, payload, w):
    plan = make_plan(preset, num_stages=2, num_workers=2, num_steps=6)
    program, found = programs_of(plan)[w], spans(plan)[w]

    def is_it(a, kind):
        return a.kind is kind and a.payload is payload and a.t == 2

    n, sent = next((n, a) for n, a in enumerate(program) if is_it(a, Kind.SEND))
    (taken,) = (a.s for a in programs_of(plan)[1 - w] if is_it(a, Kind.RECV) and a.j == sent.j)
    (span,) = (x for x in found if x.kind == "sums" and x.end == _end(program, max(taken, sent.s)))
    assert span.begin <= n < span.end


def _end(program, slot):
    """Return the first place behind a slot."""
    return next(n for n, a in enumerate(program) if a.s > slot)


def test_stages_of_others_are_there_from_their_receive_to_their_free():
    plan = make_plan("cyclic_zero", num_stages=4, num_workers=2, num_steps=6)
    for program, found in zip(programs_of(plan), spans(plan), strict=True):
        fetched = [x for x in found if x.kind == "fetched"]
        frees = [n for n, a in enumerate(program) if a.kind is Kind.FREE]
        assert [x.end for x in fetched] == frees
        for x in fetched:
            assert (program[x.begin].kind, program[x.begin].payload) == (Kind.RECV, Payload.P)
            assert {program[x.begin].j, program[x.end].j} == {x.j}


def test_what_is_there_at_once_is_counted():
    found = Span("sums", 0, 0, 2), Span("sums", 0, 1, 3), Span("sums", 1, 1, 2)
    assert most_at_once((*found, Span("gradients", 0, 0, 9)), "sums") == {0: 2, 1: 1}


# ---------------------------------------------------------------------- over time


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_most_of_all_slots_is_what_is_counted(preset, remat):
    plan = make_plan(preset, **shaped(preset, 4, 4), num_steps=6)
    costs = Costs.even(plan.num_stages, model_bytes=40, activation_bytes=200, cut_bytes=3)
    counted = memory(plan, costs, remat=remat)
    for m, row in zip(counted, memory_by_slot(plan, costs, remat=remat), strict=True):
        if plan.axes.placement.runs_whole_micro:  # what is there at one moment
            assert m == max(row, key=lambda x: x.total)
        else:  # the most of each kind, whenever that is
            assert m.total >= max(x.total for x in row)
            most = {kind: max(getattr(x, kind) for x in row) for kind in KINDS}
            assert most == pytest.approx({kind: getattr(m, kind) for kind in KINDS})


@pytest.mark.parametrize("preset", ["1f1b", "zb_h1", "cyclic_dp", "interleaved_1f1b"])
def test_activations_are_there_from_the_slot_of_a_forward_to_that_of_its_backward(preset):
    plan = make_plan(preset, **shaped(preset, 4, 4), num_steps=2)
    rows = memory_by_slot(plan, Stages.alike(plan.num_stages).costs())
    for w, row in enumerate(rows):
        mine = [(s, a) for s, worker, a in plan.timetable if worker == w]
        ends = {(a.t, a.i, a.j): s for s, a in mine if a.kind in MAKE_GRADIENTS}
        begins = {(a.t, a.i, a.j): s for s, a in mine if a.kind is Kind.F}
        alive = [sum(b <= s < ends[x] for x, b in begins.items()) for s in range(len(row))]
        assert [m.activations for m in row] == alive
    assert len(rows[0]) == 1 + max(s for s, _, a in plan.timetable if a.kind in COMPUTE)
