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
workers that run whole micro-batches all is that of the moment with the most (whole_micro.py). Of
others peaks of different kinds are added, though they need not fall on the same moment, and
"gradients" has a buffer per stage for a sum that it receives, too; buffers are made once, so each
counts from beginning to end. What lives within one forward or backward, copies of activations
that have not left, and what the framework itself takes, are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import TypeAlias, final

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Kind, Payload, Program
from lightning_cyclic.plan.dataflow import Datum, Life, lives, peak
from lightning_cyclic.simulate.account import account
from lightning_cyclic.simulate.costs import Costs
from lightning_cyclic.simulate.whole_micro import Span, most_at_once, series, spans

_SUMS = (Payload.S, Payload.T)
_Span: TypeAlias = tuple[int, int, float]  # begin, end, bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Hold the bytes that one worker keeps at most, by what they are for.

    Args:
        parameters: one version of them.
        versions: further ones.
        gradients: what backwards leave, and sums of it.
        optimizer: state of the optimizer.
        activations: what forwards left for their backwards.
        inputs: what forwards received, and the batch.
        returns: gradients that backwards received.
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
        """Return all bytes."""
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

    Returns:
        The memory of each worker.

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
        found = spans(plan)
        return tuple(
            replace(of_worker, index=index_per_param * sum(costs.param_bytes))
            for of_worker in _of_whole_micro(
                plan, found, costs, remat, state_per_param, gradient_per_param
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
            activations=_activations(program, costs, remat),
            inputs=_inputs(program, costs, remat),
            returns=_returns(program, costs),
            in_flight=0.0,
        )


def _of_whole_micro(
    plan: Plan,
    found_of: tuple[tuple[Span, ...], ...],
    costs: Costs,
    remat: bool,
    state_per_param: float,
    gradient_per_param: float,
) -> Iterator[Memory]:
    """Follow each worker, and return what it has at the moment with the most."""
    params = costs.param_bytes
    for w, (program, found) in enumerate(zip(plan.programs, found_of, strict=True)):
        owned = sum(size for j, size in enumerate(params) if plan.owner(j) == w)
        is_sharded = plan.axes.sharding.gathers
        one = owned if is_sharded else sum(params)
        constant = {"optimizer": state_per_param * owned, "returns": 0.0}
        places = len(program)
        fetched = series(found, "fetched", params, places)
        own = series(found, "gradients", params, places)
        sums = series(found, "sums", params, places)
        older = series(found, "versions", params, places)
        if not is_sharded:  # buffers are kept for the next use
            sums, older = ([_kept(found, x, params)] * places for x in ("sums", "versions"))
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


def _kept(found: tuple[Span, ...], kind: str, params: tuple[float, ...]) -> float:
    """Return the bytes of buffers that each stage keeps as many of as it ever needs at once."""
    return sum(count * params[j] for j, count in most_at_once(found, kind).items())


def _looks_ahead(plan: Plan, j: int) -> bool:
    """Say whether forwards of a stage read predicted weights once the run is under way."""
    return any(plan.horizon(plan.late_step, i, j) for i in range(plan.num_microbatches))


def _activations(program: Program, costs: Costs, remat: bool) -> float:
    """Return the most bytes that forwards leave for their backwards."""
    return peak(_activation_spans(program, costs, remat))


def _activation_spans(program: Program, costs: Costs, remat: bool) -> Iterator[_Span]:
    for life in lives(program, frozenset({Datum.GRAPH})):
        size = costs.activation_bytes[_stage(life)]
        if remat:  # while the forward runs, and while it runs again
            yield life.begin, life.begin + 1, size
            yield life.end, life.end + 1, size
        else:
            yield life.begin, life.end, size


def _inputs(program: Program, costs: Costs, remat: bool) -> float:
    """Return the most bytes of inputs that are kept for backwards."""
    return peak(_input_spans(program, costs, remat))


def _input_spans(program: Program, costs: Costs, remat: bool) -> Iterator[_Span]:
    """Yield inputs from their forward to their backward.

    What the stage before left on the same worker is among its activations, and an input of its
    own only where these are not kept.
    """
    received = {(a.t, a.i, a.j) for a in program if a.kind is Kind.RECV and a.payload is Payload.A}
    for life in lives(program, frozenset({Datum.GRAPH})):
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
        if a.kind is Kind.B or (a.kind is Kind.RECV and a.payload in _SUMS):
            live[a.j].add((a.t, a.kind is Kind.B))
        elif a.kind is Kind.UPDATE or (a.kind is Kind.SEND and a.payload in _SUMS):
            live[a.j] -= {(a.t, True), (a.t, False)}
        most[a.j] = max(most.get(a.j, 0), len(live[a.j]))
    return sum(count * params[j] for j, count in most.items())


def _stage(life: Life) -> int:
    """Give the stage of an item of one micro-batch."""
    return int(str(life.item[3]))
