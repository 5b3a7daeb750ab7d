"""The account of a plan: messages, bytes, weight versions and activations, counted on programs.

Nothing here is a formula: what a paper says about a schedule is asserted on these counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeAlias, final

from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.simulate.costs import Costs

Span: TypeAlias = tuple[int, int]  # half-open


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAccount:
    """Hold what one worker sends in a steady step and keeps at most.

    Args:
        sent_messages: messages sent in a steady step, by payload.
        sent_bytes: bytes sent in a steady step, by payload.
        versions: most versions of one stage that are alive at once.
        param_bytes: most bytes of parameters, of all versions and stages, alive at once.
        activations: most forwards whose backward is still to come, each of one stage and one
            micro-batch.
        updates: stages whose optimizer state the worker keeps.
    """

    sent_messages: Mapping[Payload, int]
    sent_bytes: Mapping[Payload, float]
    versions: int
    param_bytes: float
    activations: int
    updates: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Hold the accounts of all workers.

    Args:
        workers: account of each worker.
        activations: most forwards whose backward is still to come, over all workers at once,
            in one slot of the timetable.
    """

    workers: tuple[WorkerAccount, ...]
    activations: int


def account(programs: Sequence[Sequence[Action]], costs: Costs) -> Account:
    """Count what the programs send and keep.

    Args:
        programs: actions of each worker, in program order; of at least three steps, so that the
            middle one is steady.
        costs: bytes of each stage.

    Returns:
        The messages of the middle step, and the peaks over all steps.
    """
    num_steps = 1 + max((action.t for program in programs for action in program), default=0)
    return Account(
        workers=tuple(_worker(program, costs, num_steps // 2) for program in programs),
        activations=_peak_over_workers(programs),
    )


def _worker(program: Sequence[Action], costs: Costs, t: int) -> WorkerAccount:
    sends = [action for action in program if action.kind is Kind.SEND and action.t == t]
    messages, num_bytes = Counter[Payload](), dict[Payload, float]()
    for action in sends:
        assert action.payload is not None  # as for every SEND
        messages[action.payload] += 1
        num_bytes[action.payload] = num_bytes.get(action.payload, 0) + costs.message_bytes(action)
    alive = list(_lifetimes(program))
    return WorkerAccount(
        sent_messages=messages,
        sent_bytes=num_bytes,
        versions=int(max((_peak(spans) for spans in _by_stage(alive)), default=0)),
        param_bytes=_peak((span, costs.param_bytes[j]) for j, span in alive),
        activations=_peak_activations(program),
        updates=len({action.j for action in program if action.kind is Kind.UPDATE}),
    )


def _lifetimes(program: Sequence[Action]) -> Iterator[tuple[int, Span]]:
    """Yield the stage and lifetime of each version that the worker holds.

    A lifetime is a half-open span of positions in the program: from the action that makes or
    receives the version (the start, for initial weights) to behind the last that reads it. An
    update reads the version before it, and replaces it in place where nothing reads it later.
    """
    spans: dict[tuple[int, int], Span] = {}
    for position, action in enumerate(program):
        if action.v is None or action.kind in (Kind.GATHER, Kind.FREE):
            continue
        if action.payload is Payload.V:  # of parameters that the receiving stage counts as its own
            continue
        key = action.j, action.v
        if action.kind is Kind.UPDATE:
            base = action.j, action.v - 1
            spans[base] = spans.get(base, (-1, 0))[0], position
        if action.kind in (Kind.UPDATE, Kind.RECV):
            if key in spans:  # freed in between, and received again
                yield action.j, spans[key]
            spans[key] = position, position + 1
        else:
            spans[key] = spans.get(key, (-1, 0))[0], position + 1
    yield from ((j, span) for (j, _), span in spans.items())


def _by_stage(alive: Iterable[tuple[int, Span]]) -> Iterable[list[tuple[Span, int]]]:
    """Group lifetimes by stage, each with weight one."""
    groups: defaultdict[int, list[tuple[Span, int]]] = defaultdict(list)
    for j, span in alive:
        groups[j].append((span, 1))
    return groups.values()


def _peak_activations(program: Sequence[Action]) -> int:
    """Return the most forwards of one worker whose backward is still to come."""
    signs = {Kind.F: 1, Kind.B: -1}
    return max(accumulate(signs.get(action.kind, 0) for action in program), default=0)


def _peak_over_workers(programs: Sequence[Sequence[Action]]) -> int:
    """Return the most activations in any slot; a backward frees its own behind its slot."""
    changes = Counter[int]()
    for action in chain.from_iterable(programs):
        if action.kind is Kind.F:
            changes[action.s] += 1
        elif action.kind is Kind.B:
            changes[action.s + 1] -= 1
    return max(accumulate(changes[s] for s in sorted(changes)), default=0)


def _peak(spans: Iterable[tuple[Span, float]]) -> float:
    """Return the greatest sum of weights of half-open spans that overlap."""
    changes: dict[int, float] = {}
    for (start, end), weight in spans:
        changes[start] = changes.get(start, 0) + weight
        changes[end] = changes.get(end, 0) - weight
    return max(accumulate(changes[position] for position in sorted(changes)), default=0)
