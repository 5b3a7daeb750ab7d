import pytest

from lightning_cyclic.planner import Problem, Stages
from lightning_cyclic.planner.table import reference, table
from lightning_cyclic.simulate import Network, best_lockstep

from .test_search import profile

NETWORK = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e9)


def problem(**changes):
    given = {"profiles": (profile(),), "num_workers": 4, "memory_bytes": 1e9, "network": NETWORK}
    return Problem(**given | changes)


def test_it_is_the_best_lockstep_of_the_whole_model_on_each_worker():
    asked = problem(batch_size=4 * profile().micro_size)
    found = reference(asked)
    costs = Stages.of(profile(), range(asked.num_units), together=True).costs()
    assert found is not None
    assert found.step == best_lockstep(costs, NETWORK, 4)
    assert found.samples_per_s == asked.samples / found.step.step_s
    params = sum(costs.param_bytes)
    kept = 5 * params + sum(costs.activation_bytes) + costs.cut_bytes[0]  # with Adam, and buckets
    assert found.memory_bytes == kept


@pytest.mark.parametrize(
    "changes", [{"memory_bytes": 1000}, {"batch_size": 6}, {"batch_size": 2}, {"sparsity": 0.5}]
)
def test_where_there_is_none(changes):
    assert reference(problem(**changes)) is None


def test_it_stands_below_the_table():
    from lightning_cyclic.planner import search

    text = table(search(problem(presets=("cyclic_dp",))))
    assert 'strategy="ddp" (' in text
