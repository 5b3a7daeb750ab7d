"""shards: with ``sharding="full"``, fetch parameters before each F and B, drop them after it.

The owner keeps the bytes of its stages and sends them to each user, one slot ahead of use, so
that a worker holds its own stages, the one in use and the one on its way. In each slot of the
cyclic timetable every stage has one user: one message per worker and slot, and no broadcast.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from lightning_cyclic.plan.actions import COMPUTE, Action, Kind, Lane, Payload, Program
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.plan import Plan


def shards(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert GATHER, FREE and the messages to users; change nothing without sharding.

    Args:
        programs: with UPDATEs at owners only and without P messages.

    Returns:
        Programs in which users hold parameters only while they use them.
    """
    if not plan.axes.sharding.gathers:
        return programs
    outbox = _outbox(plan, programs)
    used = (_ahead(tuple(_use(plan, program, w))) for w, program in enumerate(programs))
    return tuple(tuple(_serve(program, outbox[w])) for w, program in enumerate(used))


def _outbox(plan: Plan, programs: tuple[Program, ...]) -> dict[int, list[Action]]:
    """List what each owner sends, in the order of the slots in which it is due."""
    made = {(a.j, a.v): a.s for program in programs for a in program if a.kind is Kind.UPDATE}
    dues = defaultdict(list)
    for w, program in enumerate(programs):
        for a in program:
            owner = plan.owner(a.j)
            if a.kind in COMPUTE and owner != w:
                due = max(a.s - 1, made.get((a.j, a.v), 0), 0)
                dues[owner].append((due, a.s, w, replace(_receive(a, owner), s=due)))
    return defaultdict(list, {owner: _sends(found) for owner, found in dues.items()})


def _sends(dues: list[tuple[int, int, int, Action]]) -> list[Action]:
    dues.sort(key=lambda due: due[:3])
    return [replace(a, kind=Kind.SEND, peer=w) for _, _, w, a in dues]


def _use(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Surround each F and B of somebody else's stage with GATHER, receive and FREE."""
    for a in program:
        is_fetched = a.kind in COMPUTE and plan.owner(a.j) != w
        if is_fetched:
            yield Action(kind=Kind.GATHER, t=a.t, j=a.j, v=a.v, s=a.s)
            yield _receive(a, plan.owner(a.j))
        yield a
        if is_fetched:
            yield Action(kind=Kind.FREE, t=a.t, j=a.j, v=a.v, s=a.s)


def _ahead(program: Program) -> Iterator[Action]:
    """Post each receive before the forward or backward before it, so that both go on at once.

    Not so in another step, which a flush may come before; nor for a stage that is in use.
    """
    places = [n for n, a in enumerate(program) if a.kind in COMPUTE]
    early: dict[int, list[Action]] = defaultdict(list)  # before which action
    moved: set[int] = set()
    for before, n in pairwise(places):
        fetch = program[n - 2 : n]
        is_fetched = n >= 2 and fetch[0].kind is Kind.GATHER
        a, b = program[before], program[n]
        if is_fetched and a.t == b.t and a.j != b.j:
            early[before] += [replace(x, s=a.s) for x in fetch]
            moved |= {n - 2, n - 1}
    for n, a in enumerate(program):
        yield from early[n]
        if n not in moved:
            yield a


def _serve(program: Iterator[Action], outbox: list[Action]) -> Iterator[Action]:
    """Send what is due before the work of each slot, after the versions made in it.

    What was due in an earlier slot, in which this worker had no work, goes before everything: a
    message that this slot waits for may depend on it.
    """
    sends = deque(outbox)
    for a in program:
        starts_work = a.kind in (*COMPUTE, Kind.GATHER)
        while sends and (sends[0].s < a.s or (starts_work and sends[0].s == a.s)):
            yield sends.popleft()
        yield a
    yield from sends


def _receive(a: Action, peer: int) -> Action:
    """Receive parameters for one use; they have a lane, as owners serve while they compute."""
    return replace(message(Kind.RECV, Payload.P, a, peer, i=a.i, v=a.v), lane=Lane.WEIGHTS)


def last_version(plan: Plan, v: int, w: int) -> Iterator[Action]:
    """Bring a version of every stage to everybody at a flush, stage by stage.

    Validation and checkpoints need whole models; the next step drops it again.

    Args:
        plan: whose ownership decides; without sharding everybody has it already.
    """
    if not plan.axes.sharding.gathers:
        return
    s = plan.end(v - 1, 0) + 1
    for j in range(plan.num_stages):
        owner = plan.owner(j)
        a = Action(kind=Kind.GATHER, t=v, j=j, v=v, s=s)
        if w == owner:
            others = (x for x in range(plan.num_workers) if x != owner)
            yield from (replace(_receive(a, owner), kind=Kind.SEND, peer=x) for x in others)
        else:
            yield a
            yield _receive(a, owner)
