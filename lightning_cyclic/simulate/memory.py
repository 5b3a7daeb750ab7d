"""The memory of each worker, counted along what it does.

What a worker keeps, and from when to when:

    parameters    one version of each stage that it has; of others' while it uses them
    versions      further ones, from when each is made or received to its last use; where the rule
                  predicts, one more copy of a stage while a forward looks ahead
    gradients     what backwards leave, until it is added, sent or used
    optimizer     the state of each stage that the worker updates
    index         where the kept elements are of each stage that it runs, if others are pruned
    activations   of a micro-batch, from F to B; with rematerialisation during F and during B; not
                  while they are away
    inputs        what F received or was given, until B: A messages, and the batch
    returns       the gradient of its outputs that B receives: G messages
    in_flight     buffers of sums that wait to come, are added to, or have not left yet

Every number of copies is counted; the only formulas are products with bytes. Of workers that run
whole micro-batches all is that of the moment with the most (below). Of others the cells of the
timetable and the updates tell enough; peaks of different kinds are added, though they need not
fall on the same moment (but where optimizer state comes and goes, which it does when activations
are gone), and "gradients" has a buffer per stage for a sum that it receives, too; buffers are made
once, so each counts from beginning to end. What lives within one forward or
backward, copies of activations that have not left, and what the framework itself takes, are not
counted.

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

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias, final

from lightning_cyclic.plan import Plan, programs_of
from lightning_cyclic.plan.actions import (
    COMPUTE,
    GO_BACK,
    MAKE_GRADIENTS,
    Action,
    Kind,
    Payload,
    Program,
)
from lightning_cyclic.plan.dataflow import absences, activations, peak, versions
from lightning_cyclic.plan.lower import computed
from lightning_cyclic.plan.passes.updates import calls
from lightning_cyclic.plan.roles import adder, source_of_sum
from lightning_cyclic.simulate.costs import Costs

_SUMS = (Payload.S, Payload.T)
_GRADIENTS = (*_SUMS, Payload.H)
_Posted: TypeAlias = Mapping[tuple[object, ...], int]  # a message -> slot of its receive


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
    sizes = _Sizes(plan, costs, state_per_param, gradient_per_param, index_per_param)
    is_whole = plan.axes.placement.runs_whole_micro
    count = sizes.at_once if is_whole or plan.tiers is not None else sizes.of_each_kind
    return tuple(count(w, found) for w, found in enumerate(spans(plan, remat=remat)))


def memory_by_slot(
    plan: Plan, costs: Costs, *, remat: bool = False, state_per_param: float = 2.0
) -> tuple[tuple[Memory, ...], ...]:
    """Say what each worker keeps in each slot, at the moment of the slot with the most.

    In a slot in which a worker computes nothing it keeps what it has from before until later; in
    that of a backward, what the backward leaves. The most of all slots is what :func:`memory`
    says.

    Args:
        plan: of as many steps as are looked at.
        costs: as for :func:`memory`; so are the others.

    Returns:
        For each worker a row, with all slots of the plan.

    Example:
        >>> from lightning_cyclic.plan import make_plan
        >>> plan = make_plan("1f1b", num_stages=2, num_workers=2, num_steps=1)
        >>> costs = Costs.even(2, model_bytes=2, activation_bytes=20)
        >>> [[int(m.activations) for m in row] for row in memory_by_slot(plan, costs)]
        [[10, 20, 20, 10, 10, 0], [0, 10, 0, 10, 0, 0]]
    """
    sizes = _Sizes(plan, costs, state_per_param, 1.0, 0.0)
    programs = programs_of(plan) if plan.axes.placement.runs_whole_micro else computed(plan)
    # what is not computed is in the slot of what is, before it: receives are posted long ahead
    slots = [
        list(accumulate((a.s * (a.kind in COMPUTE) for a in program), max)) for program in programs
    ]
    last = max(a.s for program in programs for a in program if a.kind in COMPUTE)
    rows = []
    for w, found in enumerate(spans(plan, remat=remat)):
        kept = sizes.by_place(w, [_apart(x, remat) for x in found], 2 * len(slots[w]) + 2)
        rows.append(tuple(_in_slot(kept, slots[w], s) for s in range(last + 1)))
    return tuple(rows)


def memory_by_place(
    plan: Plan, costs: Costs, *, remat: bool = False, state_per_param: float = 2.0
) -> tuple[tuple[Memory, ...], ...]:
    """Say what each worker keeps at each place of its program.

    Args:
        plan: of as many steps as are looked at.
        costs: as for :func:`memory`; so are the others.

    Returns:
        For each worker a row: before each of its actions, and behind the last; of workers that
        run single stages, of those that :func:`computed` lists.
    """
    sizes = _Sizes(plan, costs, state_per_param, 1.0, 0.0)
    is_whole = plan.axes.placement.runs_whole_micro
    lengths = (len(x) + 1 for x in (programs_of(plan) if is_whole else computed(plan)))
    return tuple(
        tuple(sizes.by_place(w, found, length))
        for w, (found, length) in enumerate(zip(spans(plan, remat=remat), lengths, strict=True))
    )


def _apart(x: Span, remat: bool) -> Span:
    """Count places once more: those of the program are odd, even ones are between them.

    What a backward takes is there up to it, and its own place is not counted.
    """
    is_taken = x.kind == "inputs" or (x.kind == "activations" and not remat)
    return x._replace(begin=2 * max(x.begin, 0) + 1, end=2 * x.end + is_taken)


def _in_slot(kept: Sequence[Memory], slots: Sequence[int], s: int) -> Memory:
    """Return the most that is kept in a slot, of what is kept at places and between them."""
    first, end = bisect_left(slots, s), bisect_right(slots, s)
    if first == end:
        return kept[2 * end]
    return max((kept[2 * n + 1] for n in range(first, end)), key=lambda m: m.total)


def copies(
    plan: Plan,
    *,
    remat: bool = False,
    state_per_param: float = 2.0,
    gradient_per_param: float = 1.0,
    index_per_param: float = 0.0,
) -> list[Memory]:
    """Count the copies that workers of a pipeline keep of each stage, whatever else they have.

    Returns:
        Of each stage, those of the worker that has it and keeps most; "returns" are of what the
        stage behind it receives.
    """
    ones = (1.0,) * plan.num_stages
    costs = Costs(forward_s=ones, backward_s=ones, param_bytes=ones, cut_bytes=ones,
                  activation_bytes=ones)  # fmt: skip
    sizes = _Sizes(plan, costs, state_per_param, gradient_per_param, index_per_param)
    kept: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
    for w, found in enumerate(spans(plan, remat=remat)):
        for x in found:
            kept[x.j, w].append(x)
    each = (
        [astuple(sizes.of_each_kind(w, kept[j, w])) for w in plan.axes.placement.workers_of(j)]
        for j in range(plan.num_stages)
    )
    most = (map(max, zip(*rows, strict=True)) for rows in each)
    return [Memory(**dict(zip(KINDS, row, strict=True))) for row in most]


def steps_to_count(num_stages: int, of_each: int) -> int:
    """Return the steps after which the workers of a pipeline have kept the most that they will.

    Args:
        of_each: micro-batches per step of each replica.
    """
    return 4 + -(-2 * num_stages // of_each)


class Span(NamedTuple):
    """Say what a worker has of a stage from where to where: a half-open span of positions."""

    kind: str
    """"activations" or "inputs"; of workers that run whole micro-batches "versions", "fetched",
    "gradients", "sums" or "state", which comes and goes, of others "weights", "gradients" or
    "returns"."""
    j: int
    begin: int
    end: int


@final
class _Sizes:
    """Turn spans into bytes."""

    def __init__(
        self, plan: Plan, costs: Costs, state: float, gradient: float, index: float
    ) -> None:
        self._plan = plan
        self._params = costs.param_bytes
        self._by_kind = {
            "activations": costs.activation_bytes, "inputs": costs.cut_bytes,
            "returns": (*costs.cut_bytes[1:], 0.0),  # gradients of what enters the next stage
        }  # fmt: skip
        if plan.tiers is not None:
            self._by_kind["state"] = tuple(map(float, plan.tiers.moved))
            if plan.tiers.weights:
                self._by_kind["fetched"] = tuple(map(float, plan.tiers.weights))
        self._state, self._gradient, self._index = state, gradient, index
        cells = range(plan.num_microbatches)
        self._predicted = [  # stages whose forwards look ahead, once the run is under way
            any(plan.horizon(plan.late_step, i, j) for i in cells) for j in range(plan.num_stages)
        ]

    def of_each_kind(self, w: int, found: Sequence[Span]) -> Memory:
        """Return the most of each kind."""
        params = self._params
        held = {x.j for x in found if x.kind == "activations"}
        one_of_each = sum(params[j] for j in held)
        predicted = sum(params[j] for j in held if self._predicted[j])
        weights, activations, inputs, returns = (
            peak((x.begin, x.end, self._size(x)) for x in found if x.kind == kind)
            for kind in ("weights", "activations", "inputs", "returns")
        )
        return Memory(
            parameters=one_of_each,
            versions=weights - one_of_each + predicted,
            gradients=self._gradient * self._buffers(found, "gradients"),
            optimizer=self._stays(w, {j: self._state * params[j] for j in held}),
            activations=activations, inputs=inputs, returns=returns, in_flight=0.0,
            index=self._index * one_of_each,
        )  # fmt: skip

    def at_once(self, w: int, found: Sequence[Span]) -> Memory:
        """Return what a worker has at the moment with the most."""
        places = 1 + max(x.end for x in found)
        return max(self.by_place(w, found, places), key=lambda m: m.total)

    def by_place(self, w: int, found: Sequence[Span], places: int) -> list[Memory]:
        """Return what a worker has at each place of its program."""
        is_whole = self._plan.axes.placement.runs_whole_micro
        return (self.whole_by_place if is_whole else self.stages_by_place)(w, found, places)

    def whole_by_place(self, w: int, found: Sequence[Span], places: int) -> list[Memory]:
        """Return what a worker that runs whole micro-batches has at each place of its program."""
        owned = sum(size for j, size in enumerate(self._params) if self._plan.owner(j) == w)
        is_sharded = self._plan.axes.sharding.gathers
        one = owned if is_sharded else sum(self._params)
        kinds = "fetched", "versions", "gradients", "sums", "activations", "inputs", "state"
        columns = [self._series(found, kind, places) for kind in kinds]
        if not is_sharded:  # each stage keeps as many buffers as it ever needs at once
            for n in (1, 3):
                columns[n] = [self._buffers(found, kinds[n])] * places
        stays = self._stays(w, {j: self._state * x for j, x in enumerate(self._params)})
        if (tiers := self._plan.tiers) is not None:
            one -= sum(tiers.away)
        outer = 0.0
        if self._plan.axes.weights.is_local:  # the outer weights, and their momentum
            outer, stays = one, self._state * one + owned
        return [
            Memory(
                parameters=one + fetched, versions=older + outer,
                gradients=self._gradient * own, optimizer=stays + state,
                activations=activations, inputs=inputs, returns=0.0,
                in_flight=self._gradient * sums, index=self._index * sum(self._params),
            )
            for fetched, older, own, sums, activations, inputs, state in zip(*columns, strict=True)
        ]  # fmt: skip

    def stages_by_place(self, w: int, found: Sequence[Span], places: int) -> list[Memory]:
        """Return what a worker that has stages has at each place of what it computes."""
        most = self.of_each_kind(w, found)
        kinds = "weights", "activations", "inputs", "returns", "state"
        columns = [self._series(found, kind, places) for kind in kinds]
        predicted = most.versions + most.parameters - max(columns[0])
        return [
            replace(
                most, versions=max(weights - most.parameters, 0.0) + predicted,
                activations=activations, inputs=inputs, returns=returns,
                optimizer=most.optimizer + state,
            )
            for weights, activations, inputs, returns, state in zip(*columns, strict=True)
        ]  # fmt: skip

    def _stays(self, w: int, state: Mapping[int, float]) -> float:
        """Return the bytes of a worker's optimizer state that does not come and go."""
        tiers = self._plan.tiers
        kept = state if tiers is None else dict(enumerate(tiers.kept))
        return sum(size for j, size in kept.items() if self._plan.owner(j) == w)

    def _size(self, x: Span) -> float:
        return self._by_kind.get(x.kind, self._params)[x.j]

    def _buffers(self, found: Iterable[Span], kind: str) -> float:
        """Return the bytes of buffers that are made once: the most of each stage."""
        most = most_at_once(found, kind)
        return sum(count * self._params[j] for j, count in most.items())

    def _series(self, found: Iterable[Span], kind: str, places: int) -> list[float]:
        """Return the bytes at each place of a program."""
        changes = [0.0] * places
        for x in found:
            if x.kind == kind:
                changes[max(x.begin, 0)] += self._size(x)
                changes[x.end] -= self._size(x)
        return list(accumulate(changes))


