"""The notebook of the first hour runs from top to bottom, and prints what it shows."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "first_hour.ipynb"
TIMED = "import subprocess", "start = "  # what these cells print differs from machine to machine


def printed(cell: NotebookNode) -> str:
    text = "".join(output.get("text", "") for output in cell.get("outputs", []))
    if not cell.source.startswith(TIMED):
        return text
    return re.sub(r"\d+\.\d+", "0.0", text)  # accuracy, milliseconds


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_cells_before_the_training_print_what_they_show(capsys):
    names: dict[str, Any] = {}
    cells = code_of(nbformat.read(NOTEBOOK, as_version=4))
    before = list(takewhile(lambda cell: not cell.source.startswith("%%writefile"), cells))
    assert len(before) == 3
    for cell in before:
        exec(cell.source, names)
        assert capsys.readouterr().out == printed(cell)


@pytest.mark.multi
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # those of the kernel's own libraries
def test_notebook_prints_what_it_shows(tmp_path, monkeypatch):
    for name, value in {
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    shown = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(run, timeout=200, kernel_name="python3", resources=resources).execute()
    assert list(map(printed, code_of(run))) == list(map(printed, code_of(shown)))


def test_notebook_trains_the_module_of_the_pages():
    pages = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (module,) = re.findall(r"```python\n# model.py\n(.*?)```", pages, flags=re.S)
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells]
    assert f"%%writefile model.py\n{module.rstrip()}" in cells
