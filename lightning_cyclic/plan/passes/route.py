"""route: the messages. What one worker makes and another reads is sent to it, once.

Each datum has one maker (dataflow.py). Its send stands behind the action that makes it, its
receive before the first action that reads it; ``receives.py`` says where that is posted.

    A   activations             stage j-1 -> j, where another worker runs the next stage
    G   activation gradients    stage j+1 -> j
    W   tied gradients          a worker of later stages that use parameters -> that of the first,
                                behind the last of its backwards that add to them
    S   partial gradient sums   who adds micro-batch i -> who adds i+1; T, the total, to the owner
    H   gradients               who runs micro-batch i -> who adds it, where that is another
    R   module buffers          whose forward was the k-th -> whose is the next, of all steps
    P   parameters              owner -> all who hold the stage: pipelines from the owner itself,
                                others along a chain, in the order of need, of groups from lead to
                                lead, who give them to their group
    U   outer weights           as P, of local steps: differences.py
    V   those of other stages   owner -> the workers that use them and do not hold the stage

A version is received where its first reader, or in a chain the worker's own update, would stand;
all updates of one call of the optimizer are one place. Totals are received there, too, or where
updates are late, as soon as they are there, since all others wait to hear of their norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, final

from lightning_cyclic.plan.actions import COMPUTE, Action, Kind, Payload, Program
from lightning_cyclic.plan.dataflow import Dataflow, Datum, Flow, Item
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.roles import version_readers

# what follows the rule alone: what carries it, and what its numbers are
_PAYLOADS: dict[Any, tuple[Payload, str]] = {
    Datum.INPUT: (Payload.A, "tij"), Datum.OUTPUT_GRADIENT: (Payload.G, "tij"),
    Datum.TIED_GRADIENT: (Payload.W, "tij"), Datum.GRADIENT: (Payload.H, "tij"),
    Datum.SUM: (Payload.S, "tji"), Datum.BUFFERS: (Payload.R, "tij"),
}  # fmt: skip
_MAKERS = frozenset({*COMPUTE, Kind.ADD, Kind.OUTER})
_READERS = _MAKERS | {Kind.UPDATE}


def route(plan: Plan, programs: Sequence[Program]) -> tuple[Program, ...]:
    """Insert every SEND and RECV but those of sharded parameters, of batches and of norms.

    Args:
        programs: with all that is computed, on every worker.
    """
    ways = _Ways(plan, programs)
    return tuple(tuple(_routed(plan, ways, program, w)) for w, program in enumerate(programs))


@final
class _Ways:
    """Know who makes what, where, and who reads it; versions have ways of their own."""

    def __init__(self, plan: Plan, programs: Sequence[Program]) -> None:
        self.flows = [Dataflow(plan, w) for w in range(len(programs))]
        self.makers: dict[Item, tuple[int, int]] = {}  # who, and where in its program
        self.readers: dict[Item, int] = {}
        self.placed = set(_placed(self.flows, programs))
        for w, program in enumerate(programs):
            for n, a in enumerate(program):
                if a.kind in _MAKERS:
                    self.makers |= dict.fromkeys(self.flows[w](a).makes, (w, n))
        for w, program in enumerate(programs):
            for a in program:
                if a.kind in _READERS and (a.kind is not Kind.UPDATE or plan.owner(a.j) == w):
                    for item in self.flows[w](a).reads:
                        if item[0] in _PAYLOADS and item in self.makers:
                            self.readers[item] = w

    def received(self, a: Action, w: int) -> Iterator[tuple[Item, int]]:
        """Yield what an action reads, and who has made it, where that is another worker."""
        for item in self.flows[w](a).reads:
            maker = self.makers.get(item, (w, 0))[0] if item[0] in _PAYLOADS else w
            if maker != w and (w, item) not in self.placed:
                yield item, maker

    def sent(self, a: Action, n: int, w: int) -> Iterator[tuple[Item, int]]:
        """Yield what an action at a place is the last to make, and who reads it elsewhere."""
        for item in self.flows[w](a).makes:
            is_due = self.makers.get(item) == (w, n) and (w, item) not in self.placed
            if is_due and self.readers.get(item, w) != w:
                yield item, self.readers[item]


def _placed(flows: Sequence[Dataflow], programs: Sequence[Program]) -> Iterator[tuple[int, Item]]:
    """Yield worker, and what it receives or sends where another pass has said so."""
    for w, program in enumerate(programs):
        for a in program:
            row = flows[w](a) if a.kind in (Kind.SEND, Kind.RECV) else Flow()
            yield from ((w, item) for item in (*row.reads, *row.makes))


def _routed(plan: Plan, ways: _Ways, program: Program, w: int) -> Iterator[Action]:
    early = _early_totals(plan, ways, w) if plan.late_updates else []
    inbox = {} if plan.axes.placement.runs_whole_micro else _versions_due(plan, w)
    n = 0
    for is_update, group in _grouped(program):
        while early and early[0].s <= group[0].s:
            yield early.pop(0)
        if is_update:
            yield from _updated(plan, ways, group, w)
        else:
            (a,) = group
            yield from _carrying(Kind.RECV, a, ways.received(a, w))
            if a.kind in COMPUTE:
                yield from filter(None, [inbox.pop(x, None) for x in ways.flows[w](a).reads])
            yield a
            if a.kind in _MAKERS:
                yield from _carrying(Kind.SEND, a, ways.sent(a, n, w))
        n += len(group)
    yield from inbox.values()  # what nobody read any more: all end with the same weights


def _grouped(program: Program) -> Iterator[tuple[bool, list[Action]]]:
    """Yield updates of one step that are one behind the other together, all else alone."""
    for key, actions in groupby(program, key=lambda a: (a.kind is Kind.UPDATE, a.t)):
        if key[0]:
            yield True, list(actions)
        else:
            yield from ((False, [a]) for a in actions)


def _carrying(kind: Kind, at: Action, items: Iterable[tuple[Item, int]]) -> Iterator[Action]:
    """Yield the messages that carry items at an action, to or from other workers."""
    for item, peer in items:
        payload, names = _PAYLOADS[datum := item[0]]
        given: dict[str, Any] = dict(zip(names, item[1:], strict=False))
        if datum is Datum.SUM and given["i"] is None:
            payload = Payload.T
        yield message(kind, payload, at, peer, **given)


# ---------------------------------------------------------------------- versions


def _updated(plan: Plan, ways: _Ways, group: list[Action], w: int) -> Iterator[Action]:
    """Yield the updates of one place with the totals before them, and the versions behind."""
    own = [a for a in group if plan.makes_versions(w, a.j)]
    if not plan.late_updates:
        yield from _totals(ways, own, w)
    yield from own
    for a in () if plan.axes.weights.is_local else group:
        if not plan.axes.placement.runs_whole_micro:
            yield from _to_holders(plan, a)
        elif not plan.axes.sharding.gathers:  # else parameters come when they are used
            yield from _along_chain(plan, a, w)


def _totals(ways: _Ways, updates: list[Action], w: int) -> Iterator[Action]:
    for a in sorted(updates, key=lambda a: -a.j):  # backwards end with the first stage
        yield from _carrying(Kind.RECV, a, ways.received(a, w))


def _early_totals(plan: Plan, ways: _Ways, w: int) -> list[Action]:
    """Receive the total of each step in the slot after its last backward, in that order."""
    ended = [
        Action(kind=Kind.UPDATE, t=t, j=j, v=t + 1, s=plan.end(t, j) + 1)
        for t in range(plan.num_steps)
        for j in range(plan.num_stages)
        if plan.owner(j) == w
    ]
    return sorted(_totals(ways, ended, w), key=lambda a: a.s)


def _along_chain(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Receive a version, unless it is made here, and hand it on at once."""
    if (giver := plan.giver(w, a.j)) is not None:
        yield _version(plan, Kind.RECV, Payload.P, a, giver)
    for taker in plan.takers(w, a.j):
        yield _version(plan, Kind.SEND, Payload.P, a, taker)


