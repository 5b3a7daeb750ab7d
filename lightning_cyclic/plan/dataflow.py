"""Dataflow: what each action reads, makes and frees, in one table.

    F          reads  weights, the stage's input, buffers, batch
               makes  its graph, the next stage's input, losses, the buffers for the micro-batch
                      that is handed them next
    B          reads  weights, graph, the outputs' gradient           and frees the last two
               makes  a gradient, and the input's gradient; the sum up to its micro-batch where
                      it adds at once
               of a micro-batch that is not its replica's first reads, and frees, the gradient of
               the one before, which is in its own
    I, W       are a B in two parts: what I leaves, W takes, for the gradient and its sum
    ADD        reads  gradient, the sum of those before               makes the new sum
    UPDATE     reads  the sum of all, the version before, norms       makes weights
    TELL       reads  losses
    FREE       reads  weights, once they have come                    and frees them
    SEND       reads  what it carries                                 and frees it if it goes away
    RECV       makes  what it carries

Names of data are tuples, each with one maker; a message carries a datum under its name. The
passes, the checker, the account, the simulator, the planner's memory and the runtime all follow
this table. What is given from the beginning (the first weights, the batch of who begins a step) is
made by nobody.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.roles import (
    adds_at_once,
    first_that_counts,
    first_users,
    handed_at,
    handed_before,
    reads_tied,
    stages_until,
    workers_of_later_users,
)

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


class Datum(enum.Enum):
    __hash__ = object.__hash__  # an enum's own runs Python, and items are keys

    WEIGHTS = enum.auto()  # (j, v)
    INPUT = enum.auto()  # (t, i, j): activations that enter stage j
    GRAPH = enum.auto()  # (t, i, j): what a forward leaves for its backward
    WORK = enum.auto()  # (t, i, j): what I leaves for its W
    OUTPUT_GRADIENT = enum.auto()  # (t, i, j): gradient of the activations that leave stage j
    TIED_GRADIENT = enum.auto()  # (t, i, j, w): of parameters of stage j, from worker w's stages
    GRADIENT = enum.auto()  # (t, i, j): of one micro-batch, and of its replica's before it
    SUM = enum.auto()  # (t, j, i): of gradients up to micro-batch i; (t, j, None): of all
    BUFFERS = enum.auto()  # (t, i, j): module buffers that a micro-batch is handed
    BATCH = enum.auto()  # (t,)
    LOSSES = enum.auto()  # (t,)
    NORMS = enum.auto()  # (t, j)
    START = enum.auto()  # (t,): the word that a step may begin


Item: TypeAlias = tuple[object, ...]  # a Datum and its numbers


class Flow(NamedTuple):
    """Hold a row of the table: names of what an action reads, makes and frees."""

    reads: tuple[Item, ...] = ()
    makes: tuple[Item, ...] = ()
    frees: tuple[Item, ...] = ()


@final
class Dataflow:
    """Look actions of a worker up in the table.

    Args:
        plan: says which parameters stages share, which decide together, and where the last stage
            is. [None: of programs alone, whose stages share none; what an action could read is
            read if it is there]
        w: the worker.
    """

    def __init__(self, plan: Plan | None = None, w: int = 0) -> None:
        self._plan = plan
        self._w = w
        self._ends = {} if plan is None else stages_until(plan)

    def __call__(self, a: Action) -> Flow:
        """Return the row of an action."""
        return _ROWS[a.kind](self, a)

    def _forward(self, a: Action) -> Flow:
        t, i, j, plan = a.t, a.i, a.j, self._plan
        reads: list[Item] = [(Datum.START, t), (Datum.BATCH, t)]
        makes: list[Item] = [(Datum.GRAPH, t, i, j)]
        if plan is None or j + 1 < plan.num_stages:
            makes.append((Datum.INPUT, t, i, j + 1))
        if plan is None or j + 1 == plan.num_stages:
            makes.append((Datum.LOSSES, t))
        if plan is None:
            reads.append((Datum.BUFFERS, t, i, j))
            makes.append((Datum.BUFFERS, _NEXT, _NEXT, j))
        elif plan.relayed:
            k = handed_before(plan, a)
            if k > 0 and j in plan.relayed:
                reads.append((Datum.BUFFERS, t, i, j))
            makes += [(Datum.BUFFERS, *handed_at(plan, k + 1), x) for x in self._ends.get(j, ())]
        if plan is None or j > 0:
            reads.append((Datum.INPUT, t, i, j))
        reads.append((Datum.WEIGHTS, j, a.v))
        if plan is not None and plan.tied:
            reads += [(Datum.WEIGHTS, x, reads_tied(plan, a, x)) for x in self._borrowed(plan, j)]
        return Flow(tuple(reads), tuple(makes))

    def _borrowed(self, plan: Plan, j: int) -> Iterator[int]:
        """Yield the stages whose parameters stage j uses, of those that this worker lacks."""
        workers_of = plan.axes.placement.workers_of
        return (x for x in first_users(plan, j) if self._w not in workers_of(x))

    def _backward(self, a: Action) -> Flow:
        first, second = self._first_half(a), self._second_half(a)
        taken = (*first.frees[:-1], *second.frees)
        reads = (*taken, *first.reads[len(first.frees) - 1 :])
        return Flow(reads, first.makes + second.makes, (*taken, first.frees[-1]))

    def _first_half(self, a: Action) -> Flow:
        """Return what is read, made and freed of a backward but for the weights' gradient."""
        t, i, j, plan = a.t, a.i, a.j, self._plan
        taken: list[Item] = [(Datum.GRAPH, t, i, j)]
        makes: list[Item] = []
        if plan is None or j + 1 < plan.num_stages:
            taken.append((Datum.OUTPUT_GRADIENT, t, i, j))
        if plan is None or j > 0:
            makes.append((Datum.OUTPUT_GRADIENT, t, i, j - 1))
        reads = (*taken, (Datum.WEIGHTS, j, a.v), *self._norms_for_scale(a))
        return Flow(reads, tuple(makes), (*taken, (Datum.INPUT, t, i, j)))

    def _second_half(self, a: Action) -> Flow:
        """Return what is read, made and freed for the weights' gradient."""
        t, i, j, plan = a.t, a.i, a.j, self._plan
        if plan is None:
            return Flow((), ((Datum.GRADIENT, t, i, j), *_any_sum(a)))
        taken: list[Item] = []
        makes: list[Item] = []
        if plan.tied:
            users = workers_of_later_users(plan, a)
            taken += [(Datum.TIED_GRADIENT, t, i, j, w) for w in users]
            makes += [(Datum.TIED_GRADIENT, t, i, x, self._w) for x in first_users(plan, j)]
        taken += self._summed_before(plan, a)
        makes.append((Datum.GRADIENT, t, i, j))
        if adds_at_once(plan, a):
            makes.append(self._sum(plan, a))
        return Flow(tuple(taken), tuple(makes), tuple(taken))

    def _input_gradient(self, a: Action) -> Flow:
        row = self._first_half(a)
        return row._replace(makes=(*row.makes, (Datum.WORK, a.t, a.i, a.j)))

    def _weight_gradient(self, a: Action) -> Flow:
        row, work = self._second_half(a), (Datum.WORK, a.t, a.i, a.j)
        return Flow((work, *row.reads), row.makes, (work, *row.frees))

    def _summed_before(self, plan: Plan, a: Action) -> Iterator[Item]:
        """Yield what a gradient is added to: of its replica, or all, if that is here."""
        i = a.i or 0
        if plan.sums_by_replica and (before := i - plan.copies_of_stages) >= 0:
            yield (Datum.GRADIENT, a.t, before, a.j)
        if adds_at_once(plan, a) and i > first_that_counts(plan):
            yield (Datum.SUM, a.t, a.j, i - 1)

    def _norms_for_scale(self, a: Action) -> Iterator[Item]:
        """Yield what the scale of a step's losses follows from: all that ended since the last."""
        plan = self._plan
        if plan is not None and plan.norms == "all":
            for t in range(plan.ended_before(a.t - 1) if a.t else 0, plan.ended_before(a.t)):
                yield from ((Datum.NORMS, t, j) for j in range(plan.num_stages))

    def _add(self, a: Action) -> Flow:
        assert a.i is not None
        taken: tuple[Item, ...] = ((Datum.GRADIENT, a.t, a.i, a.j),)
        if self._plan is None or a.i > first_that_counts(self._plan):
            taken = ((Datum.SUM, a.t, a.j, a.i - 1), *taken)
        made = (self._sum(self._plan, a),) if self._plan is not None else _any_sum(a)
        return Flow(taken, made, taken)

    def _sum(self, plan: Plan, a: Action) -> Item:
        is_whole = a.i == plan.num_microbatches - 1
        return (Datum.SUM, a.t, a.j, None if is_whole else a.i)

    def _update(self, a: Action) -> Flow:
        assert a.v is not None
        reads: list[Item] = [(Datum.WEIGHTS, a.j, a.v - 1)]
        taken: tuple[Item, ...] = ((Datum.SUM, a.t, a.j, None),)
        if (plan := self._plan) is not None and plan.updates_hear_norms:
            reads += [(Datum.NORMS, a.t, j) for j in range(plan.num_stages)]
        return Flow((*taken, *reads), ((Datum.WEIGHTS, a.j, a.v),), taken)

    def _free(self, a: Action) -> Flow:
        weights = ((Datum.WEIGHTS, a.j, a.v),)
        return Flow(weights, (), weights)

    def _send(self, a: Action) -> Flow:
        if a.payload in _CARRY_NOTHING:
            return Flow()
        if a.payload is Payload.N:  # which follow from the sum of all
            return Flow(((Datum.SUM, a.t, a.j, None),))
        item = self._carried(a, self._w)
        return Flow((item,), (), (item,) if a.payload in _GO_AWAY else ())

    def _receive(self, a: Action) -> Flow:
        if a.payload in _CARRY_NOTHING:
            return Flow()
        return Flow((), (self._carried(a, a.peer),))

    def _carried(self, a: Action, sender: int | None) -> Item:
        """Name what a message carries."""
        plan = self._plan
        match a.payload:
            case Payload.W:
                return (Datum.TIED_GRADIENT, a.t, a.i, a.j, sender)
            case Payload.R if plan is None and a.kind is Kind.SEND:
                return (Datum.BUFFERS, _NEXT, _NEXT, a.j)
            case Payload.C:
                return (Datum.BUFFERS, a.t + 1, 0, a.j)
            case _:
                assert a.payload is not None
                datum, fields = _FIELDS[a.payload]
                return (datum, *(getattr(a, name) for name in fields))


