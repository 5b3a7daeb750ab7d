"""The memory of each worker, counted along its program.

What a worker keeps, and from when to when:

    parameters    one version of each stage that it has; of others' while it uses them
    versions      further ones, from when each is made or received to its last use; where the rule
                  predicts, one more copy of a stage while a forward looks ahead
    gradients     what backwards leave, until it is added, sent or used
    optimizer     the state of each stage that the worker updates
    index         where the kept elements are of each stage that it runs, if others are pruned
    activations   of a micro-batch, from F to B; with rematerialisation during F and during B
    inputs        what F received or was given, until B: A messages, and the batch
    returns       the gradient of its outputs that B receives: G messages
    in_flight     buffers of sums that wait to come, are added to, or have not left yet

Every number of copies comes from the program; the only formulas are products with bytes. Of
workers that run whole micro-batches all is that of the moment with the most (below). Of
others peaks of different kinds are added, though they need not fall on the same moment, and
"gradients" has a buffer per stage for a sum that it receives, too; buffers are made once, so each
counts from beginning to end. What lives within one forward or backward, copies of activations
that have not left, and what the framework itself takes, are not counted.

Workers that run whole micro-batches are followed along their programs:

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
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias, final

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import COMPUTE, MAKE_GRADIENTS, Action, Kind, Payload, Program
from lightning_cyclic.plan.dataflow import Datum, Life, lives, peak
from lightning_cyclic.plan.passes.updates import calls
from lightning_cyclic.simulate.account import account
from lightning_cyclic.simulate.costs import Costs

_ACTIVATIONS = frozenset({Datum.GRAPH, Datum.WORK})  # W frees what I has left
_SUMS = (Payload.S, Payload.T)
_GRADIENTS = (*_SUMS, Payload.H)
_Posted: TypeAlias = Mapping[tuple[object, ...], int]  # a message -> slot of its receive
_Span: TypeAlias = tuple[int, int, float]  # begin, end, bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Hold the bytes that one worker keeps at most, by what they are for.

    Args:
        in_flight: sums of gradients that come, grow or leave.
        index: places of the elements that are not pruned. [none: dense]
    """

    parameters: float
    versions: float
    gradients: float
    optimizer: float
    activations: float
    inputs: float
    returns: float
    in_flight: float
    index: float = 0.0

    @property
    def of_parameters(self) -> float:
        """Return the bytes that grow with those of the parameters."""
        held = self.parameters + self.versions + self.gradients
        return held + self.optimizer + self.in_flight + self.index

    @property
    def total(self) -> float:
        return self.of_parameters + self.activations + self.inputs + self.returns


KINDS = tuple(field.name for field in fields(Memory))


def memory(
    plan: Plan,
    costs: Costs,
    *,
    remat: bool = False,
    state_per_param: float = 2.0,
    gradient_per_param: float = 1.0,
    index_per_param: float = 0.0,
) -> tuple[Memory, ...]:
    """Count what each worker of a plan keeps.

    Args:
        plan: of enough steps to reach its steady state.
        costs: bytes of each stage; of what enters stage 0, those of the batch.
        remat: forwards keep their inputs only, and backwards run them again.
        state_per_param: bytes of optimizer state per byte of parameters: 2 for Adam's moments in
            the parameters' own precision, 1 for momentum, 0 for plain SGD. [2]
        gradient_per_param: bytes of gradient per byte of parameters. [1]
        index_per_param: bytes of the index of kept elements per byte of parameters, on each
            worker that runs a stage, as it compresses gradients. [0: dense]

    Source: what PipeDream-2BW's planner counts (weights, activations, inputs), section 4 and
        appendix A, https://arxiv.org/abs/2006.09503; gradients, optimizer state, and counts per
        stage and rule are added here.

    Example:
        >>> from lightning_cyclic.plan import make_plan
        >>> plan = make_plan("pipedream_2bw", num_stages=2, num_workers=2)
        >>> first, last = memory(plan, Costs.even(2, model_bytes=20, activation_bytes=200))
        >>> first.parameters, first.versions, first.activations, last.activations
        (10.0, 10.0, 200.0, 100.0)
    """
    if plan.axes.placement.runs_whole_micro:
        return tuple(
            replace(of_worker, index=index_per_param * sum(costs.param_bytes))
            for of_worker in _of_whole_micro(
                plan, costs, remat, state_per_param, gradient_per_param
            )
        )
    # one version of each stage that a worker runs is what it keeps as parameters
    return tuple(
        replace(of_worker, index=index_per_param * of_worker.parameters)
        for of_worker in _of_stages(plan, costs, remat, state_per_param, gradient_per_param)
    )


def _of_stages(
    plan: Plan, costs: Costs, remat: bool, state_per_param: float, gradient_per_param: float
) -> Iterator[Memory]:
    params = costs.param_bytes
    predicted = {j for j in range(plan.num_stages) if _looks_ahead(plan, j)}
    workers = account(plan.programs, costs).workers
    for program, counted in zip(plan.programs, workers, strict=True):
        held = {a.j for a in program if a.kind is Kind.F}
        updated = {a.j for a in program if a.kind is Kind.UPDATE}
        one_of_each = sum(params[j] for j in held)
        yield Memory(
            parameters=one_of_each,
            versions=counted.param_bytes - one_of_each + sum(params[j] for j in held & predicted),
            gradients=gradient_per_param * _sums(program, params),
            optimizer=state_per_param * sum(params[j] for j in updated),
            activations=peak(_activation_spans(program, costs, remat)),
            inputs=peak(_input_spans(program, costs, remat)),
            returns=_returns(program, costs),
            in_flight=0.0,
        )


