"""Dataflow: what each action reads, makes and frees, in one table.

    F          reads  weights, the stage's input, buffers, batch
               makes  its graph, the next stage's input, losses
    B          reads  weights, graph, the outputs' gradient           and frees the last two
               makes  a gradient, which is in the sum, and the input's gradient
               of a further round reads, and frees, the gradient of the worker's round before
               where owners add (sharding "full"), or groups, it is in no sum before
    ADD        reads  gradient, sum                                   makes the new sum
    UPDATE     reads  sum, the version before, norms                  makes weights
    TELL       reads  losses
    FREE       reads  weights, once they have come                    and frees them
    SEND       reads  what it carries                                 and frees it if it goes away
    RECV       makes  what it carries

Names of data are tuples. The checker, the account, the simulator, the planner's memory and the
runtime all follow this table; who runs what is not in it. What is given from the beginning (the
first weights, batches, the inputs of the first stage) is made by nobody.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.ties import first_users, later_users, reads_tied

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


class Datum(enum.Enum):
    __hash__ = object.__hash__  # an enum's own runs Python, and items are keys

    WEIGHTS = enum.auto()  # (j, v)
    TIED = enum.auto()  # (j, v): parameters of stage j that other stages use
    INPUT = enum.auto()  # (t, i, j): activations that enter stage j
    GRAPH = enum.auto()  # (t, i, j): what a forward leaves for its backward
    OUTPUT_GRADIENT = enum.auto()  # (t, i, j): gradient of the activations that leave stage j
    TIED_GRADIENT = enum.auto()  # (t, i, j): gradient of parameters of stage j from later stages
    GRADIENT = enum.auto()  # (t, i, j): of one micro-batch, and of its worker's rounds before it
    SUM = enum.auto()  # (t, j, i): of gradients up to micro-batch i; (t, j, None): as far as it is
    TOTAL = enum.auto()  # (t, j): the sum of all micro-batches, where it has come as a whole
    BUFFERS = enum.auto()  # (t, i, j): module buffers that a micro-batch is handed
    LEFT_BUFFERS = enum.auto()  # (j,): those that the last forward has left
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
    """Look actions up in the table.

    Args:
        plan: says which parameters stages share, which decide together, and where the last stage
            is. [None: of programs alone, whose stages share none; what an action could read is
            read if it is there]
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self._plan = plan

    def __call__(self, a: Action) -> Flow:
        """Return the row of an action."""
        return _ROWS[a.payload or a.kind](self, a)

    def _forward(self, a: Action) -> Flow:
        t, i, j = a.t, a.i, a.j
        return Flow(
            (
                (Datum.START, t),
                (Datum.BATCH, t),
                (Datum.WEIGHTS, j, a.v),
                (Datum.INPUT, t, i, j),
                (Datum.BUFFERS, t, i, j),
                *self._tied(a),
            ),
            (
                (Datum.GRAPH, t, i, j),
                (Datum.INPUT, t, i, j + 1),
                (Datum.LEFT_BUFFERS, j),
                (Datum.LOSSES, t),
            ),
        )

    def _tied(self, a: Action) -> Iterator[Item]:
        plan = self._plan
        if plan is not None and plan.tied:
            yield from ((Datum.TIED, j, reads_tied(plan, a, j)) for j in first_users(plan, a.j))

    def _backward(self, a: Action) -> Flow:
        t, i, j = a.t, a.i, a.j
        taken: tuple[Item, ...] = ((Datum.GRAPH, t, i, j), (Datum.OUTPUT_GRADIENT, t, i, j))
        taken += tuple(self._of_round_before(a))
        plan = self._plan
        makes: tuple[Item, ...] = ((Datum.GRADIENT, t, i, j),)
        if plan is None or not plan.sends_gradients:
            makes += _sums(a)
        makes += ((Datum.OUTPUT_GRADIENT, t, i, j - 1),)
        if plan is not None and plan.tied:
            makes += tuple((Datum.TIED_GRADIENT, t, i, k) for k in first_users(plan, j))
            if later_users(plan, j):
                taken += ((Datum.TIED_GRADIENT, t, i, j),)
        reads = ((Datum.WEIGHTS, j, a.v), *taken, *self._norms_for_scale(a))
        return Flow(reads, makes, (*taken, (Datum.INPUT, t, i, j)))

    def _of_round_before(self, a: Action) -> Iterator[Item]:
        """Yield what a worker that runs several rounds has of the one before: it stays with it."""
        plan = self._plan
        if plan is not None and plan.rounds > 1 and (before := (a.i or 0) - plan.num_workers) >= 0:
            yield (Datum.GRADIENT, a.t, before, a.j)

    def _norms_for_scale(self, a: Action) -> Iterator[Item]:
        """Yield what the scale of a step's losses follows from: all that ended since the last."""
        plan = self._plan
        if plan is not None and plan.norms == "all":
            for t in range(plan.ended_before(a.t - 1) if a.t else 0, plan.ended_before(a.t)):
                yield from ((Datum.NORMS, t, j) for j in range(plan.num_stages))

    def _add(self, a: Action) -> Flow:
        assert a.i is not None
        gradient, before = (Datum.GRADIENT, a.t, a.i, a.j), (Datum.SUM, a.t, a.j, a.i - 1)
        return Flow((gradient, before), _sums(a), (gradient, before))

    def _update(self, a: Action) -> Flow:
        assert a.v is not None
        taken = ((Datum.SUM, a.t, a.j, None), (Datum.TOTAL, a.t, a.j))
        reads = [*taken, (Datum.WEIGHTS, a.j, a.v - 1)]
        plan = self._plan
        if plan is None or plan.decides_at_end or (plan.norms != "none" and plan.late_updates):
            stages = range(a.j + 1) if plan is None else range(plan.num_stages)
            reads += [(Datum.NORMS, a.t, j) for j in stages]
        return Flow(tuple(reads), ((Datum.WEIGHTS, a.j, a.v),), taken)

    def _free(self, a: Action) -> Flow:
        weights = ((Datum.WEIGHTS, a.j, a.v),)
        return Flow(weights, (), weights)

    def _message(self, a: Action) -> Flow:
        carried = _CARRIED.get(a.payload)  # type: ignore[arg-type]
        if carried is None:  # descriptions and metrics, which no action reads
            return Flow()
        item = carried.at(a)
        if a.kind is Kind.RECV:
            return Flow((), (item,))
        if a.payload is Payload.N:  # of a sum that was added here, or has come as a whole
            return Flow((item, (Datum.TOTAL, a.t, a.j)))
        if a.payload is Payload.C:  # of buffers that came for the next step, or in a copy
            return Flow((item, (Datum.BUFFERS, a.t + 1, 0, a.j)))
        return Flow((item,), (), (item,) if carried.goes_away else ())