def spans(plan: Plan, *, remat: bool = False) -> tuple[tuple[Span, ...], ...]:
    """Return what each worker has, of those that run whole micro-batches besides one version.

    Args:
        plan: of enough steps to be steady.
    """
    if not plan.axes.placement.runs_whole_micro:
        return tuple(
            (*_of_stages(plan, cells, w), *_activations(plan, cells, w, remat), *_state(cells))
            for w, cells in enumerate(computed(plan))
        )
    programs = programs_of(plan)
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
            *_activations(plan, program, w, remat),
            *_state(program),
        )
        for w, (program, leaving) in enumerate(zip(programs, leavings, strict=True))
    )


def _activations(plan: Plan, program: Program, w: int, remat: bool) -> Iterator[Span]:
    """Yield what forwards leave, and inputs.

    What the stage before left on the same worker is among its activations, and an input of its
    own only where these are not kept, or may be away while two graphs hold it.
    """
    away = absences(program)
    for a, begin, half, end in activations(program):
        leaves, comes = away.get((a.t, a.i, a.j), (begin, begin))
        if leaves < comes:
            yield Span("activations", a.j, begin, leaves)
        if remat:  # while the forward runs, and from when it runs again
            yield Span("activations", a.j, begin, begin + 1)
        yield Span("activations", a.j, half if remat else comes, max(end, half + remat))
        is_apart = remat or plan.offloads
        if is_apart or a.j == 0 or plan.worker_of(a.i or 0, a.j - 1, a.t) != w:
            yield Span("inputs", a.j, begin, end)


