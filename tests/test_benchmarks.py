"""Every benchmark runs in its smallest form and prints figures; what they say is not judged."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest

from benchmarks.__main__ import INDEX, index, main
from benchmarks.data_parallel.hosts import Hosts
from benchmarks.data_parallel.sharded_lockstep import step_s
from benchmarks.rounds import results_in
from lightning_cyclic.simulate import Costs, Network
from tests.harness import processes
from tests.harness.commands import NOT_INHERITED

ROOT = Path(__file__).parents[1]
LIMIT_S = 400
ONE_MORE = pytest.mark.exhaustive
ON_LINKS = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not Hosts.is_possible(), reason="network namespaces need root on Linux"),
]

pytestmark = [pytest.mark.multi, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]


def smallest(command: str) -> str:
    """Run a benchmark in its smallest form in a fresh interpreter; return what it printed."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SHOW_ERRORS": "1"}
    name, *options = shlex.split(command)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--smoke", *options], env=env, cwd=ROOT,
        timeout=LIMIT_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def figures(text: str, row: str) -> list[float]:
    """Return the numbers of the row that begins with a name."""
    lines = [line.strip() for line in text.splitlines()]
    (found,) = [line.removeprefix(row) for line in lines if re.match(rf"{re.escape(row)}\s", line)]
    return [float(x) for x in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])", found)]


WAYS = [f"{by} {preset}" for by in ("loop", "trainer") for preset in ("1f1b", "gpipe")]
FLOWS = ["1f1b", "cyclic_pipeline", "pipedream_2bw", "cyclic_mp", "pipedream", "pipeoptim"]
SHARDED = ["ddp", "fsdp2", "fsdp2/ahead", "lockstep_dp", "cyclic_dp", "cyclic_zero"]
REPLICATED = ["ddp", "cyclic_dp", "cyclic_dp_v1/optimizer"]
SPARSE = ["bf16-mixed", "bf16-true", "compressed"]


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        ("pipeline --loop", ["torch 1f1b", "torch gpipe", *WAYS[:2]]),
        pytest.param("pipeline", ["torch 1f1b", "torch gpipe", *WAYS], marks=ONE_MORE),
        pytest.param("replicated", REPLICATED, marks=ONE_MORE),
        pytest.param("pipeline --only a", ["loop plain", *WAYS], marks=ONE_MORE),
        pytest.param("pipeline --only d2 --micro 2", [*FLOWS, "spectrain"], marks=ONE_MORE),
        pytest.param(
            "sharding --case memory --only '2 workers' --width 128 --num-steps 16",
            ["fsdp2", "cyclic_zero"], marks=ONE_MORE,
        ),
        pytest.param("first_step", ["| mlp | 2 |"], marks=ONE_MORE),
        pytest.param(f"commits {ROOT}", ["ddp", "cyclic_dp", "cyclic_dp_v1"], marks=ONE_MORE),
        pytest.param(
            f"commits {ROOT} --case pipeline --only b2", ["torch 1f1b", "loop 1f1b"],
            marks=ONE_MORE,
        ),
        pytest.param("gpu --device cpu", ["at once", "accumulate", "cyclic_dp"], marks=ONE_MORE),
        pytest.param("sparse_states", SPARSE, marks=ONE_MORE),
        pytest.param("sparse_states --workers 2 --rate 1gbit", SPARSE, marks=ON_LINKS),
        pytest.param("replicated --case net --only '2 workers, 1gb'", REPLICATED, marks=ON_LINKS),
        pytest.param("sharding --case late --only '2 workers'", SHARDED, marks=ON_LINKS),
    ],
)  # fmt: skip
def test_every_contender_has_a_row_of_times_and_ratios(command, rows):
    text = smallest(command)
    for row in rows:
        found = figures(text, row)
        assert found
        assert min(found) >= 0
        assert max(found) > 0


@pytest.mark.parametrize(
    ("command", "row", "count"),
    [
        ("stage_overhead", "F:", 9),  # median and quartiles of what may be below zero
        ("stage_floor", "F:", 6),
    ],
)
def test_what_is_printed_are_numbers(command, row, count):
    assert len(figures(smallest(command), row)) == count


def in_ranks(name, payload, num_workers, network=None):
    """Do what `rounds.start` does, by processes that have imported everything."""
    return [x for each in processes.run(rank, num_workers, name, payload) for x in each]


def rank(name, payload):
    """Be a worker of a benchmark; return what it printed by `rounds.result`."""
    warnings.simplefilter("ignore")
    with redirect_stdout(StringIO()) as printed:
        import_module(f"benchmarks.{INDEX[name].module}").work(*payload)
    return results_in(printed.getvalue())


@pytest.mark.parametrize(
    ("name", "rows"),
    [("replicated", REPLICATED), ("sharding", SHARDED), ("stagger", ["one step takes"])],
)
def test_replicated_workers_print_a_row_for_each_strategy(name, rows, monkeypatch, capsys):
    monkeypatch.setattr(f"benchmarks.{INDEX[name].module}.start", in_ranks)
    main([name, "--smoke"])
    text = capsys.readouterr().out
    for row in rows:
        assert min(figures(text, row)) >= 0
        assert max(figures(text, row)) > 0


@ONE_MORE
def test_the_table_of_convergence_has_the_rule_that_was_asked_for(tmp_path):
    text = smallest(f"convergence --out {tmp_path}")
    assert re.search(r"1f1b.*\d\.\d+", text)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=ON_LINKS) for x in ("hosts", "late_links")]
)
def test_links_come_up_and_go(name):
    assert smallest(name).count("ip netns exec") == 2


def test_the_index_has_every_benchmark():
    folder = ROOT / "benchmarks"
    there = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.glob("*/*.py")
        if "def run(args" in path.read_text()
    }
    assert there == {entry.module for entry in INDEX.values()}
    lines = "\n".join(index())
    assert all(re.search(rf"^  {name} .*\S", lines, flags=re.M) for name in INDEX)


def test_an_unknown_name_is_refused_with_those_that_are_allowed():
    assert "no benchmark pipelines; allowed: replicated, sharding" in str(main(["pipelines"]))


def test_a_lockstep_step_waits_for_its_collectives_unless_they_run_ahead():
    costs, network = Costs.even(2, compute_s=6.0), Network(latency_s=0.5)
    in_the_way, ahead, doubled = (
        step_s(costs, network, 4, algorithm=algorithm, overlaps=overlaps)
        for algorithm, overlaps in (("ring", False), ("ring", True), ("doubling", False))
    )
    assert in_the_way == 6.0 + 6 * 3 * 0.5
    assert doubled == 6.0 + 6 * 2 * 0.5
    # 1.5 gather, 1 F0, 0.5 waited for, 1 F1, 0.5 waited for, 2 B1, 2 B0, 1.5 reduction
    assert ahead == 10.0
