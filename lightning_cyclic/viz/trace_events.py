"""Trace events: what a worker did, or was to do, as ui.perfetto.dev and chrome://tracing read it.

A trace is a list of events in JSON, one a line; both viewers read a list whose end is missing, so
that a run that was killed leaves a trace, too. Workers are processes of the trace, and their lanes
threads; a plan is a process group of its own, above the run of each worker.

Source: Trace Event Format,
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.viz.picture import cells_of
from lightning_cyclic.viz.words import sentence

Event = dict[str, Any]

MAIN = 1  # the thread of a worker's compute; not 0, which viewers keep for the system
BEGIN, END = "[\n", "\n]\n"  # of a file; events are put apart by SEPARATOR
SEPARATOR = ",\n"
_CATEGORIES = {
    Kind.F: "compute",
    Kind.B: "compute",
    Kind.ADD: "compute",
    Kind.UPDATE: "update",
    Kind.SEND: "message",
    Kind.RECV: "message",
}


class Place(NamedTuple):
    """Hold where an event is shown."""

    process: int
    thread: int = MAIN


class Times(NamedTuple):
    """Hold from when to when something happened, in microseconds."""

    begin: float
    end: float


def run_process(w: int) -> int:
    """Give the process of a trace in which a worker's run is shown."""
    return 2 * w + 2


def plan_process(w: int) -> int:
    """Give the process in which its plan is shown, above the run."""
    return 2 * w + 1


def span(name: str, a: Action | None, times: Times, place: Place, category: str = "") -> Event:
    """Make the event of something that took time.

    Args:
        name: in plain words.
        a: the action, if it is one.
        times: from when to when.
        place: where it is shown.
        category: by which viewers can filter. [that of the action]
    """
    return {
        "name": name,
        "cat": category or (_CATEGORIES.get(a.kind) if a else None) or "other",
        "ph": "X",
        "ts": round(times.begin, 3),
        "dur": round(times.end - times.begin, 3),
        "pid": place.process,
        "tid": place.thread,
        "args": _numbers(a) if a else {},
    }


def moment(name: str, at: float, place: Place) -> Event:
    """Make the event of something that took no time."""
    return {
        "name": name,
        "cat": "note",
        "ph": "i",
        "s": "t",
        "ts": round(at, 3),
        "pid": place.process,
        "tid": place.thread,
    }


def end_of_message(a: Action, sender: int, receiver: int, at: float, place: Place) -> Event:
    """Make one end of the arrow of a message, inside of a span there.

    Args:
        a: its SEND or RECV.
        sender: worker.
        receiver: worker.
        at: a time within the span, in microseconds.
        place: of the span.
    """
    name = f"{a.payload} {a.t} {a.i} {a.j} {a.v} {sender} {receiver}"
    event = {
        "name": "message",
        "cat": "message",
        "ph": "s" if a.kind is Kind.SEND else "f",
        "id": zlib.crc32(name.encode()),
        "ts": round(at, 3),
        "pid": place.process,
        "tid": place.thread,
    }
    return event if a.kind is Kind.SEND else event | {"bp": "e"}


def names(process: int, name: str, threads: dict[int, str]) -> Iterator[Event]:
    """Name a process and its threads, and put processes in the order of their numbers."""
    yield _note("process_name", {"name": name}, {"pid": process})
    yield _note("process_sort_index", {"sort_index": process}, {"pid": process})
    for thread, title in threads.items():
        place = {"pid": process, "tid": thread}
        yield _note("thread_name", {"name": title}, place)
        yield _note("thread_sort_index", {"sort_index": thread}, place)


def _note(what: str, args: Event, place: Event) -> Event:
    return {"name": what, "ph": "M", **place, "args": args}


def planned(plan: Plan, num_steps: int, slot_us: float, begin_us: float) -> Iterator[Event]:
    """Yield the events of a plan, as if it had been run on its timetable.

    Args:
        plan: of which.
        num_steps: that are shown, from the first.
        slot_us: how long a slot takes, in microseconds.
        begin_us: when the first one begins.
    """
    programs = plan.program.first(num_steps)
    for w in range(plan.num_workers):
        name = f"worker {w}, as planned: {plan.preset}"
        title = f"slots, each as long as the run's mean: {slot_us / 1e3:.3g} ms"
        yield from names(plan_process(w), name, {MAIN: title})
    for cell in cells_of(programs):
        times = Times(begin_us + cell.x * slot_us, begin_us + (cell.x + cell.width) * slot_us)
        yield span(sentence(cell.action), cell.action, times, Place(plan_process(cell.w)))
    for w, program in enumerate(programs):
        for a in program:
            if a.kind is Kind.UPDATE:
                yield moment(sentence(a), begin_us + a.s * slot_us, Place(plan_process(w)))


def lines(events: Iterable[Event]) -> Iterator[str]:
    """Yield events as text, one a line."""
    return (json.dumps(event) for event in events)


def _numbers(a: Action) -> dict[str, int | str]:
    found = {
        "step": a.t if a.t >= 0 else None,
        "stage": a.j,
        "micro-batch": a.i,
        "version": a.v if a.t >= 0 else None,
        "other worker": a.peer,
        "planned slot": a.s,
    }
    return {name: number for name, number in found.items() if number is not None} | {
        "action": str(a)
    }
