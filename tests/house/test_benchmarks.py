"""Every benchmark runs in its smallest form and prints figures; what they say is not judged."""

from __future__ import annotations

import re
import shlex
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
from tests.harness.commands import Command, Commands

ROOT = Path(__file__).parents[2]
LIMIT_S = 400
ONE_MORE = pytest.mark.exhaustive
ON_LINKS = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not Hosts.is_possible(), reason="network namespaces need root on Linux"),
]

pytestmark = [pytest.mark.multi, pytest.mark.timeout(LIMIT_S + 30)]


def smallest(command: str, is_forked: bool = False) -> str:
    """Run a benchmark in its smallest form, by default in a fresh interpreter; return its text."""
    name, *options = shlex.split(command)
    arguments = [sys.executable, "-m", "benchmarks", name, "--smoke", *options]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SHOW_ERRORS": "1"}
    benchmark = Command(
        arguments=arguments, is_forked=is_forked, env=env, folder=ROOT, limit_s=LIMIT_S
    )
    with Commands({name: benchmark}) as commands:
        return commands.output(name)


def figures(text: str, row: str) -> list[float]:
    """Return the numbers of the row that begins with a name."""
    lines = [line.strip() for line in text.splitlines()]
    (found,) = [line.removeprefix(row) for line in lines if re.match(rf"{re.escape(row)}\s", line)]
    return [float(x) for x in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])", found)]


WAYS = [f"{by} {preset}" for by in ("loop", "trainer") for preset in ("1f1b", "gpipe")]
FLOWS = ["1f1b", "cyclic_pipeline", "pipedream_2bw", "cyclic_mp", "pipedream", "pipeoptim"]
SHARDED = ["ddp", "fsdp2", "fsdp2/ahead", "lockstep_dp", "cyclic_dp", "cyclic_zero"]
REPLICATED = ["ddp", "cyclic_dp", "cyclic_dp_v1/optimizer"]
CODED = ["ddp", "ddp+bf16", "ddp+local", "cyclic_dp+dct", "lockstep_dp+int8", "diloco"]
SPARSE = ["bf16-mixed", "bf16-true", "compressed"]


@pytest.mark.parametrize(
    ("command", "rows"),
    [
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
        pytest.param(
            "gpu --device cpu --out {folder}",
            ["at once", "accumulate", "torch 1f1b", "loop zb_h1"], marks=ONE_MORE,
        ),
        pytest.param("sparse_states", SPARSE, marks=ONE_MORE),
        pytest.param("activations", ["never", "always", "offload"], marks=ONE_MORE),
        pytest.param("sparse_states --workers 2 --rate 1gbit", SPARSE, marks=ON_LINKS),
        pytest.param("replicated --case net --only '2 workers, 1gb'", REPLICATED, marks=ON_LINKS),
        pytest.param(
            f"compression --strategies alone {' '.join(CODED)}", CODED, marks=ONE_MORE
        ),
        pytest.param("sharding --case late --only '2 workers'", SHARDED, marks=ON_LINKS),
    ],
)  # fmt: skip
def test_every_contender_has_a_row_of_times_and_ratios(command, rows, tmp_path):
    assert_rows_of_figures(smallest(command.format(folder=tmp_path)), rows)


@pytest.mark.parametrize(
    ("command", "row", "count"),
    [
        ("stage_overhead", "F:", 9),  # median and quartiles of what may be below zero
        ("stage_floor", "F:", 6),
    ],
)
def test_what_is_printed_are_numbers(command, row, count):
    assert len(figures(smallest(command, is_forked=True), row)) == count


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
    ("command", "rows"),
    [
        ("replicated --strategies alone ddp cyclic_dp", ["ddp", "cyclic_dp"]),
        ("sharding", SHARDED),
        ("stagger", ["one step takes"]),
        (f"compression --strategies alone {' '.join(CODED)}", CODED),
    ],
)
def test_replicated_workers_print_a_row_for_each_strategy(command, rows, monkeypatch, capsys):
    name = command.partition(" ")[0]
    # compression starts its workers as replicated does
    for module in (INDEX[name].module, INDEX["replicated"].module):
        monkeypatch.setattr(f"benchmarks.{module}.start", in_ranks, raising=False)
    assert_rows_of_figures(here(command, capsys), rows)


def test_teams_that_train_a_pipeline_print_a_row_for_each_contender(monkeypatch, capsys):
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):  # which are set for a server of its own
        monkeypatch.setenv(name, "")
    assert_rows_of_figures(here("pipeline --loop", capsys), ["torch 1f1b", "loop gpipe"])


def here(command, capsys):
    """Run a benchmark in its smallest form, by this process; return its text."""
    name, *options = shlex.split(command)
    main([name, "--smoke", *options])
    return capsys.readouterr().out


def assert_rows_of_figures(text, rows):
    for row in rows:
        found = figures(text, row)
        assert min(found) >= 0
        assert max(found) > 0


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