def _any_sum(a: Action) -> tuple[Item, Item]:
    """Name the sum that a gradient is in, where nobody says whether it is the last one."""
    return (Datum.SUM, a.t, a.j, a.i), (Datum.SUM, a.t, a.j, None)


_NEXT = None  # in place of the micro-batch that is handed buffers, where nobody says which it is
_FIELDS = {
    Payload.S: (Datum.SUM, "tji"), Payload.T: (Datum.SUM, "tji"),
    Payload.R: (Datum.BUFFERS, "tij"),
    Payload.A: (Datum.INPUT, "tij"), Payload.G: (Datum.OUTPUT_GRADIENT, "tij"),
    Payload.H: (Datum.GRADIENT, "tij"), Payload.P: (Datum.WEIGHTS, "jv"),
    Payload.V: (Datum.WEIGHTS, "jv"), Payload.D: (Datum.BATCH, "t"),
    Payload.L: (Datum.LOSSES, "t"), Payload.N: (Datum.NORMS, "tj"), Payload.K: (Datum.START, "t"),
}  # fmt: skip
_GO_AWAY = frozenset({Payload.A, Payload.G, Payload.W, Payload.S, Payload.T, Payload.H})
_CARRY_NOTHING = frozenset({Payload.X, Payload.M})  # that an action reads

