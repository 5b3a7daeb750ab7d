"""Write the matrix as a page of the documentation: python -m tests.conformance.table

What stands there is what the tests of the matrix show, cell by cell.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.conformance.cases import CASES
from tests.conformance.harness import DELAYED, PRESETS, Case

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
_HEAD = """# What was tried

Modules and Trainer configurations, each under ten presets on two processes. All of it runs with
`pytest tests/conformance -m exhaustive`, a part of it in every run of the tests; this page is
made from it, by `python -m tests.conformance.table`.

- **equal**: weights, metrics of validation and what hooks have seen are those of Lightning's plain
  Trainer on one device that accumulates the same micro-batches, bit by bit.
- **close**: the preset reads old weights by its rule, and the run is equal, bit by bit, to a plain
  Trainer into which a callback puts the weights that the rule says.
- **refused**: every rank ends with an error that names the cause, at the latest in the first step
  in which it matters. [Limits and errors](limits.md) explains them.

"""


def page() -> str:
    """Return the whole page."""
    columns = ["", *(f"`{name}`" for name in PRESETS)]
    lines = [_row(columns), _row(["---"] * len(columns))]
    lines += [_row([_title(name, case), *_cells(case)]) for name, case in CASES.items()]
    counts = [cell for case in CASES.values() for cell in _cells(case)]
    total = (
        f"\n{len(CASES)} rows, {len(counts)} cells: {counts.count('equal')} equal, "
        f"{counts.count('close')} close, {counts.count('refused')} refused.\n"
    )
    return _HEAD + "\n".join(lines) + "\n" + total


def _cells(case: Case) -> Iterator[str]:
    for preset in PRESETS:
        alike = "close" if preset in DELAYED else "equal"
        yield "refused" if preset in case.refused else alike


def _title(name: str, case: Case) -> str:
    """Return the name of a row, and what the module says of itself."""
    make = case.make.func if isinstance(case.make, partial) else case.make
    said = (inspect.getdoc(make) or "").split("\n")[0] if inspect.isclass(make) else ""
    return f"**{name}** {said}".strip()


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
