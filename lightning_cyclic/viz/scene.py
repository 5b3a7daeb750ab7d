"""Scene: what a picture of a plan shows, as numbers: cells, updates and messages.

A slot s takes the time from s to s + 1. An update takes none and lies where its slot begins. A
message leaves behind the compute that its worker has in the slot of its SEND, if any comes before
it, and is there for the first action that reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.plan.dataflow import Item

MOST_WORKERS = 32  # more cells than these take a minute to draw, and none can be read
MOST_SLOTS = 256


class Cell(NamedTuple):
    """Hold a forward or backward: from ``x`` on, as wide as ``width`` slots, on a worker."""

    x: float
    width: float
    w: int
    action: Action


class Begin(NamedTuple):
    """Hold where a worker's first cell of a step is."""

    x: float
    w: int
    t: int


class Mark(NamedTuple):
    """Hold an update, at the beginning of slot ``x``."""

    x: int
    w: int
    action: Action


class Arrow(NamedTuple):
    """Hold a message, from where it leaves worker ``w`` to where it is read first."""

    x: int
    w: int
    end_x: int
    end_w: int
    action: Action  # the SEND


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Hold what a picture shows.

    Args:
        plan: of which.
        slots: that are shown.
        cells: forwards and backwards.
        begins: where steps begin on each worker.
        updates: where new versions are made.
        arrows: messages whose both ends are shown.
    """

    plan: Plan
    slots: range
    cells: tuple[Cell, ...]
    begins: tuple[Begin, ...]
    updates: tuple[Mark, ...]
    arrows: tuple[Arrow, ...]


def scene(plan: Plan, first_slot: int = 0) -> Scene:
    """Find out what a picture of a plan shows.

    Args:
        plan: all of its steps are shown.
        first_slot: slot at which the picture begins. [0]

    Raises:
        PlanError: the plan ends before ``first_slot``, or nobody could read so large a picture.

    Example:
        >>> from lightning_cyclic.plan import make_plan
        >>> seen = scene(make_plan("1f1b", num_stages=2, num_workers=2, num_steps=1))
        >>> len(seen.cells), len(seen.updates), seen.slots
        (8, 2, range(0, 6))
    """
    end = _end(plan)
    if first_slot >= end:
        raise PlanError(
            f"nothing happens from slot {first_slot} on; allowed: slots of the {plan.num_steps} "
            "steps; begin at an earlier slot or draw more steps"
        )
    slots = range(first_slot, end)
    if plan.num_workers > MOST_WORKERS or len(slots) > MOST_SLOTS:
        raise PlanError(
            f"a picture of {plan.num_workers} workers over {len(slots)} slots could not be read; "
            f"allowed: up to {MOST_WORKERS} workers and {MOST_SLOTS} slots; draw fewer steps, "
            "begin at a later slot, or leave the file out for a text"
        )
    programs = plan.programs
    cells = tuple(cells_of(programs))
    return Scene(
        plan=plan,
        slots=slots,
        cells=tuple(cell for cell in cells if cell.action.s in slots),
        begins=tuple(begin for begin in _begins(cells) if begin.x >= first_slot),
        updates=tuple(
            Mark(a.s, w, a)
            for w, program in enumerate(programs)
            for a in program
            if a.kind is Kind.UPDATE and first_slot <= a.s <= end
        ),
        arrows=tuple(a for a in arrows_of(plan, programs) if first_slot <= a.x <= a.end_x <= end),
    )


def _end(plan: Plan) -> int:
    """Return the slot behind the last one, found without making the program."""
    ends = (a.s for _, _, a in plan.timetable if a.kind is Kind.B and a.t == plan.num_steps - 1)
    return 1 + max(ends)


def cells_of(programs: Sequence[Sequence[Action]]) -> Iterator[Cell]:
    """Yield all cells; several of one slot share it in the order in which they run."""
    for w, program in enumerate(programs):
        by_slot: defaultdict[int, list[Action]] = defaultdict(list)
        for a in program:
            if a.kind in (Kind.F, Kind.B):
                by_slot[a.s].append(a)
        for s, actions in sorted(by_slot.items()):
            for n, a in enumerate(actions):
                yield Cell(s + n / len(actions), 1 / len(actions), w, a)


def _begins(cells: Sequence[Cell]) -> Iterator[Begin]:
    """Yield where each worker first computes something of each step."""
    seen: set[tuple[int, int]] = set()
    for cell in cells:
        at = cell.w, cell.action.t
        if at not in seen:
            seen.add(at)
            yield Begin(cell.x, *at)


def arrows_of(plan: Plan, programs: Sequence[Sequence[Action]]) -> Iterator[Arrow]:
    """Yield all messages that somebody reads: a flush sends some that nobody does any more."""
    readers = [_first_readers(plan, program) for program in programs]
    for w, program in enumerate(programs):
        computed = -1  # the last slot in which something was, up to here
        for a in program:
            if a.kind in (Kind.F, Kind.B):
                computed = a.s
            if a.kind is not Kind.SEND:
                continue
            assert a.peer is not None  # as for every SEND
            reader = readers[a.peer].get((*_name(a), w))
            if reader is not None:
                # a gradient is added behind the backward that it comes from
                end_x = reader.s + (reader.kind is Kind.ADD)
                yield Arrow(a.s + (computed == a.s), w, end_x, a.peer, a)


def _first_readers(plan: Plan, program: Sequence[Action]) -> dict[tuple[object, ...], Action]:
    """Return message and sender -> the first action that reads it."""
    flow = plan.program.flow
    coming: dict[Item, list[tuple[object, ...]]] = {}
    found: dict[tuple[object, ...], Action] = {}
    for a in program:
        if a.kind is Kind.RECV:
            for item in flow(a).makes:
                coming.setdefault(item, []).append((*_name(a), a.peer))
            continue
        for item in flow(a).reads:
            for message in coming.pop(item, ()):
                found[message] = a
    return found


def _name(a: Action) -> tuple[object, ...]:
    """Name a message alike at both ends."""
    return a.payload, a.t, a.i, a.j, a.v