_NO_MESSAGES = [kind for kind in Kind if kind not in (Kind.SEND, Kind.RECV)]
_ROWS: dict[Kind, Callable[[Dataflow, Action], Flow]] = {
    Kind.F: Dataflow._forward,
    Kind.B: Dataflow._backward,
    Kind.I: Dataflow._input_gradient,
    Kind.W: Dataflow._weight_gradient,
    Kind.ADD: Dataflow._add,
    Kind.UPDATE: Dataflow._update,
    Kind.TELL: lambda _, a: Flow(((Datum.LOSSES, a.t),)),
    Kind.GATHER: lambda _, a: Flow(),
    Kind.FREE: Dataflow._free,
    Kind.SEND: Dataflow._send,
    Kind.RECV: Dataflow._receive,
}


# ---------------------------------------------------------------------- how long things are kept


class Life(NamedTuple):
    """Say from where to where in a program an item is kept: a half-open span of positions.

    ``maker`` is the action that made or received it; None for what was given.
    """

    item: Item
    maker: Action | None
    begin: int
    end: int


def lives(program: Iterable[Action], kinds: frozenset[Datum]) -> Iterator[Life]:
    """Yield how long each item of some kinds is kept along a worker's program.

    From the action that makes it (-1: given), or the first that computes with it where it is
    received, to the one that frees it, or to behind the last that reads it. An update replaces
    the version before it in place where nothing reads that later. What is made and never read is
    kept for its own action.
    """
    flow, concerned = Dataflow(), _concerned_with(kinds)
    found: dict[Item, Life] = {}
    for n, a in enumerate(program):
        if (a.payload or a.kind) not in concerned:
            continue
        row = flow(a)
        for item in row.reads:
            if item[0] in kinds and (life := _read(found.get(item), item, n, a)) is not None:
                found[item] = life
        for item in row.makes:
            if item[0] in kinds and (item not in found or a.kind is Kind.RECV):
                if item in found:  # dropped in between, and received again
                    yield found[item]
                found[item] = Life(item, a, n, -1 if a.kind is Kind.RECV else n + 1)
        for item in row.frees:
            if item in found:
                yield found.pop(item)._replace(end=n)
    yield from (life for life in found.values() if life.end >= 0)


