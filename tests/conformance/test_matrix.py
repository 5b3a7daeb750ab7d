"""Every cell of the matrix; a part of it by default, all of it with -m exhaustive."""

from __future__ import annotations

import pytest

from tests.conformance import table
from tests.conformance.cases import CASES
from tests.conformance.harness import PRESETS, check
from tests.harness.rows import more

pytestmark = pytest.mark.multi


ALIKE = {  # rows of which others show the same by default, here or elsewhere
    # training/test_parity.py trains these networks, test_precision.py in these precisions
    "cls_token", "bert", "llama", "vit", "bf16-mixed", "bf16-true", "64-true",
    # training/test_schedules.py, test_clipping.py and test_flushes.py have these flags
    "accumulated", "clipped by value", "max_steps", "early stopping",
    # training/test_refusals.py sees these refused
    "skipping", "clipped by the norm of all",
}  # fmt: skip


def by_default(number: int, name: str, preset: int) -> bool:
    """Say whether a cell always runs: each row that is like no other under one preset in turn."""
    return name not in ALIKE and number % len(PRESETS) == preset


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        (name, preset) if by_default(n, name, k) else more(name, preset)
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
    assert CASES.keys() >= ALIKE
    assert len(CASES) >= 80
    assert len(PRESETS) == 9
