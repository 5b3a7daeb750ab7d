"""The memory of each worker, counted along its program.

What a worker keeps, and from when to when:

    weights       each version from when it is made or received to its last use; where the rule
                  predicts, one more copy of a stage while a forward looks ahead
    gradients     a buffer per stage for its own sum, and one for a sum that it receives; buffers
                  are made once, so each counts from beginning to end; not so where parameters
                  are fetched for each use
    optimizer     the state of each stage that the worker updates
    activations   of a micro-batch, from F to B; with rematerialisation during F and during B
    inputs        what F received or was given, until B: A messages, and the batch
    returns       the gradient of its outputs that B receives: G messages

Every number of copies comes from the program; the only formulas are products with bytes. Peaks of
different kinds are added, though they need not fall on the same moment. What lives within one
forward or backward, and what the framework itself takes, are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import final

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Kind, Payload, Program
from lightning_cyclic.plan.dataflow import Datum, Life, lives, peak
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.simulate.account import account

_SUMS = (Payload.S, Payload.T)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Hold the bytes that one worker keeps at most, by what they are for.

    Args:
        weights: parameters, all versions.
        gradients: sums of gradients.
        optimizer: state of the optimizer.
        activations: what forwards left for their backwards.
        inputs: what forwards received, and the batch.
        returns: gradients that backwards received.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    inputs: float
    returns: float

    @property
    def total(self) -> float:
        """Return all bytes."""
        held = self.weights + self.gradients + self.optimizer
        return held + self.activations + self.inputs + self.returns


KINDS = tuple(field.name for field in fields(Memory))


def memory(
    plan: Plan,
    stages: Stages,
    *,
    remat: bool = False,
    state_per_param: float = 2.0,
    gradient_per_param: float = 1.0,
) -> tuple[Memory, ...]:
    """Count what each worker of a plan keeps.

    Args:
        plan: of enough steps to reach its steady state.
        stages: bytes of each stage.
        remat: forwards keep their inputs only, and backwards run them again.
        state_per_param: bytes of optimizer state per byte of parameters: 2 for Adam's moments in
            the parameters' own precision, 1 for momentum, 0 for plain SGD. [2]
        gradient_per_param: bytes of gradient per byte of parameters. [1]

    Returns:
        The memory of each worker.

    Source: what PipeDream-2BW's planner counts (weights, activations, inputs), section 4 and
        appendix A, https://arxiv.org/abs/2006.09503; gradients, optimizer state, and counts per
        stage and rule are added here.

    Example:
        >>> from lightning_cyclic.plan import make_plan
        >>> plan = make_plan("pipedream_2bw", num_stages=2, num_workers=2)
        >>> first, last = memory(plan, Stages.alike(2, param_bytes=10, activation_bytes=100))
        >>> first.weights, first.optimizer, first.activations, last.activations
        (20, 20.0, 200, 100)
    """
    params = stages.param_bytes
    predicted = {j for j in range(plan.num_stages) if _looks_ahead(plan, j)}
    workers = account(plan.programs, stages.costs()).workers
    found = []
    for program, counted in zip(plan.programs, workers, strict=True):
        held = {a.j for a in program if a.kind is Kind.F}
        updated = {a.j for a in program if a.kind is Kind.UPDATE}
        found.append(
            Memory(
                weights=counted.param_bytes + sum(params[j] for j in held & predicted),
                gradients=gradient_per_param * _sums(plan, program, stages),
                optimizer=state_per_param * sum(params[j] for j in updated),
                activations=_activations(program, stages, remat),
                inputs=_inputs(program, stages, remat),
                returns=_returns(program, stages),
            )
        )
    return tuple(found)


def _looks_ahead(plan: Plan, j: int) -> bool:
    """Say whether forwards of a stage read predicted weights once the run is under way."""
    return any(plan.horizon(plan.late_step, i, j) for i in range(plan.num_micro))


def _activations(program: Program, stages: Stages, remat: bool) -> float:
    """Return the most bytes that forwards leave for their backwards."""
    spans = []
    for life in lives(program, frozenset({Datum.GRAPH})):
        size = stages.activation_bytes[_stage(life)]
        if remat:  # while the forward runs, and while it runs again
            spans += [(life.begin, life.begin + 1, size), (life.end, life.end + 1, size)]
        else:
            spans.append((life.begin, life.end, size))
    return peak(spans)


def _inputs(program: Program, stages: Stages, remat: bool) -> float:
    """Return the most bytes of inputs that are kept for backwards.

    What the stage before left on the same worker is among its activations, and an input of its
    own only where these are not kept.
    """
    received = {(a.t, a.i, a.j) for a in program if a.kind is Kind.RECV and a.payload is Payload.A}
    return peak(
        (life.begin, life.end, stages.input_bytes[_stage(life)])
        for life in lives(program, frozenset({Datum.GRAPH}))  # from a forward to its backward
        if remat or _stage(life) == 0 or life.item[1:] in received
    )


def _returns(program: Program, stages: Stages) -> float:
    """Return the most bytes of received gradients that wait for their backward or are in it."""
    return peak(
        (life.begin, life.begin + 1, stages.input_bytes[_stage(life) + 1])
        for life in lives(program, frozenset({Datum.OUTPUT_GRADIENT}))
        if life.maker is not None and life.maker.kind is Kind.RECV
    )


def _sums(plan: Plan, program: Program, stages: Stages) -> float:
    """Return the bytes of the sums of gradients, own and received.

    Each stage has buffers for the most that it ever needs at once. Where parameters come and go,
    so do they, and only the most that all stages need at once counts.
    """
    live: defaultdict[int, set[tuple[int, bool]]] = defaultdict(set)
    most: dict[int, int] = {}
    changes = [0.0]
    for a in program:
        before = len(live[a.j])
        if a.kind is Kind.B or (a.kind is Kind.RECV and a.payload in _SUMS):
            live[a.j].add((a.t, a.kind is Kind.B))
        elif a.kind is Kind.UPDATE or (a.kind is Kind.SEND and a.payload in _SUMS):
            live[a.j] -= {(a.t, True), (a.t, False)}
        most[a.j] = max(most.get(a.j, 0), len(live[a.j]))
        changes.append((len(live[a.j]) - before) * stages.param_bytes[a.j])
    if plan.axes.sharding.gathers:
        return max(accumulate(changes))
    return sum(count * stages.param_bytes[j] for j, count in most.items())


def _stage(life: Life) -> int:
    """Give the stage of an item of one micro-batch."""
    return int(str(life.item[3]))
