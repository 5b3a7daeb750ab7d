"""Programs and simulated figures of a grid of plans, pinned before the redesign.

They are those of commit f251310. What a redesign adds to programs may differ; what each worker
computes, on which weights and in which order, and which tensors travel, may not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_cyclic.plan import Plan, make_plan, programs_of
from lightning_cyclic.simulate import Costs, Network, account, simulate
from tests.harness.programs import to_text

FOLDER = Path(__file__).parent
REPLICATED = ("cyclic_dp", "cyclic_dp_v1", "lockstep_dp", "cyclic_zero")
NAMED_THEN = {"num_microbatches": "num_micro", "replicas": "width"}
PIPELINES = ("cyclic_pipeline", "gpipe", "1f1b", "pipedream", "pipedream_2bw", "pipeoptim",
             "spectrain")  # fmt: skip


def grid() -> dict[str, dict[str, Any]]:
    """Return name -> the arguments of make_plan."""
    found: dict[str, dict[str, Any]] = {}

    def add(preset: str, stages: int, workers: int, **more: Any) -> None:
        rest = "".join(f"-{NAMED_THEN.get(k, k)}{_written(v)}" for k, v in more.items())
        numbers = {"num_stages": stages, "num_workers": workers}
        found[f"{preset}-s{stages}-n{workers}{rest}"] = {"preset": preset, **numbers, **more}

    for preset in REPLICATED:
        for stages, workers in ((2, 2), (8, 2), (3, 3), (4, 4), (8, 3)):
            add(preset, stages, workers)
        if preset != "cyclic_zero":
            add(preset, 4, 4, relayed=(0, 2))
    add("cyclic_dp", 4, 4, slack=2)
    add("cyclic_dp", 8, 2, slack=100)
    add("cyclic_dp_v1", 4, 4, sharding="optimizer")
    for preset in PIPELINES:
        for stages, workers in ((2, 2), (4, 4), (4, 2)):
            add(preset, stages, workers)
        add(preset, 4, 4, num_microbatches=6, relayed=(1, 3))
        add(preset, 2, 4, replicas=2)
    for preset in ("gpipe", "1f1b", "cyclic_pipeline", "pipedream_2bw", "pipedream"):
        add(preset, 4, 4, num_microbatches=4, tied=((0, 3),))
    for stages, workers in ((2, 3), (3, 6), (4, 3)):
        add("cyclic_mp", stages, workers)
    add("cyclic_mp", 3, 6, relayed=(0, 1, 2))
    add("pipedream_2bw", 3, 3, late_updates=True)
    for preset in ("cyclic_dp", "cyclic_dp_v1", "1f1b"):
        add(preset, 3, 1, placement="single", num_microbatches=3)
    return found


def _written(value: Any) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    flat = [x for part in parts for x in (part if isinstance(part, tuple) else (part,))]
    return "_".join(map(str, flat))


def figures(plan: Plan) -> list[str]:
    """Return what the simulator says of a plan, each number with all its digits."""
    costs = Costs.even(plan.num_stages, compute_s=1.0, model_bytes=0.3, cut_bytes=0.01)
    network = Network(latency_s=0.002, bandwidth_bytes_per_s=1.0)
    result, counted = (
        simulate(programs_of(plan), costs, network, plan),
        account(programs_of(plan), costs),
    )
    workers = counted.workers
    return [
        repr(result.step_s),
        repr(max(result.bubble)),
        str(max(sum(w.sent_messages.values()) for w in workers)),
        repr(max(sum(w.sent_bytes.values()) for w in workers)),
        str(max(w.versions for w in workers)),
        repr(max(w.param_bytes for w in workers)),
        str(max(w.activations for w in workers)),
        str(counted.activations),
    ]


COLUMNS = ["plan", "step_s", "bubble", "sent_messages", "sent_bytes", "versions", "param_bytes",
           "activations", "all_activations"]  # fmt: skip


def program_of(name: str) -> str:
    """Return the program of a plan of the grid as CSV."""
    return to_text(programs_of(make_plan(**grid()[name], num_steps=3)))


def figures_of(name: str) -> list[str]:
    """Return the figures of a plan of the grid, over ten steps."""
    return figures(make_plan(**grid()[name], num_steps=10))
