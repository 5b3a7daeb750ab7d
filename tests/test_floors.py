"""The planning floors import neither torch nor Lightning: each module, in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_cyclic"
FOLDERS = ("plan", "simulate", "planner", "viz")


WITH_NUMPY = {
    f"lightning_cyclic.simulate.{name}" for name in ("longest_path", "timetable", "window")
}


def modules():
    paths = [PACKAGE / "errors.py"]
    for folder in FOLDERS:
        paths += sorted((PACKAGE / folder).rglob("*.py"))
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__")


def loaded_by(name):
    code = f"import sys, {name}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {module.partition(".")[0] for module in done.stdout.split()}


@pytest.mark.parametrize("name", list(modules()))
def test_imports_neither_torch_nor_lightning(name):
    refused = {"torch", "lightning", "pytorch_lightning", "numpy"}
    if name in WITH_NUMPY:  # which others import where they use them, so that they start at once
        refused.remove("numpy")
    assert not loaded_by(name) & refused


def test_the_test_can_fail():
    assert "json" in loaded_by("json.decoder")


def test_siblings_of_the_first_floor_do_not_import_each_other():
    axes = ("schedules", "placement", "weights", "sharding")
    for axis in axes:
        path = PACKAGE / "plan" / axis
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            text = file.read_text()
            for other in set(axes) - {axis}:
                assert f"lightning_cyclic.plan.{other}" not in text, file