def _to_holders(plan: Plan, update: Action) -> Iterator[Action]:
    """Send a version to all who hold the stage, and to all who use its parameters elsewhere."""
    j = update.j
    for other in plan.axes.placement.workers_of(j):
        if other != plan.owner(j):
            yield _version(plan, Kind.SEND, Payload.P, update, other)
    for other in version_readers(plan, j):
        yield _version(plan, Kind.SEND, Payload.V, update, other)


def _versions_due(plan: Plan, w: int) -> dict[Item, Action]:
    """Return what worker w receives of owners, in the order of versions."""
    found: dict[Item, Action] = {}
    for t in range(plan.num_steps):
        for j in range(plan.num_stages):
            owner, v = plan.owner(j), t + 1
            update = Action(kind=Kind.UPDATE, t=t, j=j, v=v, s=plan.end(t, j) + 1)
            if w != owner and w in plan.axes.placement.workers_of(j):
                found[Datum.WEIGHTS, j, v] = _version(plan, Kind.RECV, Payload.P, update, owner)
            if w in version_readers(plan, j):
                found[Datum.WEIGHTS, j, v] = _version(plan, Kind.RECV, Payload.V, update, owner)
    return found


def _version(plan: Plan, kind: Kind, payload: Payload, update: Action, peer: int) -> Action:
    assert update.v is not None
    t = plan.first_read(update.v, update.j)
    return message(kind, payload, update, peer, t=t, v=update.v)
