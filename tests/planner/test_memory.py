import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.dataflow import live_activations, live_versions
from lightning_cyclic.planner import Memory, Stages, memory
from lightning_cyclic.planner.memory import _looks_ahead

PIPELINES = ("gpipe", "1f1b", "pipedream", "pipedream_2bw", "cyclic_pipeline", "pipeoptim")


def counts(preset, num_stages, num_micro, *, remat=False, width=1):
    """Count copies: every kind of byte is one."""
    plan = make_plan(
        preset,
        num_stages=num_stages,
        num_workers=num_stages * width,
        num_micro=num_micro,
        num_steps=4 + 2 * num_stages * width // num_micro,
        width=width,
    )
    return plan, memory(plan, Stages.alike(num_stages), remat=remat)


@pytest.mark.parametrize(
    ("preset", "num_micro", "weights", "activations"),
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
def test_what_stages_of_a_pipeline_keep(preset, num_micro, weights, activations):
    _, workers = counts(preset, 4, num_micro)
    assert [worker.weights for worker in workers] == weights
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
        assert worker.weights == live_versions(program)[j] + _looks_ahead(plan, j)
        assert worker.activations == (1 if remat else live_activations(program))
        assert worker.inputs == live_activations(program)


def test_rematerialisation_keeps_inputs_and_one_forward():
    plan = make_plan("1f1b", num_stages=3, num_workers=3, num_micro=6)
    stages = Stages.alike(3, activation_bytes=100, input_bytes=5)
    never, always = (memory(plan, stages, remat=remat) for remat in (False, True))
    assert [worker.activations for worker in never] == [300, 200, 100]
    assert [worker.activations for worker in always] == [100, 100, 100]
    assert [worker.inputs for worker in always] == [15, 10, 5]


def test_workers_that_run_whole_micro_batches_keep_the_model():
    plan = make_plan("cyclic_dp", num_stages=4, num_workers=4, num_steps=8)
    workers = memory(plan, Stages.alike(4))
    assert [worker.weights for worker in workers] == [4] * 4
    assert [worker.activations for worker in workers] == [4] * 4
    assert [worker.optimizer for worker in workers] == [2] * 4  # each owns one stage
    # own, and the received sums; worker 0 receives the total of its stage alone
    assert [worker.gradients for worker in workers] == [5, 8, 8, 8]
    assert [worker.inputs for worker in workers] == [1] * 4  # the batch


def test_one_owner_keeps_all_optimizer_state():
    plan = make_plan("cyclic_dp_v1", num_stages=4, num_workers=4, num_steps=8)
    assert [worker.optimizer for worker in memory(plan, Stages.alike(4))] == [0, 0, 0, 8]


def test_full_sharding_keeps_parts():
    plan = make_plan("cyclic_zero", num_stages=8, num_workers=8, num_steps=8)
    for worker in memory(plan, Stages.alike(8)):
        assert worker.weights <= 3  # own, in use, on its way
        assert worker.gradients <= 2


def test_replicas_of_a_pipeline_sum_their_gradients():
    _, workers = counts("1f1b", 2, 4, width=2)
    assert sum(worker.optimizer > 0 for worker in workers) == 2  # one owner per stage
    assert {worker.weights for worker in workers} == {1}


def test_what_the_optimizer_and_the_gradient_take_is_asked():
    plan = make_plan("1f1b", num_stages=2, num_workers=2)
    stages = Stages.alike(2, param_bytes=10)
    first = memory(plan, stages, state_per_param=6, gradient_per_param=2)[0]
    assert (first.optimizer, first.gradients) == (60, 20)


def test_the_total():
    assert (
        Memory(weights=1, gradients=2, optimizer=4, activations=8, inputs=16, returns=32).total
        == 63
    )
