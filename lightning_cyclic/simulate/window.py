"""A window of a steady run: everything that has its turn in as many slots as a step has.

Steps overlap, but in a window each compute and each message of a step is once, of one step or of
another, so that every window is the one before it, one step later. What a node waits for is in its
own window, or in one before.

    slot     0   1   2   3 | 4   5   6   7 |         S=2, N=2
    w0      0F0 1F0 1B0 0B0|0F0 1F0 1B0 0B0|
    w1       .   . 0F1 1F1 |1B1 0B1 0F1 1F1|         backwards here, of the step before

Nodes are computes, and chunks of messages. They come in *waves*: those of one wave do not wait for
each other, so that it is computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from lightning_cyclic.simulate.timetable import NONE, Flags, Ints, Timetable


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Say which nodes others wait for.

    Args:
        node: of each node another, or NONE.
        back: in which window that is, before the own one.
    """

    node: Ints
    back: Ints


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Hold what waits for what: arrays over computes, then chunks of messages.

    Args:
        shift: in which window the node of step 0 is.
        lane: what each waits for on its lane, or on the port through which it leaves.
        inlet: of messages, what each waits for on the port through which it comes in.
        made_by: the data that each waits for: what a compute reads, what has made a message.
        carried_by: the message that a message is handed on from.
        adding: nodes that wait for all gradients of a group, too.
        adds: which these are: a row for each.
    """

    shift: Ints
    lane: Waits
    inlet: Waits
    made_by: Waits
    carried_by: Waits
    adding: Ints
    adds: Waits

    @property
    def waits(self) -> tuple[Waits, ...]:
        """All that nodes wait for."""
        return self.lane, self.inlet, self.made_by, self.carried_by


def window(timetable: Timetable, holds: Flags, inside: Flags, num_chunks: int) -> Window:
    """Lay out a window.

    Args:
        timetable: of the plan, which keeps its own order.
        holds: which messages hold ports, as they have bytes.
        inside: which stay on their host, whose ports are others.
        num_chunks: in which each travels.
    """
    computes, messages, k = timetable.computes, timetable.messages, num_chunks
    shift, turn = np.divmod(messages.due, timetable.period)
    late, time = np.divmod(computes.time, timetable.period)
    keys = turn, ~messages.is_sum, messages.rank, messages.j
    size = len(late)
    outlet, inlet = (
        _in_pieces(_one_by_one(who, keys, holds), k, size)
        for who in (2 * messages.source + inside, 2 * messages.target + inside)
    )
    every = np.full(size, True)
    lanes = _one_by_one(computes.worker, (time, computes.kind > 0, computes.j), every)
    reads = Waits(
        node=np.where(computes.reads == NONE, NONE, size + computes.reads * k + k - 1),
        back=late - shift[computes.reads] + computes.older,
    )
    nothing = _nothing(size)
    made_by = Waits(
        node=np.repeat(messages.made_by, k), back=np.repeat(shift - late[messages.made_by], k)
    )
    carried = np.repeat(messages.carried_by, k)
    carried_by = Waits(
        node=np.where(carried == NONE, NONE, size + carried * k + _numbers(len(shift), k)),
        back=np.repeat(shift - shift[messages.carried_by], k),
    )
    adding, adds = _added(timetable, late, shift, k)
    return Window(
        shift=np.concatenate([late, np.repeat(shift, k)]),
        lane=_joined(lanes, outlet),
        inlet=_joined(nothing, inlet),
        made_by=_joined(reads, made_by),
        carried_by=_joined(nothing, carried_by),
        adding=adding,
        adds=adds,
    )


def _added(timetable: Timetable, late: Ints, shift: Ints, k: int) -> tuple[Ints, Waits]:
    """Return the nodes that add gradients of a group, and these: computes, chunks of messages."""
    computes, messages, size = timetable.computes, timetable.messages, len(late)
    updates, sums = (np.flatnonzero((x.adds != NONE).any(axis=1)) for x in (computes, messages))
    whole, pieces = computes.adds[updates], np.repeat(messages.adds[sums], k, axis=0)
    return np.concatenate([updates, (size + sums[:, None] * k + np.arange(k)).ravel()]), Waits(
        node=np.concatenate(
            [
                size + whole * k + k - 1,
                size + pieces * k + _numbers(len(sums), k)[:, None],
            ]
        ),
        back=np.concatenate(
            [
                late[updates][:, None] - shift[whole],
                np.repeat(shift[sums], k)[:, None] - shift[pieces],
            ]
        ),
    )


def waves(found: Window) -> Ints:
    """Return in which wave each node is: behind the waves of all that it waits for."""
    size = len(found.shift)
    now = [(waits.node != NONE) & (waits.back == 0) for waits in found.waits]
    added = found.adds.back == 0
    rows = np.broadcast_to(found.adding[:, None], added.shape)
    after = np.concatenate([*map(np.flatnonzero, now), rows[added]])
    firsts = [w.node[x] for w, x in zip(found.waits, now, strict=True)]
    on = np.concatenate([*firsts, found.adds.node[added]])
    blockers = np.bincount(after, minlength=size)
    after = after[np.argsort(on, kind="stable")]
    begins = np.concatenate([[0], np.cumsum(np.bincount(on, minlength=size))])
    wave, number = np.full(size, NONE), 0
    nodes = np.flatnonzero(blockers == 0)
    while len(nodes):
        wave[nodes] = number
        number += 1
        counts = begins[nodes + 1] - begins[nodes]
        offsets = begins[nodes] - np.cumsum(counts) + counts
        others = after[np.repeat(offsets, counts) + np.arange(counts.sum())]
        np.subtract.at(blockers, others, 1)
        nodes = np.unique(others[blockers[others] == 0])
    assert wave.min(initial=0) >= 0  # what a timetable has in its order waits for nobody for ever
    return wave


def _one_by_one(who: Ints, keys: Sequence[np.ndarray[Any, Any]], takes_part: Flags) -> Waits:
    """Let what one worker does wait for what it does before; the first for the window before."""
    number = np.flatnonzero(takes_part)
    if not len(number):
        return _nothing(len(who))
    sorted_by = [key[number] for key in reversed(keys)]
    number = number[np.lexsort([*sorted_by, who[number]])]
    node, back = np.full(len(who), NONE), np.zeros(len(who), np.int64)
    begins = np.flatnonzero(np.diff(who[number], prepend=NONE))
    node[number[1:]] = number[:-1]
    node[number[begins]] = number[np.append(begins[1:], len(number)) - 1]
    back[number[begins]] = 1
    return Waits(node=node, back=back)


def _in_pieces(waits: Waits, k: int, begin: int) -> Waits:
    """Let chunks wait for the chunk before them, and the first for the last of its forerunner."""
    last = np.where(waits.node == NONE, NONE, begin + waits.node * k + k - 1)
    node, back = np.repeat(last, k), np.repeat(waits.back, k)
    follows = (_numbers(len(last), k) > 0) & (node != NONE)
    node[follows] = begin + np.flatnonzero(follows) - 1
    back[follows] = 0
    return Waits(node=node, back=back)


def _nothing(size: int) -> Waits:
    return Waits(node=np.full(size, NONE), back=np.zeros(size, np.int64))


def _numbers(size: int, k: int) -> Ints:
    return np.tile(np.arange(k), size)


def _joined(first: Waits, then: Waits) -> Waits:
    node = np.concatenate([first.node, then.node])
    back = np.concatenate([first.back, then.back])
    return Waits(node=node, back=np.where(node == NONE, 0, back))
