"""The planning floors import neither torch nor Lightning, in a fresh interpreter."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_cyclic"
FOLDERS = ("plan", "simulate", "planner", "viz")

FIRST_THAT_BRINGS = """
import importlib, sys
names, refused = {names}, {refused}
for name in names:
    importlib.import_module(name)
    found = refused & {{module.partition(".")[0] for module in sys.modules}}
    if found:
        print(name, *sorted(found))
        break
"""


def modules():
    paths = [PACKAGE / "errors.py"]
    for folder in FOLDERS:
        paths += sorted((PACKAGE / folder).rglob("*.py"))
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__")


def first_that_brings(names, refused):
    """Import modules one after the other; return the first that brings what is refused, and what.

    Which modules come before it is no excuse: they have brought nothing of the kind.
    """
    code = FIRST_THAT_BRINGS.format(names=list(names), refused=refused)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_planning_imports_neither_torch_nor_lightning():
    names = list(modules())
    assert len(names) > 40
    refused = {"torch", "lightning", "pytorch_lightning", "numpy"}
    assert not first_that_brings(names, refused)


def test_the_test_can_fail():
    assert first_that_brings(["csv", "json.decoder", "html"], {"json"}) == ["json.decoder", "json"]


def test_siblings_of_the_first_floor_do_not_import_each_other():
    axes = ("schedules", "placement", "weights")
    for axis in axes:
        text = (PACKAGE / "plan" / f"{axis}.py").read_text()
        assert not any(f"lightning_cyclic.plan.{other}" in text for other in axes)


def imported(path: Path, known: frozenset[str]) -> Iterator[str]:
    """List the modules of the package that one imports, also those for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from {inner, node.module} & known if inner not in known else [inner]


def test_no_imports_form_a_circle() -> None:
    paths = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in PACKAGE.rglob("*.py")
    }
    known = frozenset(paths)
    graph = {name: {*imported(path, known)} - {name} for name, path in paths.items()}
    assert len(graph) > 100
    assert sum(map(len, graph.values())) > 500
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files
