"""fit: refuse axes and numbers that do not fit together, before any program is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NoReturn

from lightning_cyclic.errors import PlanError, one_of
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.presets import PLACEMENTS, WEIGHTS, schedules_of


def check_fit(plan: Plan) -> None:
    """Refuse axes and numbers that do not fit together, before any program is made."""
    schedule, placement, weights, _ = plan.axes
    _check_width(plan)
    _check_ties(plan)
    _check_local(plan)
    if plan.late_updates and (plan.weights != "delayed" or not plan.flows):
        raise PlanError(
            f"late_updates=True with weights {plan.weights!r} and placement {plan.placement!r}, "
            "where the newest version is read at once; allowed: weights 'delayed' with placement "
            "'pipelined' or 'shared'; use late_updates=False"
        )
    _check_norms(plan)
    _check_groups(plan)
    _check_offloads(plan)
    if plan.to_owners and not (placement.runs_whole_micro or plan.placement == "single"):
        raise PlanError(
            f"to_owners=True with placement {plan.placement!r}, whose workers add up the "
            "gradients of their own stages; allowed: placements 'replicated' and 'single'; use "
            "to_owners=False, or preset='cyclic_dp'"
        )
    if problem := placement.misfit() or schedule.misfit():
        raise PlanError(problem)
    fitting = schedules_of(plan.placement)
    if plan.schedule not in fitting:
        _refuse(plan, "schedule", fitting)
    if not weights.at_end_of_step and (placement.shape != "block" or schedule.splits):
        apart = placement.shape != "block"
        why = "has stages apart on a worker" if apart else "puts off gradients"
        raise PlanError(
            f"weights {plan.weights!r} do not fit schedule {plan.schedule!r}, which {why} and "
            'waits for all workers between steps; allowed with it: sync; use weights="sync"'
        )
    if placement.runs_whole_micro and not weights.for_replicas:
        _refuse(plan, "weights", [name for name, rule in WEIGHTS.items() if rule.for_replicas])
    if not placement.runs_whole_micro and plan.sharding != "none":
        _refuse(plan, "sharding", ["none"])
    if weights.needs_previous and schedule.updates_before(2, schedule.start(Kind.F, 0, 0), 0) < 1:
        raise PlanError(
            f"num_microbatches={plan.num_microbatches // plan.replicas} with "
            f"num_stages={plan.num_stages} and "
            f"weights {plan.weights!r}; allowed: num_microbatches >= num_stages - 1 in each "
            "replica, or "
            "stage 0 would need an update that does not exist yet; "
            f"use num_microbatches={plan.num_stages - 1} or more"
        )
    if not set(plan.relayed) <= set(range(plan.num_stages)):
        raise PlanError(
            f"relayed={plan.relayed}; allowed: stages 0 to {plan.num_stages - 1}; "
            "use relayed=() or some of these"
        )
    _check_relays(plan)


def relays(
    relayed: Iterable[int], until: Iterable[int], num_stages: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sort stages whose buffers travel, each with the last stage in which they change.

    Args:
        until: those last stages, in the same order; empty where each is the stage itself.

    Returns:
        Both, in the order of stages; the second is empty where each is the stage itself.

    Raises:
        PlanError: they are no stages, not as many, or buffers change before they are used.
    """
    stages = stage_list("relayed", relayed)
    ends = stage_list("relayed_until", until) or stages
    pairs = sorted(set(zip(stages, ends, strict=False)))
    is_right = len(stages) == len(ends) and len(pairs) == len(set(stages))
    if not is_right or not all(j <= end < num_stages or j == end for j, end in pairs):
        raise PlanError(
            f"relayed_until={ends} with relayed={stages}; allowed: for each of these stages one, "
            f"in the same order, between itself and stage {num_stages - 1}; use "
            "relayed_until=() where buffers change in their own stage only"
        )
    in_order = tuple(j for j, _ in pairs)
    last = tuple(end for _, end in pairs)
    return in_order, () if last == in_order else last


