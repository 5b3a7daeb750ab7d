"""Run a benchmark, or print which there are.

    python -m benchmarks                     the index
    python -m benchmarks NAME --help         what it compares, and its options
    python -m benchmarks NAME [options]
    python -m benchmarks NAME --smoke        its smallest form: does it still run?

A benchmark is a module with `add_arguments(parser)`, `run(args)`, the arguments of its smallest
form as `SMOKE`, and, where it starts workers by `rounds.start`, `work(...)` for each of them.
"""

from __future__ import annotations

import ast
import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """Say where a benchmark is, below this folder, and about how long it takes on 2 cores."""

    module: str
    takes: str

    @property
    def says(self) -> str:
        """Return the first line of its docstring; importing it would take seconds."""
        path = Path(__file__).parent.joinpath(*self.module.split(".")).with_suffix(".py")
        return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]


INDEX = {
    "replicated": Entry("data_parallel.replicated", "5 min"),
    "sharding": Entry("data_parallel.sharding", "10 min"),
    "compression": Entry("data_parallel.compression", "2 min a case"),
    "stagger": Entry("data_parallel.stagger", "30 s"),
    "convergence": Entry("data_parallel.convergence", "50 min"),
    "first_step": Entry("data_parallel.first_step", "15 min"),
    "commits": Entry("data_parallel.commits", "10 min"),
    "hosts": Entry("data_parallel.hosts", "until it ends"),
    "late_links": Entry("data_parallel.late_links", "until it ends"),
    "pipeline": Entry("pipeline.tables", "25 min"),
    "stage_overhead": Entry("pipeline.stage_overhead", "1 min"),
    "stage_floor": Entry("pipeline.stage_floor", "30 s"),
    "gpu": Entry("gpu.session", "8 min, GPU"),
    "sparse_states": Entry("memory.sparse_states", "2 min"),
    "tiers": Entry("memory.tiers", "5 min"),
    "activations": Entry("memory.activations", "10 min"),
}


def main(argv: Sequence[str]) -> object:
    """Do what the command line says; return the status of the process."""
    if not argv or argv[0] in ("-h", "--help"):
        print("\n".join(index()))
        return 0
    name, *rest = argv
    if name not in INDEX:
        return f"no benchmark {name}; allowed: {', '.join(INDEX)}; see python -m benchmarks"
    module = import_module(f"benchmarks.{INDEX[name].module}")
    if rest[:1] == ["--worker"]:
        return module.work(*json.loads(rest[1]))
    parser = ArgumentParser(
        prog=f"python -m benchmarks {name}", description=module.__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--smoke", action="store_true", help=f"first: {' '.join(module.SMOKE)}")
    module.add_arguments(parser)
    smallest = module.SMOKE if "--smoke" in rest else ()
    return module.run(parser.parse_args([*smallest, *rest]))


def index() -> Iterator[str]:
    """Yield the lines of the index."""
    yield "python -m benchmarks NAME [options]; NAME --help says more, NAME --smoke is brief"
    package = ""
    for name, entry in INDEX.items():
        if package != (package := entry.module.split(".")[0]):
            yield f"\n{package}"
        yield f"  {name:14} {entry.takes:14} {entry.says}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))  # type: ignore[arg-type]
