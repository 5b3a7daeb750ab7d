"""Write down the final weights of every training that a test starts, to compare two commits.

    python -m pytest -p tests.golden_weights --golden-weights before.csv
    (another commit)
    python -m pytest -p tests.golden_weights --golden-weights after.csv
    python -m tests.golden_weights before.csv after.csv

Bits depend on the processor, so both commits run on one machine, and no digest is committed.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import processes

Row = tuple[str, int, int, str]  # test, which training of it, rank, digest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-weights", type=Path, help="CSV file for digests of final weights")


@pytest.fixture(autouse=True)
def _note_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    path = request.config.getoption("--golden-weights")
    if path is None:
        return
    run, rows = processes.run, []

    def noting(*args: Any, **kwargs: Any) -> list[Any]:
        outcomes = run(*args, **kwargs)
        training = len({row[1] for row in rows})
        digests = [digest(x["weights"]) if _has_weights(x) else None for x in outcomes]
        name = (
            request.node.name
            if request.cls is None
            else f"{request.cls.__name__}.{request.node.name}"
        )
        new = [(name, training, r, d) for r, d in enumerate(digests) if d is not None]
        rows.extend(new)
        with path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(new)
        return outcomes

    monkeypatch.setattr(processes, "run", noting)


def _has_weights(outcome: Any) -> bool:
    weights = outcome.get("weights") if isinstance(outcome, Mapping) else None
    return isinstance(weights, Mapping) and all(torch.is_tensor(x) for x in weights.values())


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of names and bits."""
    found = hashlib.blake2b(digest_size=12)
    for name in sorted(weights):
        x = weights[name].detach().contiguous()
        found.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        found.update(x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return found.hexdigest()


def read(path: str) -> dict[tuple[str, int, int], str]:
    """Return what a run wrote, by test, training and rank."""
    with Path(path).open(newline="") as file:
        return {(name, int(k), int(r)): text for name, k, r, text in csv.reader(file)}


def differences(before: str, after: str) -> Iterator[str]:
    """Yield a line for each test whose trainings ended otherwise."""
    old, new = read(before), read(after)
    lines: dict[str, set[str]] = defaultdict(set)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            lines[key[0]].add(
                "only before"
                if key not in new
                else "only after"
                if key not in old
                else "other bits"
            )
    yield f"{len(old.keys() & new.keys())} trainings compared, {len(lines)} tests differ"
    yield from (f"{name}: {', '.join(sorted(what))}" for name, what in lines.items())


if __name__ == "__main__":
    print("\n".join(differences(*sys.argv[1:])))
