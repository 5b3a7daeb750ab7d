"""Rows of parametrized tests: those that always run, and those that need -m exhaustive.

Each mechanism, each preset and each kind of module has a row that always runs; other combinations
of them are more of the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def more(*values: Any) -> Any:
    """Return a row of what others show, too."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def chosen(rows: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Return all rows, each a tuple or one value; those outside `always` are more."""
    return [
        row if row in always else more(*(row if isinstance(row, tuple) else (row,)))
        for row in rows
    ]


def in_turn(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations; always those of each first, each second value and so on.

    An axis that is at its end begins anew, so that each of its values is in one that always runs.

    Args:
        *axes: values; a tuple is those of several parameters.
    """
    longest = max(len(axis) for axis in axes)
    always = {tuple(k % len(axis) for axis in axes) for k in range(longest)}
    rows = []
    for places in product(*(range(len(axis)) for axis in axes)):
        values = (axis[k] for axis, k in zip(axes, places, strict=True))
        row = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
        rows.append(tuple(row) if places in always else more(*row))
    return rows
