"""Rows of parametrized tests: those that always run, and those that need -m exhaustive.

Each mechanism, each preset and each kind of module has a row that always runs; other combinations
of them are more of the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
    """Return rows of each first, each second value and so on.

    An axis that is at its end begins anew, so that each of its values is in a row.

    Args:
        *axes: values; a tuple is those of several parameters.
    """
    rows = []
    for k in range(max(map(len, axes))):
        values = (axis[k % len(axis)] for axis in axes)
        rows.append([x for v in values for x in (v if isinstance(v, tuple) else (v,))])
    return [tuple(row) for row in rows]


def in_words(x: Any) -> str | None:
    """Return the id of a value of a row: of a mapping what is in it, of a class its name."""
    if isinstance(x, type):
        return x.__name__
    if not isinstance(x, dict):
        return None
    values = (v if isinstance(v, int | float | str) else "..." for v in x.values())
    return ",".join(f"{k}={v}" for k, v in zip(x, values, strict=True)) or "plain"
