"""The memory of workers that run whole micro-batches, followed along their programs.

    versions   from when a buffer waits for a version, or an update makes it, to when a forward
               shows a newer one; of sharded weights an owner keeps the one before its newest
               until the last who reads it has it
    fetched    from when a buffer waits for a stage of another worker to the FREE behind its use
    gradients  from a backward to when they are added, sent or used
    sums       from when a buffer waits for one, or is filled, to when it is used, or has left; and
               so gradients of others, which are in the sum when they have been added

What is sent has left when the slot is over in which its receiver waits for it. Where all workers
have all weights, buffers are kept for the next use, so that each stage has as many as it ever
needs at once. Where weights are sharded memory comes and goes, and peaks may differ in time.

Where no worker has room for all stages (is_lean), gradients are there for longer:

    own ones      twice when they are made: where autograd has them, and in a buffer
    those that    MOST_BEHIND at least, as an owner goes on when so many wait; none behind the
    are added     update that needs their sum
    those that    MOST_LEAVING at least, as a worker goes on when so many are under way
    are sent
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import accumulate, zip_longest
from typing import NamedTuple, TypeAlias

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload, Program
from lightning_cyclic.plan.dataflow import peak
from lightning_cyclic.plan.passes.sums import MOST_BEHIND, MOST_LEAVING
from lightning_cyclic.plan.passes.updates import calls

_SUMS = (Payload.S, Payload.T)
_GRADIENTS = (*_SUMS, Payload.H)
_Posted: TypeAlias = Mapping[tuple[object, ...], int]  # a message -> slot of its receive


class Span(NamedTuple):
    """Say what a stage has from where to where in a program: a half-open span of positions."""

    kind: str  # "versions", "fetched", "gradients" or "sums"
    j: int
    begin: int
    end: int


def spans(plan: Plan, *, is_lean: bool = False) -> tuple[tuple[Span, ...], ...]:
    """Return what each worker has, besides one version of its own stages.

    Args:
        plan: whose workers run whole micro-batches; of enough steps to be steady.
        is_lean: none has room for all stages; with sharding "full", each is ahead of others by as
            much as the bounds of such runs let it be.
    """
    programs = plan.programs
    posted = {
        _message(a, a.peer, w): a.s
        for w, program in enumerate(programs)
        for a in program
        if a.kind is Kind.RECV
    }
    leavings = (_Leaving(program, w, posted) for w, program in enumerate(programs))
    is_lean = is_lean and plan.axes.sharding.gathers
    return tuple(
        (
            *_gradients(plan, program, leaving),
            *_weights(plan, program, leaving),
            *(_longer(program, leaving) if is_lean else ()),
        )
        for program, leaving in zip(programs, leavings, strict=True)
    )


def _weights(plan: Plan, program: Program, leaving: _Leaving) -> Iterator[Span]:
    if not plan.axes.sharding.gathers:
        yield from _versions(program)
        return
    yield from _fetched(program)
    if not plan.axes.weights.at_end_of_step:
        yield from _older(plan, program, leaving)


def most_at_once(found: tuple[Span, ...], kind: str) -> dict[int, int]:
    """Count the most buffers of a kind that each stage needs at once."""
    by_stage: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for x in found:
        if x.kind == kind:
            by_stage[x.j].append((x.begin, x.end, 1))
    return {j: int(peak(each)) for j, each in by_stage.items()}


def series(
    found: tuple[Span, ...], kind: str, param_bytes: tuple[float, ...], length: int
) -> list[float]:
    """Return the bytes of a kind at each place of a program."""
    changes = [0.0] * (length + 1)
    for x in found:
        if x.kind == kind:
            changes[x.begin] += param_bytes[x.j]
            changes[min(x.end, length)] -= param_bytes[x.j]
    return list(accumulate(changes))[:length]


class _Leaving:
    """Know where in a program what is sent has left."""

    def __init__(self, program: Program, w: int, posted: _Posted) -> None:
        self._slots = list(accumulate((a.s for a in program), max))
        self._w = w
        self._posted = posted

    def end(self, a: Action, n: int) -> int:
        taken = max(a.s, self._posted.get(_message(a, self._w, a.peer), a.s))
        return max(n + 1, bisect_right(self._slots, taken))


def _message(a: Action, source: int | None, target: int | None) -> tuple[object, ...]:
    return a.payload, a.t, a.i, a.j, a.v, source, target


def _gradients(plan: Plan, program: Program, leaving: _Leaving) -> Iterator[Span]:
    """Yield the gradients of backwards, and the sums that come, grow and go."""
    own: dict[tuple[int, int], int] = {}  # step, stage -> since when
    come: dict[tuple[object, ...], int] = {}  # a total may be waited for before a sum has left
    spans_of_calls = calls(plan, program)
    for n, a in enumerate(program):
        key = a.t, a.j
        if a.kind is Kind.B:
            own.setdefault(key, n)
        elif a.kind is Kind.RECV and a.payload in _GRADIENTS:
            come[a.payload, *key, *[a.i] * (a.payload is Payload.H)] = n
        elif a.kind is Kind.ADD:
            begin = come.pop((Payload.H, *key, a.i), None)
            if begin is None:
                yield Span("gradients", a.j, own.pop(key), n + 1)
            elif (Payload.S, *key) in come:
                yield Span("sums", a.j, begin, n + 1)
            come.setdefault((Payload.S, *key), n if begin is None else begin)
        elif a.kind is Kind.UPDATE or (a.kind is Kind.SEND and a.payload in _GRADIENTS):
            if key in own:
                yield Span("gradients", a.j, own.pop(key), n + 1)
            if a.kind is Kind.SEND:
                begin = n if a.payload is Payload.H else come.pop((Payload.S, *key), n)
                yield Span("sums", a.j, begin, leaving.end(a, n))
            else:
                used = [come.pop((x, *key)) for x in _SUMS if (x, *key) in come]
                yield from (Span("sums", a.j, begin, spans_of_calls[n][1]) for begin in used)


def _longer(program: Program, leaving: _Leaving) -> Iterator[Span]:
    """Yield for how much longer gradients are there where a worker is ahead of others.

    The first that is added becomes the sum, which is there anyway.
    """
    over, left = _over(program), _left(program)
    begun: set[tuple[int, int]] = set()  # sums
    come: set[tuple[int, int, int | None]] = set()
    for n, a in enumerate(program):
        if a.kind is Kind.B:
            yield Span("gradients", a.j, n, n + 1)
        elif a.kind is Kind.RECV and a.payload is Payload.H:
            come.add((a.t, a.j, a.i))
        elif a.kind is Kind.ADD:
            kind = "sums" if (a.t, a.j, a.i) in come else "gradients"
            if (a.t, a.j) in begun:
                yield Span(kind, a.j, n + 1, max(over[n], n + 1))
            begun.add((a.t, a.j))
        elif a.kind is Kind.SEND and a.payload is Payload.H:
            end = leaving.end(a, n)
            yield Span("sums", a.j, end, max(left[n], end))


def _over(program: Program) -> dict[int, int]:
    """Return addition -> where it is over: behind MOST_BEHIND others, or where it is needed."""
    over: dict[int, int] = {}
    waiting: deque[int] = deque()
    last: dict[tuple[int, int], int] = {}  # step, stage -> its last addition so far
    for n, a in enumerate(program):
        if a.kind is Kind.ADD:
            last[a.t, a.j] = n
            waiting.append(n)
            if len(waiting) > MOST_BEHIND:
                over[waiting.popleft()] = n
        elif a.kind is Kind.UPDATE:
            while waiting and waiting[0] <= last.get((a.t, a.j), -1):
                over[waiting.popleft()] = n
    return over | dict.fromkeys(waiting, len(program))


def _left(program: Program) -> dict[int, int]:
    """Return gradient that is sent -> where it has left: MOST_LEAVING later."""
    sends = [n for n, a in enumerate(program) if a.kind is Kind.SEND and a.payload is Payload.H]
    return dict(zip_longest(sends, sends[MOST_LEAVING:], fillvalue=len(program)))


def _fetched(program: Program) -> Iterator[Span]:
    """Yield the stages of others, from the buffer that waits for one to its FREE."""
    since: dict[int, int] = {}
    for n, a in enumerate(program):
        if a.kind is Kind.RECV and a.payload is Payload.P:
            since[a.j] = n
        elif a.kind is Kind.FREE and a.j in since:
            yield Span("fetched", a.j, since.pop(a.j), n)


def _older(plan: Plan, program: Program, leaving: _Leaving) -> Iterator[Span]:
    """Yield the version before an owner's newest, until nobody reads it any more."""
    ends: dict[tuple[int, int], int] = {}
    for n, a in enumerate(program):
        is_sent = a.kind is Kind.SEND and a.payload is Payload.P
        if a.v is not None and (is_sent or a.kind in (Kind.F, Kind.B)):
            end = leaving.end(a, n) if is_sent else n + 1
            ends[a.j, a.v] = max(end, ends.get((a.j, a.v), 0))
    for n, (begin, end) in calls(plan, program).items():
        a = program[n]
        last_use = ends.get((a.j, (a.v or 0) - 1), 0)
        if last_use > end:  # else the new one is made in its place
            yield Span("versions", a.j, begin, last_use)


def _versions(program: Program) -> Iterator[Span]:
    """Yield the versions of each stage but the first that is read, which is there before."""
    read: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # stage -> where, version
    made: defaultdict[int, list[tuple[int, int, bool]]] = defaultdict(list)
    for n, a in enumerate(program):
        if a.kind is Kind.F:
            read[a.j].append((n, a.v or 0))
        elif a.kind is Kind.UPDATE or (a.kind is Kind.RECV and a.payload is Payload.P):
            made[a.j].append((n, a.v or 0, a.kind is Kind.UPDATE))
    for j, each in made.items():
        for n, v, is_update in each:
            later = [(m, u) for m, u in read[j] if m > n]
            if is_update and (not later or later[0][1] >= v):
                continue  # in the place of the one before
            end = next((m for m, u in later if u >= v), len(program))
            yield Span("versions", j, n, end)  # the one before goes when it is shown
