"""The account of a plan: messages, bytes, weight versions and activations, counted on programs.

Nothing here is a formula: what a paper says about a schedule is asserted on these counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import final

from lightning_cyclic.plan.actions import MAKE_GRADIENTS, Action, Kind, Payload
from lightning_cyclic.plan.dataflow import live_activations, live_versions, peak, versions
from lightning_cyclic.simulate.costs import Costs


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAccount:
    """Hold what one worker sends in a steady step, or a period of them, and keeps at most.

    Args:
        sent_messages: messages sent in it, by payload.
        sent_bytes: bytes sent in it, by payload.
        versions: most versions of one stage that are alive at once.
        param_bytes: most bytes of parameters, of all versions and stages, alive at once.
        activations: most forwards whose backward is still to come, each of one stage and one
            micro-batch.
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
        activations: most forwards whose backward is still to come, over all workers at once,
            in one slot of the timetable.
    """

    workers: tuple[WorkerAccount, ...]
    activations: int


def account(programs: Sequence[Sequence[Action]], costs: Costs, *, period: int = 1) -> Account:
    """Count what the programs send and keep.

    Args:
        programs: actions of each worker, in program order; of at least three steps, so that the
            middle one is steady, or of two periods and two steps.
        period: steps whose messages are counted, from the middle one on. [1]

    Returns:
        The messages of these steps, and the peaks over all steps.
    """
    num_steps = 1 + max((action.t for program in programs for action in program), default=0)
    return Account(
        workers=tuple(
            _worker(program, costs, range(num_steps // 2, num_steps // 2 + period))
            for program in programs
        ),
        activations=_peak_over_workers(programs),
    )


def _worker(program: Sequence[Action], costs: Costs, steps: range) -> WorkerAccount:
    sends = [action for action in program if action.kind is Kind.SEND and action.t in steps]
    messages, num_bytes = Counter[Payload](), dict[Payload, float]()
    for action in sends:
        assert action.payload is not None  # as for every SEND
        messages[action.payload] += 1
        sent = costs.message_bytes(action)
        num_bytes[action.payload] = num_bytes.get(action.payload, 0) + sent
    kept = ((x.begin, x.end, costs.param_bytes[x.a.j]) for x in versions(program))
    return WorkerAccount(
        sent_messages=messages,
        sent_bytes=num_bytes,
        versions=max(live_versions(program).values(), default=0),
        param_bytes=peak(kept),
        activations=live_activations(program),
        updates=len({action.j for action in program if action.kind is Kind.UPDATE}),
    )


def _peak_over_workers(programs: Sequence[Sequence[Action]]) -> int:
    """Return the most activations in any slot; a backward, or W, frees its own behind its slot."""
    changes = Counter[int]()
    for action in chain.from_iterable(programs):
        if action.kind is Kind.F:
            changes[action.s] += 1
        elif action.kind in MAKE_GRADIENTS:
            changes[action.s + 1] -= 1
    return max(accumulate(changes[s] for s in sorted(changes)), default=0)
