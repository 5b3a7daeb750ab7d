"""receives: say what runs beside the compute, and where each message is posted.

Of workers that run whole micro-batches, two lanes run beside the compute:

    sums      gradients are added to the sum that has come, and it is passed on
    weights   a version that has come is passed on at once, wherever the compute is

An owner sends a version itself: behind others on a lane it would wait for what comes later. Outer
weights it makes on the lane of sums, and sends them there.

Receives are posted as early as there is room, in the order of sends.

Before, every receive stands right before the action that reads its message. A message can travel
while something else is computed only if its receive is posted earlier:

    1F0  1B0  1RECV_A1<0  1F1        ->        1F0  1RECV_A1<0  1B0  1F1

It is posted at the latest of

    the begin of the step to which it belongs    so that a flush leaves nothing pending, and the
                                                 batch tells what the message will look like
    behind the first that reads the last message of the same kind and stage
                                                 whose buffer is taken then; versions and sums of
                                                 whole micro-batches stay in theirs, which come in
                                                 pairs: behind all that read the one before; norms,
                                                 few bytes that are read late, have room always
    where the message before it on its channel is posted

but no later than where it, or one behind it on its channel, is read.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from lightning_cyclic.plan.actions import COMPUTE, Action, Kind, Lane, Payload, Program
from lightning_cyclic.plan.dataflow import Dataflow, Item
from lightning_cyclic.plan.passes.messages import (
    Channel,
    begins_of_steps,
    channel_of,
    step_of,
)
from lightning_cyclic.plan.plan import Plan

# messages of one kind and stage share buffers; gradients that are added, with those of one worker
_Ring: TypeAlias = tuple[Payload | None, int, int | None]
_IN_PAIRS = frozenset({Payload.P, Payload.S, Payload.T})


def lanes(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Put actions on lanes, and what is handed on where it can come first.

    Args:
        plan: whose workers run whole micro-batches, or single stages, which have one lane.
        programs: with all messages, each receive right before its first reader.
    """
    if not plan.axes.placement.runs_whole_micro or plan.num_workers == 1:
        return programs
    return tuple(_handed_on_early(plan, program, w) for w, program in enumerate(programs))


def _lane(plan: Plan, a: Action, w: int) -> Lane:
    if a.kind in (Kind.ADD, Kind.OUTER) or a.payload in (Payload.S, Payload.T):
        return Lane.SUMS
    if a.payload is Payload.H and plan.to_owners:
        return Lane.SUMS  # who sends them makes them smaller first, beside the compute
    is_owners = (w if a.kind is Kind.SEND else a.peer) == plan.owner(a.j)
    if a.payload is Payload.U:
        return Lane.SUMS if is_owners else Lane.WEIGHTS
    return Lane.WEIGHTS if a.payload is Payload.P and not is_owners else Lane.MAIN


def _handed_on_early(plan: Plan, program: Program, w: int) -> Program:
    """Move the handing on of versions to where there is room for them.

    There is behind the last read of the version two before, as buffers come in pairs, and not
    before the step of the update begins.
    """
    marked = [replace(a, lane=lane) if (lane := _lane(plan, a, w)) else a for a in program]
    begins, numbers = begins_of_steps(marked), range(len(marked))
    last_read = {(a.j, a.v): n for n, a in enumerate(marked) if a.kind in COMPUTE}
    handed_on = [
        n for n in numbers
        if marked[n].lane is Lane.WEIGHTS and marked[n].kind is Kind.SEND
        and marked[n].payload is Payload.P
    ]  # fmt: skip
    places, moved, least = list(numbers), [], 0
    for n in handed_on:
        j, v = marked[n].j, marked[n].v or 0
        room = last_read.get((j, v - 2), -1) + 1
        least = min(max(least, room, begins[v - 1]), n)
        places[n] = least
        moved.append(n)
    rank = {n: k for k, n in enumerate(moved)}
    order = sorted(numbers, key=lambda n: (places[n], n not in rank, rank.get(n, n)))
    return tuple(marked[n] for n in order)