def groups_of_stages(tied: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Sort groups of stages."""
    if isinstance(tied, Iterable) and all(isinstance(group, Iterable) for group in tied):
        return tuple(sorted({stage_list("tied", group) for group in tied}))
    raise PlanError(
        f"tied={tied!r}; allowed: groups of two or more stages, ascending, such as ((0, 1),); "
        "use tied=() or such groups"
    )


def stage_list(name: str, given: Iterable[int]) -> tuple[int, ...]:
    """Return numbers of stages."""
    found = tuple(given) if isinstance(given, Iterable) else (None,)
    if all(isinstance(j, int) and not isinstance(j, bool) for j in found):
        return tuple(j for j in found if j is not None)
    raise PlanError(
        f"{name}={given!r}; allowed: whole numbers of stages, such as [0, 1]; use {name}=() or "
        "such a list"
    )


def _check_relays(plan: Plan) -> None:
    """Refuse buffers that change on a worker that has not the stage they are of."""
    for j, end in zip(plan.relayed, plan.relayed_until, strict=False):
        cells = product(range(2), range(plan.num_microbatches))
        if any(plan.worker_of(i, j, t) != plan.worker_of(i, end, t) for t, i in cells):
            raise PlanError(
                f"relayed_until={end} of stage {j}, which other workers run under placement "
                f"{plan.placement!r}; allowed: buffers that change on the worker of their own "
                "stage; use relayed_until=(), or fewer stages or workers"
            )


def _check_groups(plan: Plan) -> None:
    """Refuse groups where workers do not run whole micro-batches that are staggered, or might be.

    One worker alone may follow the timetable of a plan with groups, as its reference.
    """
    if plan.group_size == 1:
        return
    is_reference = plan.placement == "single"
    if not is_reference and not plan.axes.placement.runs_whole_micro:
        raise PlanError(
            f"group_size={plan.group_size} with placement {plan.placement!r} (preset "
            f"{plan.preset!r}), whose workers "
            "run single stages; allowed: presets whose workers run whole micro-batches, such as "
            "'cyclic_dp'; use group_size=1, or one of these"
        )
    if plan.rounds > 1 and plan.relayed:
        raise PlanError(
            f"group_size={plan.group_size} with {plan.rounds} micro-batches of each worker per "
            "step "
            f"and module buffers that change in training (of stages {list(plan.relayed)}), which "
            "go from all micro-batches of a worker to those of the next, so that the workers of "
            "a group would wait for each other; allowed with them: one micro-batch of each "
            "worker per step; use accumulate_grad_batches=1, or group_size=1"
        )


def _check_offloads(plan: Plan) -> None:
    """Refuse graphs that leave memory where the user's step runs at once."""
    if plan.offloads and plan.axes.placement.runs_whole_micro:
        raise PlanError(
            f"offloads=True with placement {plan.placement!r}, whose workers run whole "
            "micro-batches, one backward right behind its forward; allowed: workers that run "
            "single stages; use offloads=False, or preset='1f1b'"
        )


def _check_norms(plan: Plan) -> None:
    """Refuse decisions over all stages where one would wait for what comes later."""
    allowed = ("none", "owners", "all")
    if plan.norms not in allowed:
        raise PlanError(one_of(plan.norms, allowed, "norms", 'use norms="none"'))
    knows_all = not plan.flows or plan.late_updates
    fits = knows_all or plan.norms == "all"
    if plan.norms != "none" and plan.weights == "freshest" and plan.slack > 0:
        raise PlanError(
            f"norms={plan.norms!r} with slack={plan.slack} would mix gradients of two steps in "
            "one decision; allowed: norms='none', or slack=0; use slack=0"
        )
    if plan.norms == "none" or fits:
        return
    raise PlanError(
        f"norms={plan.norms!r} with weights {plan.weights!r} and placement {plan.placement!r}, "
        "where each stage is updated before all have their gradients; allowed: norms='none', or "
        "weights 'delayed' with placement 'pipelined' or 'shared' and late_updates=True; use "
        "norms='none'"
    )


def _check_local(plan: Plan) -> None:
    """Refuse what does not fit workers that each have weights of their own."""
    if not plan.axes.weights.is_local:
        return
    rows = {
        "placement": (plan.placement, ("replicated",), "num_workers processes, each with weights "
                      "of its own, where one would keep all of these"),
        "schedule": (plan.schedule, ("lockstep",), "workers that begin and exchange together"),
        "sharding": (plan.sharding, ("none", "optimizer"), "workers that have all weights"),
        "num_microbatches": (plan.num_microbatches, (plan.num_workers,), "one micro-batch of "
                             "each worker per step, for its own update"),
        "group_size": (plan.group_size, (1,), "workers that are not staggered"),
        "norms": (plan.norms, ("none",), "gradients of which each worker uses its own alone"),
    }  # fmt: skip
    for name, (given, allowed, what) in rows.items():
        if given not in allowed:
            raise PlanError(
                f"{name}={given!r} does not fit weights {plan.weights!r} (preset "
                f"{plan.preset!r}); allowed: {', '.join(map(repr, allowed))}: {what}; use "
                f"{name}={allowed[0]!r}"
            )


def _check_width(plan: Plan) -> None:
    """Refuse several replicas where the placement and schedule do not have them."""
    is_wide = plan.axes.placement.may_be_wide and plan.schedule in schedules_of(plan.placement)
    if plan.replicas == 1 or is_wide:
        return
    places = [name for name, placement in PLACEMENTS.items() if placement.may_be_wide]
    schedules = sorted({name for p in places for name in schedules_of(p)})
    raise PlanError(
        f"replicas={plan.replicas} does not fit placement {plan.placement!r} with schedule "
        f"{plan.schedule!r}; allowed with them: 1; use replicas=1, or placement "
        f"{' or '.join(map(repr, places))} with schedule {' or '.join(map(repr, schedules))}"
    )


def _check_ties(plan: Plan) -> None:
    """Refuse groups that are none, and weight rules under which stages read different versions."""
    for group in plan.tied:
        is_ascending = list(group) == sorted(set(group))
        if len(group) < 2 or not is_ascending or not set(group) <= set(range(plan.num_stages)):
            raise PlanError(
                f"tied={plan.tied}; allowed: groups of two or more of the stages 0 to "
                f"{plan.num_stages - 1}, ascending, such as ((0, 1),) where there are two; "
                "use tied=() or such groups"
            )
    if plan.tied and plan.axes.weights.looks_ahead:
        raise PlanError(
            f"weights {plan.weights!r} do not fit tied={plan.tied}, as each stage would predict "
            "them otherwise; allowed: sync, delayed, freshest, stashed; use one of these, or "
            "stages that keep shared parameters in one stage, and tied=()"
        )
    if plan.tied and plan.axes.placement.takes_turns:
        raise PlanError(
            f"placement {plan.placement!r} does not fit tied={plan.tied}; allowed: parameters "
            "that belong to one stage; use another placement, or other stages, and tied=()"
        )


def _refuse(plan: Plan, axis: str, allowed: Sequence[str]) -> NoReturn:
    raise PlanError(
        f"{axis} {getattr(plan, axis)!r} does not fit placement {plan.placement!r}; "
        f'allowed with it: {", ".join(allowed)}; use {axis}="{allowed[0]}"'
    )
