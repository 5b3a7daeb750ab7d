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
               of local steps what is added is how the gradients have changed weights
    OUTER      reads  the sum of all                                  makes outer weights
    UPDATE     reads  the sum of all, the version before, norms       makes weights
               of local steps reads the own gradient in place of the sum, but where that is added
               to others'; and the outer weights of an exchange, where it uses them
    TELL       reads  losses
    FREE       reads  weights, once they have come                    and frees them
    FETCH      reads  the copy of a stage's optimizer state           and frees it
               makes  state, of which its UPDATE makes new state
    EVICT      reads  new state                                       makes the next FETCH's copy
               FREE of state reads both, and frees the state
    FETCH_P    reads  the copy of a stage's weights, which stays      makes the weights
    EVICT_P    reads  a new version                                   makes its copy, in the place
               of the one before, as its UPDATE has made the version
               FREE of weights reads both, and frees the weights
    EVICT_A    reads  a graph                                         makes its copy
               FREE reads both, and frees the graph; FETCH frees the copy, and makes the graph
    SEND       reads  what it carries                                 and frees it if it goes away
    RECV       makes  what it carries

Names of data are tuples, each with one maker, but for graphs and weights that have left memory,
and come back; a message carries a datum under its name. The
passes, the checker, the account, the simulator, the planner's memory and the runtime all follow
this table. What is given from the beginning (the first weights, the batch of who begins a step) is
made by nobody.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple, TypeAlias, final

from lightning_cyclic.plan.actions import COMPUTE, MAKE_GRADIENTS, Action, Kind, Payload
from lightning_cyclic.plan.plan import Plan
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
    OUTER = enum.auto()  # (j, t): outer weights, made of the differences of a step
    BUFFERS = enum.auto()  # (t, i, j): module buffers that a micro-batch is handed
    BATCH = enum.auto()  # (t,)
    LOSSES = enum.auto()  # (t,)
    NORMS = enum.auto()  # (t, j)
    START = enum.auto()  # (t,): the word that a step may begin
    STATE = enum.auto()  # (j, t): optimizer state in memory, for an update
    NEW_STATE = enum.auto()  # (j, t): what the update has made of it
    COPY = enum.auto()  # (j, t): state where there is room, of which the update of step t fetches
    GRAPH_COPY = enum.auto()  # (t, i, j): a graph where there is room
    WEIGHTS_COPY = enum.auto()  # (j, v): weights where there is room


Item: TypeAlias = tuple[object, ...]  # a Datum and its numbers

