"""shards: with ``sharding="full"``, fetch parameters before each F and B, drop them after it.

The owner keeps the bytes of its stages and sends them to each user, one slot ahead of use, so
that a worker holds its own stages, the one in use and the one on its way. In each slot of the
cyclic timetable every stage has one user: one message per worker and slot, and no broadcast.

With ``sharding="ring"`` the owner sends them to the first user of a round of forwards, or of
backwards, and each user to the next, as soon as it has them and before it uses them:

    full    owner -> w0          ring    owner -> w0 -> w1 -> w2
            owner -> w1
            owner -> w2

As many messages, but all from one neighbour to the next, save the first of each round. A copy is
dropped (FREE) when it has been used and has left, so that nobody holds two of them. Where buffers
travel and a worker runs all of its rounds before the next one begins, there is nobody to hand a
copy on to, and owners send all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from lightning_cyclic.plan.actions import Action, Kind, Lane, Payload, Program
from lightning_cyclic.plan.passes.messages import message

if TYPE_CHECKING:
    from lightning_cyclic.plan import Plan

_COMPUTE = (Kind.F, Kind.B)
_Uses: TypeAlias = Mapping[Action, Action]  # a forward or backward -> another of the same round


def shards(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert GATHER, FREE and the messages to users; change nothing without sharding.

    Args:
        plan: whose ownership decides.
        programs: with UPDATEs at owners only and without P messages.

    Returns:
        Programs in which users hold parameters only while they use them.
    """
    if not plan.axes.sharding.gathers:
        return programs
    givers = _givers(plan, programs)
    takers = {giver: a for a, giver in givers.items()}
    outbox = _outbox(plan, programs, givers)
    used = (_use(plan, program, w, givers, takers) for w, program in enumerate(programs))
    if not plan.axes.sharding.hands_on:  # else those behind would wait for what comes early
        used = (_ahead(tuple(program)) for program in used)
    return tuple(tuple(_serve(program, outbox[w])) for w, program in enumerate(used))


def _givers(plan: Plan, programs: tuple[Program, ...]) -> _Uses:
    """Name for each use of somebody else's stage the use before it, if that hands it on."""
    in_succession = plan.rounds > 1 and plan.relayed  # all rounds of a worker, then the next one's
    if not plan.axes.sharding.hands_on or in_succession:
        return {}
    uses = [(a.s, w, a) for w, program in enumerate(programs) for a in program]
    givers: dict[Action, Action] = {}
    before: dict[tuple[Kind, int, int | None, int], Action] = {}  # of a round: its last use so far
    for _, w, a in sorted(uses, key=lambda use: use[:2]):
        if a.kind not in _COMPUTE:
            continue
        round_of = a.kind, a.j, a.v, plan.round_of(a.i or 0)
        if plan.owner(a.j) != w and round_of in before:
            givers[a] = before[round_of]
        before[round_of] = a
    return givers


def _outbox(plan: Plan, programs: tuple[Program, ...], givers: _Uses) -> dict[int, list[Action]]:
    """List what each owner sends by itself, in the order of the slots in which it is due."""
    made = {(a.j, a.v): a.s for program in programs for a in program if a.kind is Kind.UPDATE}
    dues = defaultdict(list)
    for w, program in enumerate(programs):
        for a in program:
            owner = plan.owner(a.j)
            if a.kind in _COMPUTE and owner != w and a not in givers:
                due = max(a.s - 1, made.get((a.j, a.v), 0), 0)
                dues[owner].append((due, a.s, w, replace(_receive(a, owner), s=due)))
    return defaultdict(list, {owner: _sends(found) for owner, found in dues.items()})


def _sends(dues: list[tuple[int, int, int, Action]]) -> list[Action]:
    dues.sort(key=lambda due: due[:3])
    return [replace(a, kind=Kind.SEND, peer=w) for _, _, w, a in dues]


def _use(plan: Plan, program: Program, w: int, givers: _Uses, takers: _Uses) -> Iterator[Action]:
    """Surround each F and B of somebody else's stage with GATHER, receive and FREE.

    Where parameters are handed on, it is before they are used, so that they travel meanwhile.
    """
    for a in program:
        is_fetched = a.kind in _COMPUTE and plan.owner(a.j) != w
        if is_fetched:
            yield Action(kind=Kind.GATHER, t=a.t, j=a.j, v=a.v, s=a.s)
            yield _receive(a, _worker_of(plan, givers[a]) if a in givers else plan.owner(a.j))
        if (taker := takers.get(a)) is not None:
            sent = _receive(taker, _worker_of(plan, taker))
            yield replace(sent, kind=Kind.SEND, s=a.s)
        yield a
        if is_fetched:
            yield Action(kind=Kind.FREE, t=a.t, j=a.j, v=a.v, s=a.s)


def _ahead(program: Program) -> Iterator[Action]:
    """Post each receive before the forward or backward before it, so that both go on at once.

    Not so in another step, which a flush may come before; nor for a stage that is in use.
    """
    places = [n for n, a in enumerate(program) if a.kind in _COMPUTE]
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


def _worker_of(plan: Plan, a: Action) -> int:
    return plan.worker_of(a.i or 0, a.j, a.t)


def _serve(program: Iterator[Action], outbox: list[Action]) -> Iterator[Action]:
    """Send what is due before the work of each slot, after the versions made in it.

    What was due in an earlier slot, in which this worker had no work, goes before everything: a
    message that this slot waits for may depend on it.
    """
    sends = deque(outbox)
    for a in program:
        starts_work = a.kind in (*_COMPUTE, Kind.GATHER)
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
        v: version, the newest.
        w: worker.
    """
    if not plan.axes.sharding.gathers:
        return
    s = plan.slot(Kind.B, v - 1, plan.num_micro - 1, 0) + 1
    for j in range(plan.num_stages):
        owner = plan.owner(j)
        a = Action(kind=Kind.GATHER, t=v, j=j, v=v, s=s)
        if w == owner:
            others = (x for x in range(plan.num_workers) if x != owner)
            yield from (replace(_receive(a, owner), kind=Kind.SEND, peer=x) for x in others)
        else:
            yield a
            yield _receive(a, owner)