def _of_stages(plan: Plan, cells: Program, w: int) -> Iterator[Span]:
    """Yield weights, gradients and what comes of them, of single stages."""
    yield from (Span("weights", x.a.j, x.begin, x.end) for x in versions(cells))
    begins: dict[int, int] = {}  # of steps
    own: dict[tuple[int, int], tuple[int, int]] = {}  # step, stage -> from where to where
    come: dict[tuple[int, int], int] = {}  # since when a sum of others is waited for
    taken: dict[int, int] = {}  # behind where the last one was
    for n, a in enumerate(cells):
        key, is_update = (a.t, a.j), a.kind is Kind.UPDATE
        begins.setdefault(a.t, n)
        if a.kind in GO_BACK and _comes_back(plan, a, w):
            yield Span("returns", a.j, n, n + 1)
        if a.kind in MAKE_GRADIENTS:
            own[key] = own.get(key, (n, n))[0], n + 1
        elif is_update and key in own:
            own[key] = own[key][0], n + 1
        last = plan.num_microbatches - 1
        if (a.kind in MAKE_GRADIENTS and source_of_sum(plan, a) is not None) or (
            is_update and adder(plan, last, a.j, a.t) != w
        ):
            come.setdefault(key, max(begins[a.t], taken.get(a.j, 0)))
            taken[a.j] = n + is_update  # a sum leaves behind that, when the next may come
    yield from (Span("gradients", j, *span) for (_, j), span in own.items())
    yield from (Span("gradients", j, n, own[t, j][1]) for (t, j), n in come.items())


