"""What "auto" stages stand for."""

from __future__ import annotations

import pytest

from lightning_cyclic.runtime.whole_step.session import auto_stages

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_workers", "num_bytes", "expected"),
    [
        (2, 0, 2),
        (2, 6 * MIB - 1, 2),  # four stages of a model this small cost more than they overlap
        (2, 6 * MIB, 4),
        (2, 1000 * MIB, 4),
        (3, 9 * MIB, 6),
        (4, 12 * MIB - 1, 4),
        (4, 12 * MIB, 8),
        (8, 1000 * MIB, 8),
        (64, 1000 * MIB, 64),
    ],
)
def test_auto_stages_are_two_a_worker_where_each_is_worth_its_messages(
    num_workers: int, num_bytes: int, expected: int
) -> None:
    assert auto_stages(num_workers, num_bytes) == expected
