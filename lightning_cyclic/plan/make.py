"""Plans are made of a name and numbers, and proved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NoReturn

from lightning_cyclic.errors import PlanError, ValidationError, one_of
from lightning_cyclic.plan.check.fit import check_fit, groups_of_stages, relays
from lightning_cyclic.plan.check.proof import check_timetable, proof_of
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.presets import (
    PLACEMENTS,
    PRESETS,
    Preset,
    check_group_size,
    check_number,
    chosen_axes,
    default_num_micro,
    default_spacing,
    local_steps,
)
from lightning_cyclic.plan.weights import LocalSteps


def make_plan(  # noqa: PLR0913  (one argument per axis and number is the public face)
    preset: str,
    *,
    num_stages: int,
    num_workers: int,
    num_microbatches: int | None = None,
    num_steps: int = 4,
    slack: int = 0,
    schedule: str | None = None,
    placement: str | None = None,
    weights: str | LocalSteps | None = None,
    sharding: str | None = None,
    relayed: Iterable[int] = (),
    replicas: int = 1,
    tied: Iterable[Iterable[int]] = (),
    late_updates: bool = False,
    norms: str = "none",
    relayed_until: Iterable[int] = (),
    group_size: int = 1,
    offloads: bool = False,
    to_owners: bool = False,
    proved: bool = True,
) -> Plan:
    """Make a plan from a preset, with any axis replaced, and prove that it can run.

    Args:
        preset: name in :data:`PRESETS`.
        num_stages: S, at least 1.
        num_workers: N, at least 1.
        num_microbatches: m, micro-batches per update; of workers that run whole ones, the same
            number on each: rounds. [None: one per worker where workers run whole micro-batches,
            one where the rule updates after each, else one per stage; times the replicas]
        num_steps: training steps that the program covers, at least 1. [4]
        slack: slots that a new version needs to travel. [0: CDP-v2]
        schedule: replaces the preset's axis value, as do the next three. [None: the preset's]
        placement: who runs what. [None: the preset's]
        weights: which version is read; of local steps also their numbers. [None: the preset's]
        sharding: who keeps what. [None: the preset's, or "none" where no stage is replicated]
        relayed: stages whose module buffers travel from micro-batch to micro-batch. [()]
        replicas: replicas of a pipeline; micro-batch i runs on replica i % replicas, as its
            micro-batch i // replicas. [1]
        tied: groups of stages that share parameters, ascending, such as ``((0, 3),)``; the first
            of a group updates them. [()]
        late_updates: update a stage right before its new version is first read, so that all
            stages can decide together about a step. [False: as soon as its gradients are there]
        norms: who is told the norms of all gradients of a step before it is applied: "none", all
            "owners" of stages, or "all" workers. ["none"]
        relayed_until: the last stage in which the buffers of each relayed stage change. [itself]
        group_size: how many neighbours, of workers that run whole micro-batches, are a group.
            Those of a group run in the same slots, and groups are staggered as single workers
            would be: weights are as late as with so many workers. Sums and parameters
            travel from group to group, and from one worker of a group to its others.
            [1: each worker is one]
        offloads: put away what a forward of a pipeline leaves for its backward, and bring it back
            before that, where enough is computed between the two. [False: it stays in memory]
        to_owners: send the gradient of each micro-batch straight to the owner of its stage, who
            adds them in their order, as sharded weights have it; else partial sums travel, where
            nothing else asks for it. What a codec makes smaller travels so. [False]
        proved: also prove that the program can run; else only that axes and numbers fit, and that
             the timetable has what it reads, for those who make many plans to run one. [True]

    Returns:
        The plan; its program is made when first asked for.

    Raises:
        PlanError: a name is unknown, or numbers and axes do not fit together.
        ValidationError: the program would break a rule; the text points at the action.

    Example:
        >>> from lightning_cyclic.plan import programs_of
        >>> plan = make_plan("1f1b", num_stages=2, num_workers=2, num_microbatches=1, num_steps=1)
        >>> [str(a) for a in programs_of(plan)[1]][:4]
        ['1RECV_D<0#0', '1RECV_A0<0#0', '1F0@0#0', '1B0@0#0']
    """
    if preset not in PRESETS:
        raise PlanError(one_of(preset, list(PRESETS), "preset", 'use preset="cyclic_dp"'))
    axes, local = _axes_and_local(PRESETS[preset], schedule, placement, weights, sharding)
    check_number("num_stages", num_stages)
    check_number("num_workers", num_workers)
    check_number("num_steps", num_steps)
    check_number("slack", slack, least=0)
    check_number("replicas", replicas)
    if num_microbatches is None:
        num_microbatches = default_num_micro(axes, num_stages, num_workers) * replicas
    check_number("num_microbatches", num_microbatches)
    each = num_workers if PLACEMENTS[axes["placement"]].runs_whole_micro else num_microbatches
    check_group_size(group_size, each)
    relayed, relayed_until = relays(relayed, relayed_until, num_stages)
    plan = Plan(
        preset=preset,
        num_stages=num_stages,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        num_steps=num_steps,
        slack=slack,
        **axes,
        relayed=relayed,
        spacing=default_spacing(PRESETS[preset], axes, num_stages, each // group_size),
        replicas=replicas,
        tied=groups_of_stages(tied),
        late_updates=late_updates,
        norms=norms,
        relayed_until=relayed_until,
        updates_meet=False,
        group_size=group_size,
        tiers=None,
        offloads=offloads,
        local=local,
        to_owners=to_owners,
    )
    return _proved(plan) if proved else _fitting(plan)


def _axes_and_local(
    preset: Preset,
    schedule: str | None,
    placement: str | None,
    weights: str | LocalSteps | None,
    sharding: str | None,
) -> tuple[dict[str, str], LocalSteps | None]:
    """Return the value of each axis, and the numbers of local steps, if the weights are local."""
    given = weights if isinstance(weights, LocalSteps) else None
    rule = "local" if isinstance(weights, LocalSteps) else weights
    asked = {"schedule": schedule, "placement": placement, "weights": rule, "sharding": sharding}
    axes = chosen_axes(preset, asked)
    return axes, given or local_steps(preset, axes)


def _fitting(plan: Plan) -> Plan:
    """Return a plan of which axes and numbers fit, and whose timetable has what it reads."""
    check_fit(plan)
    check_timetable(plan)
    return plan


@lru_cache(maxsize=32)
def _proved(plan: Plan) -> Plan:
    """Return an equal plan that can run, with what has been derived of it before."""
    _fitting(plan)
    try:
        proof_of(plan)
    except ValidationError as error:
        # An owner that updates where it first reads a new version keeps those waiting whose
        # buffers come from it, and who may have to tell it their norms first.
        meeting = replace(plan, updates_meet=True)
        if plan.norms == "owners" and _can_run(meeting):
            return meeting
        if plan.norms == "owners" or plan.relayed:
            _refuse_to_wait(plan, error)
        raise
    return plan


def _can_run(plan: Plan) -> bool:
    try:
        return bool(proof_of(plan))
    except ValidationError:
        return False


def _refuse_to_wait(plan: Plan, error: ValidationError) -> NoReturn:
    """Name the buffers and norms for which workers wait in a circle.

    Raises:
        PlanError: always; what it advises has been proved, or is always possible.
    """
    stages, until = list(plan.relayed), list(plan.relayed_until or plan.relayed)
    given = f"preset {plan.preset!r} with sharding={plan.sharding!r}, {plan.num_stages} stages, "
    given += f"{plan.num_workers} workers, {plan.rounds} micro-batches of each per step"
    given += f", slack={plan.slack}" if plan.slack else ""
    if stages:
        given += f", and buffers of stages {stages} that travel between workers"
        given += f" behind the forwards of stages {until}" if until != stages else ""
    advice = "preset='lockstep_dp'"
    if plan.norms == "owners":
        given += (
            ", and norms='owners' (clip_norm='global': gradients clipped by their norm over all)"
        )
        without = replace(plan, norms="none", updates_meet=False)
        advice = f"clip_norm='stage', or {advice}" if _can_run(without) else advice
    raise PlanError(
        f"{given}: some worker could end its step only when another has begun its next one, "
        "which waits for this one; allowed: what can be proved to run, as where buffers change "
        f"in their own stage only; use {advice}"
    ) from error