def _comes_back(plan: Plan, a: Action, w: int) -> bool:
    """Say whether a worker receives the gradient that a backward begins with."""
    return a.j + 1 < plan.num_stages and plan.worker_of(a.i or 0, a.j + 1, a.t) != w


def _weights(plan: Plan, program: Program, leaving: _Leaving) -> Iterator[Span]:
    if not plan.axes.sharding.gathers:
        yield from _versions(program)
        yield from _outer(program, leaving)
    yield from _fetched(program)
    if plan.axes.sharding.gathers and not plan.axes.weights.at_end_of_step:
        yield from _older(plan, program, leaving)


def most_at_once(found: Iterable[Span], kind: str) -> dict[int, int]:
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
        elif a.kind in (Kind.UPDATE, Kind.OUTER) or (
            a.kind is Kind.SEND and a.payload in _GRADIENTS
        ):
            if key in own:
                yield Span("gradients", a.j, own.pop(key), n + 1)
            if a.kind is Kind.SEND:
                begin = n if a.payload is Payload.H else come.pop((Payload.S, *key), n)
                yield Span("sums", a.j, begin, leaving.end(a, n))
            else:
                used = [come.pop((x, *key)) for x in _SUMS if (x, *key) in come]
                end = spans_of_calls[n][1] if a.kind is Kind.UPDATE else n + 1
                yield from (Span("sums", a.j, begin, end) for begin in used)


def _fetched(program: Program) -> Iterator[Span]:
    """Yield weights that come, from the buffer that waits for them to their FREE."""
    since: dict[int, int] = {}
    for n, a in enumerate(program):
        if a.kind in (Kind.RECV, Kind.FETCH) and a.payload is Payload.P:
            since[a.j] = n
        elif a.kind is Kind.FREE and a.payload in (None, Payload.P) and a.j in since:
            yield Span("fetched", a.j, since.pop(a.j), n)


def _state(program: Program) -> Iterator[Span]:
    """Yield the optimizer state that comes and goes, from its FETCH to its FREE."""
    since: dict[tuple[int, int], int] = {}
    for n, a in enumerate(program):
        if a.kind is Kind.FETCH and a.payload is Payload.O:
            since[a.j, a.t] = n
        elif a.payload is Payload.O and a.kind is Kind.FREE:
            yield Span("state", a.j, since.pop((a.j, a.t)), n)


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


def _outer(program: Program, leaving: _Leaving) -> Iterator[Span]:
    """Yield messages of outer weights: until they are read at the latest, or have left."""
    posted: dict[int, int] = {}
    for n, a in enumerate(program):
        if a.payload is Payload.U and a.kind is Kind.RECV:
            posted[a.j] = n
        elif a.payload is Payload.U:
            yield Span("versions", a.j, n, leaving.end(a, n))
        if a.j in posted and a.kind in (Kind.SEND, Kind.UPDATE):
            yield Span("versions", a.j, posted.pop(a.j), n + 1)


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
