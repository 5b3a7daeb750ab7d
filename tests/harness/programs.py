"""Programs as text, one line per worker: what golden files hold, and what tests alter."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightning_cyclic.plan import PRESETS, Plan, program_of, programs_of
from lightning_cyclic.plan.actions import Kind, Payload, Program, parse
from lightning_cyclic.plan.check.replay import Replay
from lightning_cyclic.plan.presets import SCHEDULES


def shaped(preset: str, num_stages: int, num_workers: int) -> dict[str, int]:
    """Return as many stages and workers, or the next that the preset's schedule takes."""
    shape = SCHEDULES[PRESETS[preset].schedule].shape
    if shape == "vee":
        num_workers = min(num_workers, max(1, num_stages // 2))
        num_stages = 2 * num_workers
    while shape == "loop" and num_stages % num_workers:
        num_workers -= 1
    return {"num_stages": num_stages, "num_workers": num_workers}


def to_text(programs: Iterable[Program]) -> str:
    return "".join(",".join(map(str, program)) + "\n" for program in programs)


def from_text(text: str) -> tuple[Program, ...]:
    return tuple(tuple(map(parse, line.split(","))) for line in text.splitlines())


def swapped(plan: Plan, w: int, first: str, second: str) -> tuple[Program, ...]:
    """Return the programs with two actions of worker w in each other's place."""
    programs = [list(program) for program in programs_of(plan)]
    m, n = (programs[w].index(parse(text)) for text in (first, second))
    programs[w][m], programs[w][n] = programs[w][n], programs[w][m]
    return tuple(map(tuple, programs))


def sent(plan: Plan, payload: Payload) -> list[tuple[int | None, ...]]:
    """List step, stage, version, from and to of the sends of a payload."""
    return sorted(
        (a.t, a.j, a.v, w, a.peer)
        for w, program in enumerate(programs_of(plan))
        for a in program
        if a.kind is Kind.SEND and a.payload is payload
    )


def replayed(plan: Plan, flush_at: Collection[int]) -> None:
    """Replay six steps, with flushes behind some and the last, which leave nothing pending."""
    replay, ended, program, workers = Replay(plan), -1, program_of(plan), range(plan.num_workers)
    for t in range(6):
        begins = ended == t - 1
        replay.run([program.step(w, t, ended=ended, starts=begins) for w in workers])
        if t in flush_at or t == 5:
            replay.run([program.flush(w, t, ended=ended) for w in workers])
            replay.check_flushed(t)
            ended = t