IN_MEMORY = {Payload.O: Datum.STATE, Payload.P: Datum.WEIGHTS}
"""What a FETCH makes."""
PUT_AWAY = {Payload.O: Datum.COPY, Payload.P: Datum.WEIGHTS_COPY}
"""What an EVICT makes."""


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

    def _outer(self, a: Action) -> Flow:
        total = ((Datum.SUM, a.t, a.j, None),)
        return Flow(total, ((Datum.OUTER, a.j, a.t),), total)

    def _update(self, a: Action) -> Flow:
        assert a.v is not None
        reads: list[Item] = [(Datum.WEIGHTS, a.j, a.v - 1)]
        taken: tuple[Item, ...] = ((Datum.SUM, a.t, a.j, None),)
        plan = self._plan
        if plan is not None and plan.axes.weights.is_local:
            taken = ((Datum.GRADIENT, a.t, self._w, a.j),) * (not plan.exchanges(a.t, a.j))
            if (step := plan.used(a.t, a.j)) is not None:
                reads.append((Datum.OUTER, a.j, step))
        if plan is not None and plan.updates_hear_norms:
            reads += [(Datum.NORMS, a.t, j) for j in range(plan.num_stages)]
        made: tuple[Item, ...] = ((Datum.WEIGHTS, a.j, a.v),)
        replaced: tuple[Item, ...] = ()
        if plan is not None and plan.tiers is not None:
            if plan.tiers.moved[a.j]:
                taken = (*taken, (Datum.STATE, a.j, a.t))
                made = (*made, (Datum.NEW_STATE, a.j, a.t))
            if plan.tiers.moves_weights(a.j):  # of which there is one version
                replaced = ((Datum.WEIGHTS, a.j, a.v - 1),)
        return Flow((*taken, *reads), made, (*taken, *replaced))

    def _free(self, a: Action) -> Flow:
        if a.payload is Payload.A:
            graph, copy = _graph_and_copy(a)
            return Flow((graph, copy), (), (graph,))
        if a.payload is Payload.O:
            state = (Datum.NEW_STATE, a.j, a.t)
            return Flow((state, (Datum.COPY, a.j, a.t + 1)), (), (state,))
        if a.payload is Payload.P:
            here, copied = (Datum.WEIGHTS, a.j, a.v), (Datum.WEIGHTS_COPY, a.j, a.v)
            return Flow((here, copied), (), (here,))
        weights = ((Datum.WEIGHTS, a.j, a.v),)
        return Flow(weights, (), weights)

    def _evict(self, a: Action) -> Flow:
        if a.payload is Payload.A:
            graph, copied = _graph_and_copy(a)
            return Flow((graph,), (copied,))
        if a.payload is Payload.P:
            assert a.v is not None
            older = (Datum.WEIGHTS_COPY, a.j, a.v - 1)
            here, copied = (Datum.WEIGHTS, a.j, a.v), (Datum.WEIGHTS_COPY, a.j, a.v)
            return Flow((here, older), (copied,), (older,))
        return Flow(((Datum.NEW_STATE, a.j, a.t),), ((Datum.COPY, a.j, a.t + 1),))

    def _fetch(self, a: Action) -> Flow:
        if a.payload is Payload.A:
            graph, copied = _graph_and_copy(a)
            return Flow((copied,), (graph,), (copied,))
        if a.payload is Payload.P:
            return Flow(((Datum.WEIGHTS_COPY, a.j, a.v),), ((Datum.WEIGHTS, a.j, a.v),))
        copy = ((Datum.COPY, a.j, a.t),)
        return Flow(copy, ((Datum.STATE, a.j, a.t),), copy)

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


def _graph_and_copy(a: Action) -> tuple[Item, Item]:
    return (Datum.GRAPH, a.t, a.i, a.j), (Datum.GRAPH_COPY, a.t, a.i, a.j)


_NEXT = None  # in place of the micro-batch that is handed buffers, where nobody says which it is
_FIELDS = {
    Payload.S: (Datum.SUM, "tji"), Payload.T: (Datum.SUM, "tji"),
    Payload.R: (Datum.BUFFERS, "tij"),
    Payload.A: (Datum.INPUT, "tij"), Payload.G: (Datum.OUTPUT_GRADIENT, "tij"),
    Payload.H: (Datum.GRADIENT, "tij"), Payload.P: (Datum.WEIGHTS, "jv"),
    Payload.U: (Datum.OUTER, "jt"),
    Payload.V: (Datum.WEIGHTS, "jv"), Payload.D: (Datum.BATCH, "t"),
    Payload.L: (Datum.LOSSES, "t"), Payload.N: (Datum.NORMS, "tj"), Payload.K: (Datum.START, "t"),
}  # fmt: skip
_GO_AWAY = frozenset({Payload.A, Payload.G, Payload.W, Payload.S, Payload.T, Payload.H})
_CARRY_NOTHING = frozenset({Payload.X, Payload.M})  # that an action reads

_ROWS: dict[Kind, Callable[[Dataflow, Action], Flow]] = {
    Kind.F: Dataflow._forward,
    Kind.B: Dataflow._backward,
    Kind.I: Dataflow._input_gradient,
    Kind.W: Dataflow._weight_gradient,
    Kind.ADD: Dataflow._add,
    Kind.OUTER: Dataflow._outer,
    Kind.UPDATE: Dataflow._update,
    Kind.TELL: lambda _, a: Flow(((Datum.LOSSES, a.t),)),
    Kind.GATHER: lambda _, a: Flow(),
    Kind.FREE: Dataflow._free,
    Kind.FETCH: Dataflow._fetch,
    Kind.EVICT: Dataflow._evict,
    Kind.SEND: Dataflow._send,
    Kind.RECV: Dataflow._receive,
}


