"""starts: bring workers that begin together into the stagger of the timetable.

At the begin of a run and behind a flush all workers stand at the same place. Nothing in the data
that they exchange makes them stagger as wide as the timetable has it, so in that one step worker
w + 1 (of groups: the one in the same place of the next) waits for a signal (K) that worker w sends
when it is as far into its step as the timetable says. In all other steps nothing is sent and
nobody waits: there the stagger holds by itself, and gives way where messages need longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.messages import message

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


def start_signals(plan: Plan, block: Sequence[Action], w: int) -> Iterator[Action]:
    """Insert K into the block of a step that all workers begin together.

    Args:
        plan: its timetable says how far apart workers start.
        block: what worker ``w`` does in the step.
        w: worker.
    """
    own = [a for a in block if a.kind in (Kind.F, Kind.B)] if plan.is_staggered else []
    behind = min(2 * plan.num_stages // plan.num_groups, plan.num_stages)  # slots
    if plan.rounds > 1 and plan.relayed:  # in succession
        behind += 2 * plan.num_stages * (plan.rounds - 1)
    for a in block:
        if own and a is own[0] and w >= plan.group_size:
            yield message(Kind.RECV, Payload.K, a, w - plan.group_size)
        if own and a is own[behind] and w + plan.group_size < plan.num_workers:
            yield message(Kind.SEND, Payload.K, a, w + plan.group_size, j=0)
        yield a
