"""Digests of the programs of many plans, action by action: order, versions, peers, lanes.

    python -m tests.golden.actions      write them anew

Only with a line in the changelog that says what has changed, and why. Where one differs,
`texts(...)` of two commits says in what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from lightning_cyclic.errors import PlanError, ValidationError
from lightning_cyclic.plan import (
    PRESETS,
    LocalSteps,
    Plan,
    make_plan,
    program_of,
    programs_of,
)

FILE = Path(__file__).with_name("actions.csv")
MIDDLE = 2  # the step behind which everybody meets, in half of the text

WHOLE: list[dict[str, Any]] = [
    {}, {"slack": 1}, {"slack": 100}, {"relayed": (0, 1)}, {"rounds": 2},
    {"rounds": 3, "relayed": (1,)}, {"sharding": "none"}, {"sharding": "full"},
    {"norms": "owners"}, {"norms": "owners", "relayed": (0,)}, {"norms": "owners", "rounds": 2},
    {"group_size": 2}, {"group_size": 2, "relayed": (0,)}, {"group_size": 2, "norms": "owners"},
    {"group_size": 2, "rounds": 2}, {"relayed": (0,), "relayed_until": (1,)},
]  # fmt: skip
APART: list[dict[str, Any]] = [
    {}, {"each": 1}, {"each": 2}, {"each": 5}, {"relayed": (0, 1)}, {"tied": ((0, 1),)},
    {"tied": ((0, 1), (0, 3)), "each": 5}, {"relayed": (0,), "relayed_until": (1,)},
    {"replicas": 2}, {"replicas": 2, "relayed": (1,)}, {"replicas": 2, "tied": ((0, 1),)},
    {"norms": "all"}, {"norms": "owners"}, {"norms": "owners", "late_updates": True},
    {"norms": "all", "late_updates": True}, {"norms": "all", "replicas": 2},
    {"late_updates": True, "tied": ((0, 1),)}, {"weights": "delayed"},
]  # fmt: skip
LOCAL: list[dict[str, Any]] = [
    {"weights": LocalSteps(every=every, in_turn=in_turn), **more}
    for every, in_turn in product((1, 2, 3, 50), (False, True))
    for more in ({}, {"sharding": "optimizer"})
] + [
    {"weights": LocalSteps(every=3, delay=2, in_turn=in_turn), "to_owners": to_owners}
    for in_turn, to_owners in product((False, True), (False, True))
]
SIZES = ((1, 1), (2, 2), (4, 2), (3, 3), (4, 4), (6, 3), (8, 4))  # stages, workers of a replica


def grid() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each plan, and the arguments that make it."""
    for preset, (num_stages, num_workers) in product(PRESETS, SIZES):
        is_whole = PRESETS[preset].placement == "replicated"
        is_local = PRESETS[preset].weights == "local"
        for more in LOCAL if is_local else WHOLE if is_whole else APART:
            given = {"preset": preset, "num_stages": num_stages, "num_workers": num_workers}
            given |= {k: v for k, v in more.items() if k not in ("rounds", "each")}
            if "rounds" in more:
                given["num_microbatches"] = more["rounds"] * num_workers
            if "replicas" in more:
                given["num_workers"] = num_workers * more["replicas"]
            if "each" in more:
                given["num_microbatches"] = more["each"] * more.get("replicas", 1)
            rest = "".join(f" {k}={v}".replace(",", ";") for k, v in more.items())
            yield f"{preset} {num_stages}x{num_workers}{rest}", given


def made(given: dict[str, Any]) -> Plan | None:
    """Return a plan, or None where there is none of these numbers."""
    with suppress(PlanError, ValidationError):
        return make_plan(**given, num_steps=4)
    return None


def texts(plan: Plan) -> list[str]:
    """Return, for each worker, some steps and a flush, and steps around a flush."""
    found = []
    for w, whole in enumerate(programs_of(plan)):
        around = [program_of(plan).step(w, t, starts=t == 0) for t in range(MIDDLE + 1)]
        around += [
            program_of(plan).flush(w, MIDDLE),
            program_of(plan).step(w, MIDDLE + 1, ended=MIDDLE, starts=True),
            program_of(plan).flush(w, MIDDLE + 1, ended=MIDDLE, whole=False),
        ]
        found.append("\n".join(str(a) for block in (whole, *around) for a in (*block, "")))
    return found


def digest(plan: Plan) -> str:
    """Return a digest of all that workers do, and of how deep their channels are."""
    depths = sorted(f"{ring} {depth}" for ring, depth in program_of(plan).depths.items())
    text = "\n\n".join([*texts(plan), *map(str, program_of(plan).channels), *depths])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pinned() -> dict[str, str]:
    """Return name -> digest."""
    return dict(line.rsplit(",", 1) for line in FILE.read_text().splitlines()[1:])


if __name__ == "__main__":
    lines = ["plan,digest"]
    for name, given in grid():
        if (plan := made(given)) is not None:
            lines.append(f"{name},{digest(plan)}")
    FILE.write_text("\n".join(lines) + "\n")
    print(len(lines) - 1, "plans")