def _of_whole_micro(
    plan: Plan, costs: Costs, remat: bool, state_per_param: float, gradient_per_param: float
) -> Iterator[Memory]:
    """Follow each worker, and return what it has at the moment with the most."""
    params = costs.param_bytes
    for w, (program, found) in enumerate(zip(plan.programs, spans(plan), strict=True)):
        owned = sum(size for j, size in enumerate(params) if plan.owner(j) == w)
        is_sharded = plan.axes.sharding.gathers
        one = owned if is_sharded else sum(params)
        constant = {"optimizer": state_per_param * owned, "returns": 0.0}
        places = len(program)
        fetched, own, sums, older = (
            _series(((x.begin, x.end, params[x.j]) for x in found if x.kind == kind), places)
            for kind in ("fetched", "gradients", "sums", "versions")
        )
        if not is_sharded:  # each stage keeps as many buffers as it ever needs at once
            sums, older = (
                [sum(count * params[j] for j, count in most_at_once(found, kind).items())] * places
                for kind in ("sums", "versions")
            )
        activations = _series(_activation_spans(program, costs, remat), places)
        inputs = _series(_input_spans(program, costs, remat), places)
        columns = (fetched, older, own, sums, activations, inputs)
        yield max(
            (
                Memory(
                    parameters=one + a, versions=o, gradients=gradient_per_param * g,
                    in_flight=gradient_per_param * f, activations=x, inputs=i, **constant,
                )
                for a, o, g, f, x, i in zip(*columns, strict=True)
            ),
            key=lambda m: m.total,
        )  # fmt: skip


def _looks_ahead(plan: Plan, j: int) -> bool:
    """Say whether forwards of a stage read predicted weights once the run is under way."""
    return any(plan.horizon(plan.late_step, i, j) for i in range(plan.num_microbatches))


def _activation_spans(program: Program, costs: Costs, remat: bool) -> Iterator[_Span]:
    for life in lives(program, _ACTIVATIONS):
        size = costs.activation_bytes[_stage(life)]
        if remat and life.item[0] is Datum.GRAPH:  # while the forward runs, and again
            yield life.begin, life.begin + 1, size
            yield life.end, life.end + 1, size
        else:
            yield life.begin, life.end, size


def _input_spans(program: Program, costs: Costs, remat: bool) -> Iterator[_Span]:
    """Yield inputs from their forward to their backward.

    What the stage before left on the same worker is among its activations, and an input of its
    own only where these are not kept.
    """
    received = {(a.t, a.i, a.j) for a in program if a.kind is Kind.RECV and a.payload is Payload.A}
    for life in lives(program, _ACTIVATIONS):
        if remat or _stage(life) == 0 or life.item[1:] in received:
            yield life.begin, life.end, costs.cut_bytes[_stage(life)]


def _returns(program: Program, costs: Costs) -> float:
    """Return the most bytes of received gradients that wait for their backward or are in it."""
    return peak(
        (life.begin, life.begin + 1, costs.cut_bytes[_stage(life) + 1])
        for life in lives(program, frozenset({Datum.OUTPUT_GRADIENT}))
        if life.maker is not None and life.maker.kind is Kind.RECV
    )


def _series(found: Iterable[_Span], places: int) -> list[float]:
    """Return the bytes at each place of a program."""
    changes = [0.0] * (places + 1)
    for begin, end, size in found:
        changes[max(begin, 0)] += size
        changes[min(end, places)] -= size
    return list(accumulate(changes))[:places]


def _sums(program: Program, params: Sequence[float]) -> float:
    """Return the bytes of the sums of gradients, own and received: the most of each stage."""
    live: defaultdict[int, set[tuple[int, bool]]] = defaultdict(set)
    most: dict[int, int] = {}
    for a in program:
        if a.kind in MAKE_GRADIENTS or (a.kind is Kind.RECV and a.payload in _SUMS):
            live[a.j].add((a.t, a.kind is not Kind.RECV))
        elif a.kind is Kind.UPDATE or (a.kind is Kind.SEND and a.payload in _SUMS):
            live[a.j] -= {(a.t, True), (a.t, False)}
        most[a.j] = max(most.get(a.j, 0), len(live[a.j]))
    return sum(count * params[j] for j, count in most.items())


def _stage(life: Life) -> int:
    return int(str(life.item[3]))


class Span(NamedTuple):
    """Say what a stage has from where to where in a program: a half-open span of positions."""

    kind: str  # "versions", "fetched", "gradients" or "sums"
    j: int
    begin: int
    end: int


def spans(plan: Plan) -> tuple[tuple[Span, ...], ...]:
    """Return what each worker has, besides one version of its own stages.

    Args:
        plan: whose workers run whole micro-batches; of enough steps to be steady.
    """
    programs = plan.programs
    posted = {
        _message(a, a.peer, w): a.s
        for w, program in enumerate(programs)
        for a in program
        if a.kind is Kind.RECV
    }
    leavings = (_Leaving(program, w, posted) for w, program in enumerate(programs))
    return tuple(
        (
            *_gradients(plan, program, leaving),
            *_weights(plan, program, leaving),
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
        if a.kind in MAKE_GRADIENTS:
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
        if a.v is not None and (is_sent or a.kind in COMPUTE):
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
