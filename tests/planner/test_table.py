import json
from dataclasses import replace

import pytest

from lightning_cyclic.planner import Problem, Stages, search
from lightning_cyclic.planner.table import as_data, reference, table, written
from lightning_cyclic.simulate import Network, best_lockstep

from .test_search import SEARCH, profile

PRINTED = """\
net: 16 samples per update, 3 workers of 1 GB, 0 s latency, 1 GB/s

    preset           w x S   micro  remat      step  samples/s   memory  bubble    stale
 ────────────────────────────────────────────────────────────────────────────────────────
 1  cyclic_pipeline  1 x 3  8 of 2           240 ms      66.67  22.2 MB   50.0%  0.12, 1
 2  cyclic_pipeline  1 x 3  4 of 4           240 ms      66.67  34.4 MB   50.0%  0.25, 1
 3  1f1b             1 x 3  8 of 2         250.2 ms      63.95  20.2 MB   52.0%        0
 4  1f1b             1 x 3  4 of 4         260.4 ms      61.44  32.4 MB   53.9%        0

w: replicas, S: stages; micro: micro-batches per update, of so many samples
stale: updates that forwards are behind, mean and most

1: PipelineStrategy("cyclic_pipeline", stages=["h.2", "h.3"], num_microbatches=8)
   its fullest worker keeps 2 MB of parameters, 2 MB of versions, 2 MB of gradients, 4 MB of
   optimizer, 12 MB of activations, 150 kB of inputs, 50 kB of returns; on GPUs a worker is in 4
   NCCL communicators at most
"""


def ranking(**changes):
    return search(
        Problem(
            **{
                "profiles": (profile(), profile().scaled(2)),
                "num_workers": 3,
                "batch_size": 16,  # of micro-batches that three replicas cannot share
                "memory_bytes": 1e9,
                "network": Network(bandwidth_bytes_per_s=1e9),
                "presets": ("cyclic_pipeline", "1f1b"),
                "checkpointing": ("never",),
            }
            | changes
        )
    )


def test_the_table():
    assert table(ranking()) + "\n" == PRINTED


def test_colours():
    assert "\033[" in table(ranking(), colour=True)
    assert "\033[" not in table(ranking())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"presets": ("1f1b",), "num_workers": 1, "batch_size": 4},
            'PipelineStrategy("1f1b", stages=1, num_microbatches=1)',
        ),
        (
            {
                "presets": ("1f1b",),
                "checkpointing": ("always",),
                "num_workers": 4,
                "batch_size": 16,
            },
            'PipelineStrategy("1f1b", stages=["h.2"], num_microbatches=2, replicas=2, '
            'activation_checkpointing="always")',
        ),
        (
            {"presets": ("cyclic_dp",), "slack": 3, "num_workers": 4},
            'CyclicStrategy("cyclic_dp", stages=["h.1", "h.2", "h.3"], slack=3, group_size=1)',
        ),
    ],
)
def test_the_strategy_to_write(changes, text):
    found = ranking(**changes)
    lines = [written(plan, found.problem) for plan in found.plans]
    assert text in lines


def test_predictions_and_bounds_are_marked(monkeypatch):
    monkeypatch.setattr(SEARCH, "_MOST_SIMULATED", 0)
    found = ranking(presets=("pipeoptim", "1f1b"), batch_size=8)
    text = table(found)
    assert "1, 1 p" in text or "0.5, 1 p" in text
    assert "p: and predict the rest" in text
    plans, _, bounds = text.partition("too long to simulate; no step with these stages is faster")
    assert ">=" not in plans
    assert bounds.count(">=") == 2 * len(found.bounds) > 0
    assert [row["is_simulated"] for row in as_data(found)] == [True, *[False] * len(found.bounds)]


def test_numbers_around_a_ring_are_written_and_in_the_json():
    far = Network(latency_s=0.05, bandwidth_bytes_per_s=1e6)
    found = ranking(
        presets=("cyclic_dp",), num_workers=4, network=far, group_sizes=(1, 2),
        host_network=replace(far, hosts=(0, 0, 1, 1), inside=Network()),
    )  # fmt: skip
    candidate = found.plans[0].fit.candidate
    assert candidate.ring.group_size == 2
    assert "group_size=2)" in written(found.plans[0], found.problem)
    (first, *_) = json.loads(json.dumps(as_data(found)))
    assert first["ring"] == candidate.ring._asdict()


def test_json():
    (first, *_) = json.loads(json.dumps(as_data(ranking())))
    assert first["preset"] == "cyclic_pipeline"
    assert first["ring"] is None
    assert len(first["stages"]) == 3
    assert first["staleness"] == {"mean": 0.125, "most": 1}
    assert [set(worker) for worker in first["memory"]] == [
        {
            "parameters",
            "versions",
            "gradients",
            "optimizer",
            "activations",
            "inputs",
            "returns",
            "in_flight",
            "index",
        }
    ] * 3
    assert first["strategy"].startswith("PipelineStrategy(")


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
