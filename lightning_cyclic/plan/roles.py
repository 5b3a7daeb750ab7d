"""Roles: who uses the parameters of a stage, who adds its gradients, who is handed its buffers.

Parameters that several stages use stay one parameter, wherever stages run. The first stage that
uses them counts them among its own: there all gradients meet, and there they are updated. All
stages read the version that the first one reads. Under ``tied=((0, 3),)`` stage 3 uses parameters
of stage 0.
"""

from __future__ import annotations

from lightning_cyclic.plan.actions import MAKE_GRADIENTS, Action, Kind, Payload
from lightning_cyclic.plan.plan import Plan

# ---------------------------------------------------------------------- tied parameters


def first_users(plan: Plan, j: int) -> tuple[int, ...]:
    """List the stages before j whose parameters stage j uses, in the order of backwards."""
    return tuple(sorted({tie[0] for tie in plan.tied if j in tie[1:]}, reverse=True))


def later_users(plan: Plan, j: int) -> tuple[int, ...]:
    """List the stages behind j that use parameters of stage j, in the order of backwards."""
    return tuple(sorted({k for tie in plan.tied if tie[0] == j for k in tie[1:]}, reverse=True))


def workers_of_later_users(plan: Plan, a: Action) -> tuple[int, ...]:
    """List who has gradients for the parameters of a stage when its B comes, in their order."""
    return tuple(dict.fromkeys(plan.worker_of(a.i or 0, k, a.t) for k in later_users(plan, a.j)))


def gradient_sources(plan: Plan, a: Action, w: int) -> tuple[int, ...]:
    """List the workers that send W to worker w before its B of a first stage."""
    return tuple(user for user in workers_of_later_users(plan, a) if user != w)


def reads_tied(plan: Plan, a: Action, first: int) -> int:
    """Give the version of tied parameters that an F or B reads: the one that the first stage read.

    So a parameter has one value for each micro-batch, though later stages could read a newer one.
    """
    return plan.reads(a.t, a.i or 0, first)


def version_readers(plan: Plan, j: int) -> tuple[int, ...]:
    """List the workers that use parameters of stage j without holding stage j."""
    workers_of = plan.axes.placement.workers_of
    holders = workers_of(j)
    users = (w for k in later_users(plan, j) for w in workers_of(k))
    return tuple(dict.fromkeys(w for w in users if w not in holders))


# ---------------------------------------------------------------------- sums of gradients


def first_that_counts(plan: Plan) -> int:
    """Give the first micro-batch whose gradient is handed on.

    Of replicas that sum their own (pipelines, or workers that run several rounds), the last
    micro-batch of each stands for all of them.
    """
    return plan.num_microbatches - plan.copies_of_stages if plan.sums_by_replica else 0


def adder(plan: Plan, i: int, j: int, t: int) -> int:
    """Give the worker that adds the gradient of a micro-batch to the sum of those before it."""
    if plan.owners_add:
        return plan.owner(j)
    w = plan.worker_of(i, j, t)
    return plan.lead(w, j) if plan.sends_gradients else w


def source_of_sum(plan: Plan, a: Action) -> int | None:
    """Give the worker from which the sum comes that a gradient is added to; None for no other.

    Args:
        a: F, B or ADD of a micro-batch.
    """
    i = a.i or 0
    if i <= first_that_counts(plan):
        return None
    before = adder(plan, i - 1, a.j, a.t)
    return None if before == adder(plan, i, a.j, a.t) else before


def adds_at_once(plan: Plan, a: Action) -> bool:
    """Say whether the backward of a micro-batch adds to the sum of those before it.

    So it does where one worker runs it and the one before; else ADD does. No backward adds
    differences of weights, which come behind it.
    """
    if plan.axes.weights.is_local:
        return False
    if plan.sends_gradients or (a.i or 0) < first_that_counts(plan):
        return False
    return source_of_sum(plan, a) is None


def completes(plan: Plan, a: Action, w: int) -> bool:
    """Say whether a sum of which a worker is the owner is whole behind an action."""
    if plan.owner(a.j) != w:
        return False
    if a.kind is Kind.RECV:
        return a.payload is Payload.T
    if a.i != plan.num_microbatches - 1:
        return False
    return a.kind in MAKE_GRADIENTS if adds_at_once(plan, a) else a.kind is Kind.ADD


# ---------------------------------------------------------------------- buffers


def handed_before(plan: Plan, a: Action) -> int:
    """Count the micro-batches of all steps whose buffers come before those of an action's."""
    return a.t * plan.num_microbatches + plan.handed_on_as(a.i or 0)


def handed_at(plan: Plan, k: int) -> tuple[int, int]:
    """Return step and number of the micro-batch before whose buffers those of k others come."""
    t, place = divmod(k, plan.num_microbatches)
    w, number = divmod(place, plan.rounds)
    return t, number * plan.num_workers + w if plan.rounds > 1 else place


def stages_until(plan: Plan) -> dict[int, list[int]]:
    """Return the stage behind whose forward buffers are handed on -> the stages they are of."""
    found: dict[int, list[int]] = {}
    for j, end in zip(plan.relayed, plan.relayed_until or plan.relayed, strict=True):
        found.setdefault(end, []).append(j)
    return found
