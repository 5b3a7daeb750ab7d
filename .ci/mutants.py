"""Change the package in one place at a time; the tests that are named must fail.

    python .ci/mutants.py                    # all of .ci/mutants.toml, two at a time
    python .ci/mutants.py flush              # those with this in their names
    python .ci/mutants.py --jobs 4
    python .ci/mutants.py --by-default       # by rows alone that run without -m exhaustive

Each change is made in a copy of the files that git knows. First all tests that are named run on a
copy without a change: one that fails there says nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / ".ci" / "mutants.toml"
LIMIT_S = 600
FAILED = 1  # exit code of pytest


@dataclass(frozen=True)
class Mutant:
    """Say what is changed, and which tests notice it.

    Args:
        name: what goes wrong, in some words.
        file: which is changed.
        old: a text that it has once.
        new: what is put in its place.
        tests: of which at least one must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def main() -> int:
    """Run what the command line names; return 1 if a mutant lives, or a test fails by itself."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help="parts of names [all]")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    parser.add_argument("--by-default", action="store_true", help="run no exhaustive rows")
    given = parser.parse_args()
    mutants = [Mutant(**row) for row in tomllib.loads(TABLE.read_text())["mutant"]]
    if doubled := {x.name for x in mutants if [y.name for y in mutants].count(x.name) > 1}:
        parser.error(f"names that stand twice: {', '.join(sorted(doubled))}")
    chosen = [x for x in mutants if not given.names or any(n in x.name for n in given.names)]
    if not chosen:
        parser.error(f"no mutant has {', '.join(given.names)} in its name")
    with tempfile.TemporaryDirectory() as folder:
        plain = copy_of_the_tree(Path(folder) / "plain")
        for mutant in chosen:
            changed(mutant)  # all, before the first is run
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        marks = "not exhaustive" if given.by_default else ""
        code, said = run(plain, tests, marks, workers=given.jobs)
        if code:
            print(f"{said}\ntests fail without a change")
            return 1
        with ThreadPoolExecutor(given.jobs) as pool:
            lives = sum(pool.map(lambda x: not dies(x, Path(folder), marks), chosen))
    print(f"{len(chosen) - lives} of {len(chosen)} die")
    return int(lives > 0)


def dies(mutant: Mutant, folder: Path, marks: str) -> bool:
    """Return whether a test fails; print a row."""
    begun = time.monotonic()
    tree = copy_of_the_tree(Path(tempfile.mkdtemp(dir=folder)))
    (tree / mutant.file).write_text(changed(mutant))
    code, said = run(tree, mutant.tests, marks)
    shutil.rmtree(tree)
    by = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    verdict = f"dies   by {by[0]}" if by else "LIVES" if code == 0 else f"pytest ended with {code}"
    print(f"{mutant.name:48} {time.monotonic() - begun:4.0f} s  {verdict}", flush=True)
    if code not in (0, FAILED):
        print(said)
    return code == FAILED and bool(by)


def changed(mutant: Mutant) -> str:
    """Return the text of the file with the change."""
    text = (ROOT / mutant.file).read_text()
    if (found := text.count(mutant.old)) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.file} has the text {found} times, not once")
    if mutant.old == mutant.new:
        raise SystemExit(f"{mutant.name}: nothing is changed")
    return text.replace(mutant.old, mutant.new)


def run(tree: Path, tests: Sequence[str], marks: str, workers: int = 0) -> tuple[int, str]:
    """Run tests of a copy that have marks; return pytest's exit code, and what it said."""
    options = ["-p", "no:cacheprovider", "-m", marks, "-n", str(workers)]
    stop = [] if workers else ["-x"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *stop, *tests],
        cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True,
        check=False, timeout=LIMIT_S,
    )  # fmt: skip
    return ran.returncode, ran.stdout + ran.stderr


def copy_of_the_tree(folder: Path) -> Path:
    """Copy what git knows into a folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        source, there = ROOT / name, folder / name
        if source.is_file():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, there)
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
