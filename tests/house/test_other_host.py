"""Parity and conformance under `pytorch_lightning`, with all imports of `lightning` replaced.

In every run of the tests tests/cli/test_doctor.py compares a few steps of that host's Trainer.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_LIGHTNING = [
    (r"\blightning\.pytorch\b", "pytorch_lightning"),
    (r"\blightning\.fabric\b", "lightning_fabric"),
    (r"\bimport lightning\b", "import pytorch_lightning as lightning"),
]


def under_the_other_host(folder: Path) -> None:
    """Copy the tests into a folder, as somebody had written them who uses the other package."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("*.pyc"))
    for file in (folder / "tests").rglob("*.py"):
        text = file.read_text()
        for old, new in OF_LIGHTNING:
            text = re.sub(old, new, text)
        file.write_text(text)
    with (folder / "tests" / "conftest.py").open("a") as file:
        file.write(NO_OTHER)


NO_OTHER = """

def pytest_sessionfinish() -> None:
    import sys

    assert "pytorch_lightning" in sys.modules
    assert not [name for name in sys.modules if name.partition(".")[0] == "lightning"]
"""


@pytest.mark.multi
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tests", ["training/test_parity.py", "conformance"])
def test_rows_of_every_day(tests: str, tmp_path: Path) -> None:
    under_the_other_host(tmp_path)
    ran = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", f"tests/{tests}",
            "-k", "not the_page",  # which is not copied
        ],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) >= 30, ran.stdout
