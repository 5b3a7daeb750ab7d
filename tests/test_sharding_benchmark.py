"""benchmarks/sharding.py runs: what it measures is for its readers, and is not looked at here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def printed(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "sharding.py", *arguments],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    return done.stdout


@pytest.mark.multi
def test_a_case_prints_a_row_for_each_strategy() -> None:
    names = ("ddp", "fsdp2", "fsdp2/ahead", "cyclic_zero")
    text = printed(
        "--only", "2 workers, 200", "--rounds", "1", "--num-steps", "10", "--width", "16",
        "--step-s", "0.01", "--strategies", "alone", *names,
    )  # fmt: skip
    rows = [line.split()[0] for line in text.splitlines() if "of ddp's time" in line]
    assert rows == list(names)


def test_the_table_says_what_is_not_simulated() -> None:
    small, large = printed("--table", "--workers", "2", "512").splitlines()[1::4]
    assert "cyclic_zero 0.5" in small
    assert "not simulated" in large


def test_a_lockstep_step_waits_for_its_collectives_unless_they_run_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from sharded_lockstep import step_s

    from lightning_cyclic.simulate import Costs, Network

    costs, network = Costs.even(2, compute_s=6.0), Network(latency_s=0.5)
    in_the_way, ahead, doubled = (
        step_s(costs, network, 4, algorithm=algorithm, overlaps=overlaps)
        for algorithm, overlaps in (("ring", False), ("ring", True), ("doubling", False))
    )
    assert in_the_way == 6.0 + 6 * 3 * 0.5
    assert doubled == 6.0 + 6 * 2 * 0.5
    # 1.5 gather, 1 F0, 0.5 waited for, 1 F1, 0.5 waited for, 2 B1, 2 B0, 1.5 reduction
    assert ahead == 10.0