def _sums(a: Action) -> tuple[Item, Item]:
    """Name the sum that a micro-batch's gradient is in."""
    return (Datum.SUM, a.t, a.j, a.i), (Datum.SUM, a.t, a.j, None)


_End: TypeAlias = tuple[Datum, Callable[[Action], tuple[object, ...]]]


class _Carried(NamedTuple):
    """Name what a message carries, at either end."""

    sent: _End
    received: _End
    goes_away: bool = False

    def at(self, a: Action) -> Item:
        """Name it at the end of an action."""
        datum, numbers = self.sent if a.kind is Kind.SEND else self.received
        return (datum, *numbers(a))


def _end(datum: Datum, fields: str) -> _End:
    """Return a datum, and what its numbers are: those fields of an action."""
    numbers = attrgetter(*fields)
    return datum, numbers if len(fields) > 1 else lambda a: (numbers(a),)


def _same(datum: Datum, fields: str, *, goes_away: bool = False) -> _Carried:
    end = _end(datum, fields)
    return _Carried(end, end, goes_away)


_CARRIED = {
    Payload.A: _same(Datum.INPUT, "tij", goes_away=True),
    Payload.G: _same(Datum.OUTPUT_GRADIENT, "tij", goes_away=True),
    Payload.W: _same(Datum.TIED_GRADIENT, "tij", goes_away=True),
    Payload.S: _same(Datum.SUM, "tji", goes_away=True),
    Payload.T: _Carried(_end(Datum.SUM, "tji"), _end(Datum.TOTAL, "tj"), goes_away=True),
    Payload.H: _same(Datum.GRADIENT, "tij", goes_away=True),
    Payload.P: _same(Datum.WEIGHTS, "jv"),
    Payload.V: _Carried(_end(Datum.WEIGHTS, "jv"), _end(Datum.TIED, "jv")),
    Payload.R: _Carried(_end(Datum.LEFT_BUFFERS, "j"), _end(Datum.BUFFERS, "tij")),
    Payload.C: _same(Datum.LEFT_BUFFERS, "j"),
    Payload.D: _same(Datum.BATCH, "t"),
    Payload.L: _same(Datum.LOSSES, "t"),
    Payload.N: _Carried(_end(Datum.SUM, "tji"), _end(Datum.NORMS, "tj")),
    Payload.K: _same(Datum.START, "t"),
}  # i is None of T and N: of a whole sum


_ROWS: defaultdict[Kind | Payload, Callable[[Dataflow, Action], Flow]] = defaultdict(
    lambda: Dataflow._message,
    {
        Kind.F: Dataflow._forward,
        Kind.B: Dataflow._backward,
        Kind.ADD: Dataflow._add,
        Kind.UPDATE: Dataflow._update,
        Kind.TELL: lambda _, a: Flow(((Datum.LOSSES, a.t),)),
        Kind.GATHER: lambda _, a: Flow(),
        Kind.FREE: Dataflow._free,
    },
)


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
    for name in (*Kind, *Payload):
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
    """Count the most stage-activations that a worker keeps from an F to its B.

    Example:
        >>> from lightning_cyclic.plan.actions import parse
        >>> live_activations(map(parse, ["0F0#0", "0F1#0", "0B0#0", "0B1#0"]))
        2
    """
    graphs = lives(program, frozenset({Datum.GRAPH}))
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
