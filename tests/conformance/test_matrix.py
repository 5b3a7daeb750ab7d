"""Every cell of the matrix; a part of it by default, all of it with -m exhaustive."""

from __future__ import annotations

import pytest

from tests.conformance import table
from tests.conformance.cases import CASES
from tests.conformance.harness import PRESETS, check

pytestmark = pytest.mark.multi


def by_default(number: int, preset: int) -> bool:
    """Say whether a cell is one of those that always run: each row under one preset in turn."""
    return number % len(PRESETS) == preset


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        pytest.param(name, preset, marks=[] if by_default(n, k) else [pytest.mark.exhaustive])
        for n, name in enumerate(CASES)
        for k, preset in enumerate(PRESETS)
    ],
)
def test_cell(name: str, preset: str) -> None:
    check(name, preset)


@pytest.mark.skipif("averaged weights" not in CASES, reason="made with a newer Lightning")
def test_the_page_says_what_is_shown_here() -> None:
    assert table.PAGE.read_text() == table.page(), "run python -m tests.conformance.table"


def test_the_matrix_is_large() -> None:
    assert len(CASES) >= 80
    assert len(PRESETS) == 10
