"""Parity under `pytorch_lightning`: the same tests, with all imports of `lightning` replaced."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARITY = ("training/test_parity.py",)
FEW = (  # what its rows are told by
    "unet-cyclic_dp-2 or cls_token-cyclic_dp_v1-2 or resnet-gpipe-2-stages or gpt2-1f1b-2 or "
    "unet-cyclic_pipeline or bert-pipedream-2 or resnet-pipedream_2bw-1"
)
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
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("rows", "least"), [(FEW, 7), pytest.param("", 45, marks=pytest.mark.exhaustive)]
)
def test_parity(rows: str, least: int, tmp_path: Path) -> None:
    under_the_other_host(tmp_path)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-k", rows]
    ran = subprocess.run(
        [*command, *(f"tests/{name}" for name in PARITY)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, ran.stdout
