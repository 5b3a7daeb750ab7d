"""What plans compute, and what the simulator says of them, is what it was at f251310."""

from __future__ import annotations

import csv

import pytest

from tests import golden_plans
from tests.golden_plans import FOLDER, grid


@pytest.mark.parametrize("name", list(grid()))
def test_program(name: str) -> None:
    assert golden_plans.program_of(name) == (FOLDER / "programs" / f"{name}.csv").read_text()


def test_figures() -> None:
    with (FOLDER / "figures.csv").open(newline="") as file:
        _, *expected = csv.reader(file)
    assert [row[0] for row in expected] == list(grid())
    for name, *numbers in expected:
        assert golden_plans.figures_of(name) == numbers, name
