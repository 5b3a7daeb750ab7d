"""Run all tests that are marked exhaustive, file by file, and keep the outcome in one table.

    python .ci/exhaustive.py                      # all that the table does not have of this commit
    python .ci/exhaustive.py tests/conformance    # those of some folders or files, anew
    python .ci/exhaustive.py --jobs 3

A file is one process of pytest. What is not run keeps its row, with its commit and date.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "exhaustive.md"
LIMIT_S = 3 * 3600
NOTHING_RAN = 5  # exit code of pytest
HEAD = """# What the exhaustive rows of the tests said last

Written by `python .ci/exhaustive.py`, which runs files side by side.
What has no row has not been run since.

"""


@dataclass(frozen=True)
class Row:
    """Say what became of the exhaustive rows of a file."""

    file: str
    passed: int
    failed: int
    skipped: int
    seconds: int
    commit: str
    date: str


def main() -> int:
    """Run what is asked for; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help="folders or files [all]")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    given = parser.parse_args()
    commit, rows = _commit(), _read()
    chosen = _files(given.paths or ["tests"])
    if not given.paths:
        chosen = [x for x in chosen if x not in rows or rows[x].commit != commit]
    print(f"{len(chosen)} files at {commit}", flush=True)
    failed = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for done in as_completed([pool.submit(_run, file, commit) for file in chosen]):
            row, said = done.result()
            rows[row.file] = row
            failed += row.failed
            _write(rows.values())
            print(" ".join(map(str, astuple(row))), flush=True)
            if row.failed:
                print(said, flush=True)
    return int(failed > 0)


def _files(paths: Iterable[str]) -> list[str]:
    """Return the files that have exhaustive rows, in order."""
    listed = _pytest(["--collect-only", "-n", "0", *paths])
    if listed.returncode not in (0, NOTHING_RAN):
        raise SystemExit(listed.stdout + listed.stderr)
    return sorted(set(re.findall(r"^(\S+\.py)::", listed.stdout, re.MULTILINE)))


def _run(file: str, commit: str) -> tuple[Row, str]:
    begun = time.monotonic()
    ran = _pytest(["-n", "0", "-v", "-p", "no:cacheprovider", "--tb=short", file])
    said = ran.stdout + ran.stderr
    passed, failed, errors, skipped = (
        int(found[-1]) if (found := re.findall(rf"(\d+) {what}", said)) else 0
        for what in ("passed", "failed", "errors?", "skipped")
    )
    if ran.returncode not in (0, 1, NOTHING_RAN):
        errors += 1  # pytest itself, or it was killed
    seconds = round(time.monotonic() - begun)
    today = datetime.now(UTC).date().isoformat()
    return Row(file, passed, failed + errors, skipped, seconds, commit, today), said


def _pytest(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "exhaustive", *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False, timeout=LIMIT_S,
    )  # fmt: skip


def _commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    ).stdout.strip()  # fmt: skip


def _read() -> dict[str, Row]:
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    cells = [[x.strip(" `") for x in line.strip("|").split("|")] for line in lines if "`" in line]
    rows = [x for x in cells if len(x) == len(fields(Row))]
    return {x[0]: Row(x[0], *map(int, x[1:5]), *x[5:]) for x in rows}  # type: ignore[arg-type]


def _write(rows: Iterable[Row]) -> None:
    names = [field.name for field in fields(Row)]
    lines = [names, ["---", *["---:"] * 4, "---", "---"]]
    for row in sorted(rows, key=lambda row: row.file):
        file, *numbers = map(str, astuple(row))
        lines.append([f"`{file}`", *numbers])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    TABLE.write_text(HEAD + table)


if __name__ == "__main__":
    raise SystemExit(main())