def receives(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Move receives forward.

    Args:
        plan: whose workers run whole micro-batches, or single stages.
        programs: with each receive right before its first reader.

    Returns:
        The same actions, in which the n-th receive of a channel is that of its n-th send.
    """
    sent = _sent(programs)
    return tuple(
        _moved(program, w, sent, list(_earliest(plan, Dataflow(plan, w), program)))
        for w, program in enumerate(programs)
    )


def _sent(programs: Sequence[Program]) -> dict[Channel, list[Action]]:
    sent: defaultdict[Channel, list[Action]] = defaultdict(list)
    for w, program in enumerate(programs):
        for a in program:
            if a.kind is Kind.SEND:
                sent[channel_of(a, w)].append(replace(a, kind=Kind.RECV, peer=w))
    return sent


def _earliest(plan: Plan, flow: Dataflow, program: Program) -> Iterator[int]:
    """Yield the first place at which each action could stand: receives early, others not."""
    begins, read_by = _begins(program), _readers(flow, program)
    stays_put = plan.axes.sharding.gathers  # where bytes are only there while they are used
    read: defaultdict[_Ring, list[int]] = defaultdict(list)  # where earlier messages are read
    for n, a in enumerate(program):
        if a.kind is not Kind.RECV or a.payload is Payload.D or stays_put:
            yield n
            continue
        stays = plan.axes.placement.runs_whole_micro and a.payload in _IN_PAIRS
        earlier = read[a.payload, a.j, a.peer if a.payload is Payload.H else None]
        is_free = len(earlier) <= stays or a.payload is Payload.N
        room = 0 if is_free else earlier[-1 - stays] + 1
        yield min(n, max(begins[step_of(a)], room))
        (item,) = flow(a).makes
        readers = [m for m in read_by.get(item, ()) if m > n] or [n]
        earlier.append(max(readers) if stays else min(readers))


def _begins(program: Program) -> list[int]:
    """Return where each step begins, behind its batch, which tells what messages look like."""
    return [
        next(n for n in range(begin, len(program)) if program[n].payload is not Payload.D)
        for begin in begins_of_steps(program)
    ]


def _readers(flow: Dataflow, program: Program) -> dict[Item, list[int]]:
    readers: defaultdict[Item, list[int]] = defaultdict(list)
    for n, a in enumerate(program):
        for item in flow(a).reads:
            readers[item].append(n)
    return readers


def _moved(
    program: Program, w: int, sent: dict[Channel, list[Action]], earliest: list[int]
) -> Program:
    places: dict[int, list[int]] = defaultdict(list)  # before which action -> receives, by number
    for numbers in _by_channel(program, w, sent):
        latest = list(numbers)
        for k in reversed(range(len(numbers) - 1)):
            latest[k] = min(latest[k], latest[k + 1])
        place = 0
        for n, last in zip(numbers, latest, strict=True):
            place = min(max(place, earliest[n]), last)
            places[place].append(n)
    slots = [a.s for a in program]
    return tuple(_in_order(program, places, slots))


def _by_channel(
    program: Program, w: int, sent: dict[Channel, list[Action]]
) -> Iterator[list[int]]:
    """Yield for each channel its receives, by their numbers, in the order of its sends."""
    numbers: defaultdict[Channel, defaultdict[Action, deque[int]]]
    numbers = defaultdict(lambda: defaultdict(deque))
    for n, a in enumerate(program):
        if a.kind is Kind.RECV:
            numbers[channel_of(a, w)][a].append(n)
    for channel, found in numbers.items():
        yield [found[a].popleft() for a in sent[channel] if found[a]]


def _in_order(
    program: Program, places: dict[int, list[int]], slots: list[int]
) -> Iterator[Action]:
    """Yield the actions; a receive that is early takes the slot of its place."""
    for place, a in enumerate(program):
        for n in places[place]:
            b = program[n]
            yield replace(b, s=slots[place]) if slots[place] != b.s else b
        if a.kind is not Kind.RECV:
            yield a
