"""benchmarks/sharding.py runs: what it measures is for its readers, and is not looked at here."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import processes

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
STRATEGIES = ("alone", "ddp", "fsdp2", "fsdp2/ahead", "cyclic_zero")


def measured() -> Any:
    """Be one worker of a small case."""
    sys.path.insert(0, BENCHMARKS)
    import sharding

    warnings.simplefilter("ignore")
    case = replace(sharding.LOOPBACK[0], step_s=0.01, width=16, num_steps=10, rounds=1)
    return sharding.in_turn(replace(case, strategies=STRATEGIES), sharding.train)


@pytest.mark.multi
def test_a_case_prints_a_row_for_each_strategy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import sharding

    monkeypatch.setattr(sharding, "start", lambda *_: processes.run(measured, 2)[:1])
    sharding.main(["--only", "2 workers, 200"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[0] for line in lines if "of ddp's time" in line]
    assert rows == list(STRATEGIES[1:])


def test_a_lockstep_step_waits_for_its_collectives_unless_they_run_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
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
