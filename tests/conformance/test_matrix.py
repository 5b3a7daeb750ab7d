"""Every cell of the matrix; a part of it by default, all of it with -m exhaustive."""

from __future__ import annotations

import pytest

from tests.conformance import table
from tests.conformance.cases import CASES
from tests.conformance.harness import PRESETS, check
from tests.harness.rows import more

pytestmark = pytest.mark.multi


ALIKE = {  # rows of which others show the same by default, here or elsewhere
    # test_pipeline_parity.py trains these networks, test_precisions.py in these precisions
    "inception", "lstm", "siamese", "cls_token", "frozen", "bert", "llama", "vit", "mixtral",
    "bf16-mixed", "bf16-true", "64-true",
    # test_strategy_features.py and test_pipeline_features.py have these flags and callbacks
    "accumulated", "clipped by value", "max_steps", "early stopping",
    # training/test_refusals.py and test_flow_features.py see these refused
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
