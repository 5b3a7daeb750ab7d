"""Programs are what they were when they were pinned, action by action (tests/golden)."""

from __future__ import annotations

import pytest

from tests.golden.actions import digest, grid, made, pinned
from tests.harness.rows import more

PARTS = 40


@pytest.mark.parametrize("part", [0, *map(more, range(1, PARTS))])
def test_no_action_of_any_program_has_changed(part: int) -> None:
    expected, found = pinned(), {}
    names = [name for n, (name, _) in enumerate(grid()) if n % PARTS == part]
    for name, given in grid():
        if name in names and (plan := made(given)) is not None:
            found[name] = digest(plan)
    assert len(found) > 10
    assert found == {name: expected[name] for name in names if name in expected}
