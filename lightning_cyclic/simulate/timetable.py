"""What workers that run whole micro-batches compute and send in a step, as arrays of integers.

The same as their programs say, of plans whose programs nobody could make: ten thousand workers
exchange a hundred million messages. One step stands for all, as each is the one before, moved:

    sums         S  worker 0 -> 1 -> ... -> N-1, and T, the total, from there to the owner
    parameters   P  owner -> ... along the chain of their readers

In groups that is so between their leads. The others send theirs, H, gradients, to their lead, and
get parameters from it. A worker alone leads a group of its own.

Numbers are those of step 0, of the version that it makes, and of who reads that version.

Messages are *due*, in ticks (plan/clock.py), which are exact where slots are rounded:

    a sum        where the next worker's backward of the stage ends, to which it is added
    a total      where it is made, as the last worker's backward ends
    a gradient   where it is made, too, as its lead's backward ends with its own
    parameters   where the worker that they go to reads them first, but not before the update, nor
                 before the worker that hands them on has them
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, final

import numpy as np

from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.plan import Plan

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Flags: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
NONE = -1
KINDS = (Kind.UPDATE, Kind.F, Kind.B)  # an update comes before what begins in its slot


def is_regular(plan: Plan) -> bool:
    """Say whether a plan's program is nothing but what is listed here, step by step alike.

    Else buffers, norms or shards travel, too, steps differ, or messages have no fixed order that
    is any good.

    Args:
        plan: any.
    """
    axes, schedule = plan.axes, plan.axes.schedule
    return (
        axes.placement.runs_whole_micro
        and not axes.sharding.gathers
        and not (plan.relayed or plan.tied or plan.late_updates)
        and plan.norms == "none"
        and plan.schedule == "cyclic"
        and plan.weights in ("freshest", "delayed")
        and schedule.period % schedule.unit == 0
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Computes:
    """Hold forwards, backwards and updates: parallel arrays.

    Args:
        kind: which of ``KINDS`` each is.
        j: stages.
        worker: who runs them.
        time: slots in which they begin, in ticks.
        reads: messages that they wait for; NONE for none.
        older: by how many steps these are older.
        adds: gradients of the own group that they wait for, too; a row of NONE for none.
    """

    kind: Ints
    j: Ints
    worker: Ints
    time: Ints
    reads: Ints
    older: Ints
    adds: Ints


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Hold messages, each of which travels in as many chunks as its plan says: parallel arrays.

    Args:
        is_sum: whether they carry gradients; else parameters.
        j: stages.
        source: workers that send.
        target: workers that receive.
        due: ticks at which they are due.
        rank: which goes first of those that are due at once: the least.
        made_by: computes that they wait for; NONE for none.
        carried_by: messages that they wait for, of the same step; NONE for none.
        adds: gradients of a group that its sum waits for, too; a row of NONE for none.
    """

    is_sum: Flags
    j: Ints
    source: Ints
    target: Ints
    due: Ints
    rank: Ints
    made_by: Ints
    carried_by: Ints
    adds: Ints