@cache
def _concerned_with(kinds: frozenset[Datum]) -> frozenset[Kind | Payload]:
    """Name the rows of the table that have items of some kinds, without a plan."""
    flow, found = Dataflow(), set()
    for name in (*_NO_MESSAGES, *Payload):
        ways = [name] if isinstance(name, Kind) else [Kind.SEND, Kind.RECV]
        payload = None if isinstance(name, Kind) else name
        rows = [flow(Action(kind=kind, payload=payload, t=0, j=0, i=0, v=0)) for kind in ways]
        if any(item[0] in kinds for row in rows for items in row for item in items):
            found.add(name)
    return frozenset(found)


def _read(life: Life | None, item: Item, n: int, a: Action) -> Life | None:
    """Return the life of an item that is read; None where that does not count."""
    if a.kind is Kind.SEND and (life is None or life.end < 0):
        return None  # handed on as soon as it comes; needed later, or not at all
    if life is None:
        life = Life(item, None, -1, 0)
    elif life.end < 0:  # received, and not needed before
        life = life._replace(begin=n)
    in_place = a.kind is Kind.UPDATE and item[0] is Datum.WEIGHTS
    return life._replace(end=max(life.end, n) if in_place else n + 1)


def peak(spans: Iterable[tuple[int, int, float]]) -> float:
    """Return the greatest sum of weights of half-open spans (begin, end, weight) that overlap.

    Example:
        >>> peak([(0, 2, 1), (1, 3, 5), (3, 4, 7)])
        7
    """
    changes: dict[int, float] = {}
    for begin, end, weight in spans:
        changes[begin] = changes.get(begin, 0) + weight
        changes[end] = changes.get(end, 0) - weight
    return max(accumulate(changes[position] for position in sorted(changes)), default=0)


def live_activations(program: Iterable[Action]) -> int:
    """Count the most stage-activations that a worker keeps from an F to its B, or W.

    Example:
        >>> from lightning_cyclic.plan.actions import parse
        >>> live_activations(map(parse, ["0F0#0", "0F1#0", "0B0#0", "0B1#0"]))
        2
    """
    graphs = lives(program, frozenset({Datum.GRAPH, Datum.WORK}))  # one behind the other
    return int(peak((life.begin, life.end, 1) for life in graphs))


def live_versions(program: Iterable[Action]) -> dict[int, int]:
    """Count, for each stage, the most versions that a worker must keep at once.

    What is being received or made is counted only from its first reader on, as it may replace the
    old one.

    Returns:
        Peak by stage; stages of which the program reads nothing are left out.
    """
    spans: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for life in lives(program, frozenset({Datum.WEIGHTS})):
        _, j, _ = life.item
        assert isinstance(j, int)
        spans[j].append((life.begin, life.end, 1))
    return {j: int(peak(found)) for j, found in spans.items()}