# ---------------------------------------------------------------------- how long things are kept


class Life(NamedTuple):
    """Say from where to where in a program something of a stage is kept: half-open positions.

    Args:
        a: who made it, or read it first.
        half: where the first half of a backward has read it, and left work in its place.
    """

    a: Action
    begin: int
    half: int
    end: int


def activations(program: Iterable[Action]) -> Iterator[Life]:
    """Yield what forwards of a worker leave: until their B, or W which has what I left.

    What no backward takes is kept for its own forward.
    """
    kept: dict[tuple[int, int | None, int], tuple[Action, int]] = {}
    halves: dict[tuple[int, int | None, int], int] = {}
    for n, a in enumerate(program):
        cell = a.t, a.i, a.j
        if a.kind is Kind.F:
            kept[cell] = a, n
        elif a.kind is Kind.I:
            halves[cell] = n
        elif a.kind in MAKE_GRADIENTS and cell in kept:
            yield Life(*kept.pop(cell), halves.pop(cell, n), n)
    yield from (Life(a, n, n + 1, n + 1) for a, n in kept.values())


def absences(program: Iterable[Action]) -> dict[tuple[int, int | None, int], tuple[int, int]]:
    """Return (step, micro-batch, stage) -> from where to where its graph is not in memory."""
    found: dict[tuple[int, int | None, int], tuple[int, int]] = {}
    for n, a in enumerate(program):
        cell = a.t, a.i, a.j
        if a.payload is Payload.A and a.kind is Kind.FREE:
            found[cell] = n, n
        elif a.payload is Payload.A and a.kind is Kind.FETCH:
            found[cell] = found[cell][0], n
    return found


def versions(program: Iterable[Action]) -> Iterator[Life]:
    """Yield how long a worker keeps versions: to behind the last that reads or sends one.

    From the update that makes one, else from its first reader on, as what comes may replace the
    one before; the first from the beginning on. An update replaces a version in place where
    nobody reads it later.
    """
    found: dict[tuple[int, int], Life] = {}
    came: set[tuple[int, int]] = set()
    for n, a in enumerate(program):
        if a.v is None or a.kind is Kind.W:
            continue
        item = a.j, a.v - (a.kind is Kind.UPDATE)
        life = found.get(item) or Life(a, n if item[1] or item in came else -1, 0, 0)
        if a.kind in COMPUTE or (a.kind is Kind.SEND and life.end):
            found[item] = life._replace(end=n + 1)
        elif a.kind is Kind.UPDATE:
            found[item] = life._replace(end=max(life.end, n))
            found.setdefault((a.j, a.v), Life(a, n, 0, n + 1))
        elif a.kind in (Kind.FREE, Kind.RECV):  # it may come again
            came.add(item)
            if found.pop(item, None):
                yield life._replace(end=n) if a.kind is Kind.FREE else life
    yield from found.values()


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
    """Count the most stage-activations that a worker keeps from an F to its B, or W, in memory.

    Example:
        >>> from lightning_cyclic.plan.actions import parse
        >>> live_activations(map(parse, ["0F0#0", "0F1#0", "0B0#0", "0B1#0"]))
        2
    """
    program = tuple(program)
    away, found = absences(program), list[tuple[int, int, int]]()
    for life in activations(program):
        cell = life.a.t, life.a.i, life.a.j
        leaves, comes = away.get(cell, (life.begin, life.begin))
        found += [(life.begin, leaves, 1), (comes, life.end, 1)]
    return int(peak(found))


def live_versions(program: Iterable[Action]) -> dict[int, int]:
    """Count, for each stage, the most versions that a worker must keep at once.

    Returns:
        Peak by stage; stages of which the program reads nothing are left out.
    """
    spans: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for life in versions(program):
        spans[life.a.j].append((life.begin, life.end, 1))
    return {j: int(peak(found)) for j, found in spans.items()}
