import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.dataflow import live_activations, live_versions
from lightning_cyclic.planner import Stages
from lightning_cyclic.simulate import Costs
from lightning_cyclic.simulate.memory import Memory, _looks_ahead, memory

PIPELINES = ("gpipe", "1f1b", "pipedream", "pipedream_2bw", "cyclic_pipeline", "pipeoptim")


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


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(PIPELINES), st.integers(1, 5), st.integers(0, 6), st.booleans())
def test_counts_are_those_of_the_program(preset, num_stages, more, remat):
    plan, workers = counts(preset, num_stages, max(num_stages - 1, 1) + more, remat=remat)
    for j, (worker, program) in enumerate(zip(workers, plan.programs, strict=True)):
        assert worker.parameters + worker.versions == live_versions(program)[j] + _looks_ahead(
            plan, j
        )
        assert worker.activations == (1 if remat else live_activations(program))
        assert worker.inputs == live_activations(program)


def test_rematerialisation_keeps_inputs_and_one_forward():
    plan = make_plan("1f1b", num_stages=3, num_workers=3, num_microbatches=6)
    stages = Stages.alike(3, activation_bytes=100, input_bytes=5)
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
    stages = Stages.alike(2, param_bytes=10)
    first = memory(plan, stages.costs(), state_per_param=6, gradient_per_param=2)[0]
    assert (first.optimizer, first.gradients) == (60, 20)


def test_the_total():
    of_parameters = {"parameters": 1, "versions": 2, "gradients": 4, "optimizer": 8}
    found = Memory(**of_parameters, activations=16, inputs=32, returns=64, in_flight=128)
    assert found.of_parameters == 143
    assert found.total == 255
