"""Faults that .ci/mutants.py puts in: each is of a text that stands once in the file it names."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_fault_finds_its_place_and_its_tests() -> None:
    mutants = tomllib.loads((ROOT / ".ci" / "mutants.toml").read_text())["mutant"]
    assert len(mutants) > 200
    for mutant in mutants:
        assert (ROOT / mutant["file"]).read_text().count(mutant["old"]) == 1, mutant["name"]
        for test in mutant["tests"]:
            file, _, name = test.partition("::")
            assert name.partition("[")[0] in (ROOT / file).read_text(), (mutant["name"], test)
