"""Programs as text, one line per worker: what golden files hold, and what tests alter."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_cyclic.plan.actions import Program, parse


def to_text(programs: Iterable[Program]) -> str:
    return "".join(",".join(map(str, program)) + "\n" for program in programs)


def from_text(text: str) -> tuple[Program, ...]:
    return tuple(tuple(map(parse, line.split(","))) for line in text.splitlines())