@final
class Timetable:
    """Know what a step consists of.

    Args:
        plan: a regular one.
    """

    def __init__(self, plan: Plan) -> None:
        schedule, w, j = plan.axes.schedule, range(plan.num_workers), range(plan.num_stages)
        self._plan = plan
        self._unit, self.period = schedule.unit, schedule.period
        self._shape = plan.rounds, plan.num_workers, plan.num_stages
        self._groups = plan.num_groups, plan.group_size
        self._forward, self._backward = map(self._ticks, (schedule.forward, schedule.backward))
        self.owner = np.array([plan.owner(k) for k in j])
        self._leads = np.array([[plan.lead(x, k) for x in w[:: plan.group_size]] for k in j])
        self._chain = np.array([plan.chain(k) for k in j])
        self._place = np.argsort(self._chain // plan.group_size, axis=1)  # of groups, in chains
        t = plan.late_step
        self._lag = t - np.array([[plan.reads(t, i, k) for k in j] for i in w])
        self._first_read = self._forward[0] + self.period * (1 + self._lag)
        behind = self._on_time(self._backward[-1, :, 0]) + self._unit  # what each computes
        if plan.axes.weights.at_end_of_step:
            behind = np.full_like(behind, behind.max())
        self._update = self._updates(behind)

    def _on_time(self, ticks: Ints) -> Ints:
        """Round up to whole slots, in which programs begin what they compute."""
        return -(-ticks // self._unit) * self._unit

    @property
    def ends(self) -> Ints:
        """The computes with which the workers' backwards of a step end."""
        _, num_workers, num_stages = self._shape
        return self._backwards(np.arange(num_workers), np.zeros(num_workers, np.int64))

    @property
    def updates(self) -> Ints:
        """The updates among the computes."""
        return np.arange(self._shape[-1])

    @cached_property
    def keeps_order(self) -> bool:
        """Say whether each message is due behind all that it waits for, and before its readers.

        Then turns are those of the timetable, and every window of a period holds all once.
        """
        computes, messages = self.computes, self.messages
        x = computes.reads != NONE
        due = messages.due[computes.reads] - self.period * computes.older
        y, before = messages.carried_by != NONE, messages.carried_by
        z, made = messages.made_by != NONE, messages.made_by
        return bool(
            np.all(due[x] <= computes.time[x])
            and np.all(messages.due[before][y] <= messages.due[y])
            and np.all(computes.time[made][z] <= messages.due[z])
            and all(
                np.all((added == NONE) | (messages.due[added] <= limit[:, None]))
                for added, limit in (
                    (computes.adds, computes.time), (messages.adds, messages.due),
                )
            )
        )  # fmt: skip

    @cached_property
    def computes(self) -> Computes:
        """All computes of a step: updates, forwards, backwards."""
        number, w, j = (x.ravel() for x in np.indices(self._shape))
        stages, last = self.updates, self._leads[:, -1]
        waits = (number == 0) & (w != self.owner[j])
        reads = np.where(waits, self._brings(w, j), NONE)
        total, before = (self._sum_of(x, stages) for x in (last, self._leads[:, -2:][:, 0]))
        total = np.where(self.owner == last, before, total)
        is_alone = self._groups[0] == 1
        adds = np.where((self.owner == last)[:, None], self._added(last, stages), NONE)
        none = np.full_like(j, NONE)
        return Computes(
            kind=np.repeat([0, 1, 2], [len(stages), len(j), len(j)]),
            j=np.concatenate([stages, j, j]),
            worker=np.concatenate([self.owner, w, w]),
            time=np.concatenate(
                [
                    self._update,
                    *(self._on_time(x).ravel() for x in (self._forward, self._backward)),
                ]
            ),
            reads=np.concatenate([none[: len(stages)] if is_alone else total, reads, none]),
            older=np.concatenate([0 * stages, 1 + self._lag[w, j], 0 * j]),
            adds=np.concatenate([adds, np.full((2 * len(j), adds.shape[1]), NONE)]),
        )

    @cached_property
    def messages(self) -> Messages:
        """All messages of a step: sums, stage by stage, then parameters."""
        sums, parameters = self._sums(), self._parameters()
        return Messages(**{name: np.concatenate([sums[name], parameters[name]]) for name in sums})

    def _ticks(self, start: Any) -> Ints:
        """Return the ticks of step 0 by round, worker and stage."""
        i = np.arange(self._plan.num_micro)[:, None]
        ticks = start(i, np.arange(self._shape[-1])[None, :])  # integers, or arrays of them
        ticks = np.broadcast_to(ticks, (self._plan.num_micro, self._shape[-1]))
        return np.asarray(ticks, np.int64).reshape(self._shape)

    def _updates(self, behind: Ints) -> Ints:
        """Return where owners make the version of step 0: behind their step, or where it is read.

        Stages that an owner reads in one step are due with the first of them.
        """
        found: Ints = behind[self.owner]
        first: dict[tuple[int, int], int] = {}
        read = self._on_time(self._first_read)
        for j, w in enumerate(self.owner):
            if not self._plan.axes.weights.at_end_of_step and not self._plan.is_late(j):
                found[j] = first.setdefault((w, self._lag[w, j]), read[w, j])
        return found

    def _backwards(self, w: Ints, j: Ints) -> Ints:
        """Return the computes that are the last backwards of workers."""
        rounds, num_workers, num_stages = self._shape
        before = num_stages + rounds * num_workers * num_stages
        found: Ints = before + ((rounds - 1) * num_workers + w) * num_stages + j
        return found

    def _sum_of(self, w: Ints, j: Ints) -> Ints:
        """Return the messages in which workers send sums or gradients of stages."""
        return j * self._shape[1] + w

    def _added(self, lead: Ints, j: Ints) -> Ints:
        """Return the gradients that leads get from their groups: a row for each."""
        size = self._groups[1]
        others = np.arange(size - 1)[None, :]
        others = others + (others >= (lead % size)[:, None])
        return self._sum_of((lead - lead % size)[:, None] + others, j[:, None])

    def _brings(self, w: Ints, j: Ints) -> Ints:
        """Return the messages that bring parameters to workers who are not the owner."""
        (num_groups, size), (_, num_workers, num_stages) = self._groups, self._shape
        lead, group = self._leads[j, w // size], w // size
        number = w % size - (w > lead)  # in the group, without its lead
        behind = num_groups - 1 + group * (size - 1) + number
        hops = np.where(w == lead, self._place[j, group] - 1, behind)
        found: Ints = num_stages * num_workers + j * (num_workers - 1) + hops
        return found

    def _sums(self) -> dict[str, Ints]:
        (num_groups, size), (_, num_workers, num_stages) = self._groups, self._shape
        j, w = (x.ravel() for x in np.indices((num_stages, num_workers)))
        group = w // size
        lead, is_last = self._leads[j, group], group == num_groups - 1
        adds_next = self._leads[j, np.minimum(group + 1, num_groups - 1)]
        leads = w == lead
        target = np.where(leads, np.where(is_last, self.owner[j], adds_next), lead)
        before = self._sum_of(self._leads[j, np.maximum(group - 1, 0)], j)
        return {
            "is_sum": np.full(len(j), True),
            "j": j,
            "source": w,
            "target": target,
            "due": self._backward[-1, np.where(leads, adds_next, w), j] + self._unit,
            "rank": np.where(leads, size + group, w % size),
            "made_by": self._backwards(w, j),
            "carried_by": np.where(leads & (group > 0), before, NONE),
            "adds": np.where(leads[:, None], self._added(w, j), NONE),
        }

    def _parameters(self) -> dict[str, Ints]:
        (num_groups, size), (_, num_workers, num_stages) = self._groups, self._shape
        j, hops = (x.ravel() for x in np.indices((num_stages, num_groups - 1)))
        due = np.maximum(self._update[j], self._first_read[self._chain[j, hops + 1], j])
        due = np.maximum.accumulate(due.reshape(num_stages, -1), axis=1)
        at_lead = np.concatenate([self._update[:, None], due], axis=1)  # by place in the chain

        j, w = (x.ravel() for x in np.indices((num_stages, num_workers)))
        j, w = (x[w != self.owner[j]] for x in (j, w))
        order = np.argsort(self._brings(w, j))
        j, w = j[order], w[order]
        lead, place = self._leads[j, w // size], self._place[j, w // size]
        leads = w == lead
        source_place = np.where(leads, place - 1, place)
        source = np.where(leads, self._chain[j, place - 1], lead)
        first = np.maximum(at_lead[j, place], self._first_read[w, j])
        return {
            "is_sum": np.full(len(j), False),
            "j": j,
            "source": source,
            "target": w,
            "due": np.where(leads, at_lead[j, place], first),
            "rank": size * source_place + np.where(leads, 0, 1 + w % size),
            "made_by": np.where(source_place == 0, j, NONE),
            "carried_by": np.where(source_place == 0, NONE, self._brings(source, j)),
            "adds": np.full((len(j), size - 1), NONE),
        }
