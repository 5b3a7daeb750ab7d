"""Run tests under the oldest and the newest versions that pyproject.toml declares.

    python .ci/versions.py                            # every environment, every suite
    python .ci/versions.py oldest --suites parity     # one of each
    python .ci/versions.py oldest --tests tests/cli   # a look at some tests

Each environment is made anew, with uv, in a folder that is thrown away. A suite that has run
writes its row in the last table of docs/figures.md.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "figures.md"
EXTRAS = ".[recipes,cli,test]"
SHOWN = ("torch", "lightning", "numpy", "transformers")
SUITES = {
    "parity": (
        "tests/training/test_parity.py", "tests/training/test_draws.py",
        "tests/training/test_one_device.py", "tests/training/test_hooks.py",
        "tests/plugin/test_registration.py", "tests/training/test_freezing.py",
        "tests/training/test_meta.py",
    ),
    "parts": ("tests/runtime", "tests/plugin", "tests/planner", "tests/cli"),
    "recipes": ("tests/recipes",),
}  # fmt: skip


class Environment(NamedTuple):
    """Say what is installed.

    Args:
        python: its version.
        resolution: "lowest-direct" takes the lowest version of what pyproject.toml names, and the
            newest of what these depend on; "highest" takes the newest of all.
    """

    python: str
    resolution: str


ENVIRONMENTS = {
    "oldest": Environment("3.11", "lowest-direct"),
    "between": Environment("3.12", "highest"),
    "newest": Environment("3.13", "highest"),
}


class Outcome(NamedTuple):
    """Count tests by how they ended."""

    passed: int
    skipped: int
    failed: int
    minutes: float


def main() -> int:
    """Run what the command line names; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="environment", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--tests", nargs="+", metavar="path", help="instead; the table stays")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(ENVIRONMENTS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; allowed: {', '.join(ENVIRONMENTS)}")
    if shutil.which("uv") is None:
        parser.error("uv is not installed; use pip install uv")
    failed = 0
    for name in given.names or ENVIRONMENTS:
        with tempfile.TemporaryDirectory() as folder:
            python = make(ENVIRONMENTS[name], Path(folder))
            if given.tests:
                failed += run(python, given.tests).failed
                continue
            for suite in given.suites:
                outcome = run(python, SUITES[suite])
                failed += outcome.failed
                write_row(name, suite, versions(python), outcome)
    return int(failed > 0)


def make(environment: Environment, folder: Path) -> Path:
    """Make an environment in a folder; return its Python."""
    python = folder / "bin" / "python"
    options = ["--resolution", environment.resolution, "--python", str(python)]
    subprocess.run(["uv", "venv", "-q", "--python", environment.python, folder], check=True)
    subprocess.run(["uv", "pip", "install", "-q", *options, "-e", EXTRAS], cwd=ROOT, check=True)
    return python


def run(python: Path, tests: Sequence[str]) -> Outcome:
    """Run tests; return how they ended.

    Warnings are no errors here: old packages warn of each other's newer versions.
    """
    with tempfile.NamedTemporaryFile(suffix=".xml") as file:
        options = ["-W", "default", "--disable-warnings", f"--junitxml={file.name}"]
        subprocess.run([python, "-m", "pytest", *options, *tests], cwd=ROOT, check=False)
        suite = next(ElementTree.parse(file.name).iter("testsuite"))
    ran, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return Outcome(ran - skipped - failed, skipped, failed, float(suite.attrib["time"]) / 60)


def versions(python: Path) -> list[str]:
    """Return the version of an environment's Python, and those of the packages in the table."""
    code = (
        "import platform; from importlib.metadata import version; "
        f"print(platform.python_version(), *map(version, {SHOWN}))"
    )
    told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return told.stdout.split()


def write_row(name: str, suite: str, found: Sequence[str], outcome: Outcome) -> None:
    """Put a row in the place of the one that this environment and suite have, or at the end."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    start = f"| `{name}` | {suite} | "
    row = start + " | ".join([*found, day, *(f"{number:.0f}" for number in outcome)]) + " |"
    print(row)
    lines = TABLE.read_text().splitlines()
    rows = [n for n, line in enumerate(lines) if line.startswith("| `")]
    same = [n for n in rows if lines[n].startswith(start)]
    at = same[0] if same else rows[-1] + 1
    lines[at : at + len(same)] = [row]
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
