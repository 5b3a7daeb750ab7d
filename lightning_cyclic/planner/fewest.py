"""Fewer stages by pruning: the shallowest pipeline that fits, dense and compressed side by side.

Compressed states leave memory free, so that the same workers may form more replicas of fewer
stages. What that gains is told by three simulations of each plan:

    compute | bubble          messages cost nothing
    compute | bubble | p2p    messages have their latency; parameters and gradients no bytes
    the step                  all; the rest is collective

so that the four parts add up to the step. They are what the step waits for, not what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.presets import PLACEMENTS, PRESETS
from lightning_cyclic.planner.candidates import Problem
from lightning_cyclic.planner.ranked import RankedPlan
from lightning_cyclic.planner.search import search
from lightning_cyclic.simulate.costs import Network
from lightning_cyclic.simulate.engine import simulate


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Hold what a step waits for, in seconds.

    Args:
        compute_s: of the busiest worker.
        bubble_s: for which it waits for others, were messages free.
        point_to_point_s: for activations, their gradients, and the latencies of all messages.
        collective_s: for the bytes of gradients and parameters.
    """

    compute_s: float
    bubble_s: float
    point_to_point_s: float
    collective_s: float


def fewest_stages(problem: Problem) -> RankedPlan | None:
    """Return the fastest of the pipelines that have the fewest stages of those that fit.

    Args:
        problem: of its presets, pipelines whose width and depth are free are looked at.

    Returns:
        The plan; None if no such pipeline fits.

    Source: the choice of SAMO, section IV-B, https://arxiv.org/abs/2302.05045
    """
    presets = tuple(name for name in problem.presets if _has_free_depth(name))
    for width in range(problem.num_workers, 0, -1) if presets else ():
        if problem.num_workers % width or not problem.looks_at(width):
            continue
        try:
            return search(replace(problem, presets=presets, widths=(width,)), most=1).plans[0]
        except PlanError:  # deeper ones may fit, or be possible at all
            continue
    return None


def _has_free_depth(preset: str) -> bool:
    placement = PRESETS[preset].placement
    return not PLACEMENTS[placement].runs_whole_micro and placement != "shared"


def step_parts(plan: RankedPlan, problem: Problem) -> StepParts | None:
    """Part a step; None where it takes too long to simulate."""
    if not plan.is_simulated:
        return None
    fit = plan.fit
    costs = fit.stages.costs(
        remat=fit.candidate.remat, kept=problem.states.kept, sums=problem.states.sums
    )
    none = (0.0,) * fit.plan.num_stages
    light = replace(costs, sent_param_bytes=none, sent_sum_bytes=none, tied_bytes=none)
    free = simulate(fit.plan.programs, costs, Network(), fit.plan)
    sent = simulate(fit.plan.programs, light, problem.network, fit.plan)
    compute_s = free.step_s * (1 - min(free.bubble))
    return StepParts(
        compute_s=compute_s,
        bubble_s=free.step_s - compute_s,
        point_to_point_s=sent.step_s - free.step_s,
        collective_s=plan.step_s - sent.step_s,
    )


def compared(problem: Problem) -> str:
    """Write the dense choice beside the compressed one, and what it gains of each part."""
    both = replace(problem, sparsity=None), problem
    plans = [fewest_stages(asked) for asked in both]
    names = "dense", "sparse"
    rows = [_row(*of_each) for of_each in zip(names, plans, both, strict=True)]
    header = ("", "preset", "S", "step", "compute", "bubble", "p2p", "collective")
    lines = ["the fewest stages that fit (ms; step = compute + bubble + p2p + collective):"]
    lines += [_line(header), *map(_line, rows)]
    if all(row[-1] != "-" for row in rows):
        gains = [float(a) - float(b) for a, b in zip(rows[0][3:], rows[1][3:], strict=True)]
        lines.append(_line(("gain", "", "", *(f"{gain:.1f}" for gain in gains))))
    states = problem.states
    if states.kept > states.break_even:
        lines.append(
            f"sparsity={problem.sparsity:g} is below break-even: of {problem.precision} with "
            f"f > {states.break_even:.3f} kept, compressed states take more than dense ones"
        )
    return "\n".join(lines)


def _row(name: str, plan: RankedPlan | None, problem: Problem) -> tuple[str, ...]:
    if plan is None:
        return name, "none fits", *("-",) * 6
    parts = step_parts(plan, problem)
    candidate = plan.fit.candidate
    shown = f"{plan.step_s * 1e3:.1f}"
    if parts is None:
        return name, candidate.preset, str(candidate.num_stages), f">={shown}", *("-",) * 4
    each_s = parts.compute_s, parts.bubble_s, parts.point_to_point_s, parts.collective_s
    each = (f"{part_s * 1e3:.1f}" for part_s in each_s)
    return name, candidate.preset, str(candidate.num_stages), shown, *each


def _line(cells: tuple[str, ...]) -> str:
    name, preset, *others = cells
    return (f"{name:6} {preset:16}" + "".join(f"{cell:>11}" for cell in others)).rstrip()
