"""A plan with its figures: step time, bubble and staleness.

The step time is the simulator's. Where that would take too long it is a closed form: the time
that no run of these stages can beat, which the search also uses to rule plans out unsimulated.
The two are never ranked against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import final

from lightning_cyclic.planner.candidates import Problem
from lightning_cyclic.planner.fit import Fit, paces_s
from lightning_cyclic.simulate.engine import simulate

_MOST_CELLS = 20_000  # (micro-batch, stage, step) cells to simulate: some two seconds


@final
@dataclass(frozen=True, kw_only=True)  # no slots: what is derived is cached in __dict__
class RankedPlan:
    """Hold a plan that fits, and what to expect of it.

    Args:
        fit: the candidate, its plan, stages and memory.
        samples: trained per update.
        step_s: seconds per update: of the simulator, in steady state; where that would take too
            long, what no run can be faster than.
        bubble: share of it for which the idlest worker's compute is idle.
        is_simulated: whether the simulator was asked.
    """

    fit: Fit
    samples: int
    step_s: float
    bubble: float
    is_simulated: bool

    @property
    def samples_per_s(self) -> float:
        """Return the samples trained per second."""
        return self.samples / self.step_s if self.step_s else float("inf")

    @cached_property
    def staleness(self) -> tuple[float, int]:
        """Return by how many updates forwards are behind, on average and at most."""
        return staleness(self.fit)

    @cached_property
    def horizon(self) -> int:
        """Return the most updates that a forward predicts."""
        plan = self.fit.plan
        cells = ((i, j) for i in range(plan.num_microbatches) for j in range(plan.num_stages))
        return max(plan.horizon(plan.late_step, i, j) for i, j in cells)


def timed(fit: Fit, problem: Problem, *, at_any_cost: bool = False) -> RankedPlan:
    """Simulate a plan, or compute its closed form where that would take too long.

    Args:
        fit: the candidate with its stages.
        problem: what was asked.
        at_any_cost: simulate it, however long that takes. [False]
    """
    costs = fit.stages.costs(
        remat=fit.candidate.remat, kept=problem.states.kept, sums=problem.states.sums
    )
    plan, runs_whole = fit.plan, fit.candidate.runs_whole_micro
    num_cells = plan.num_microbatches * plan.num_stages * plan.num_steps
    if at_any_cost or num_cells <= _MOST_CELLS:
        network = problem.ring_network if runs_whole else problem.network
        result = simulate(plan.programs, costs, network, plan)
        step_s, bubble, is_simulated = result.step_s, max(result.bubble), True
    else:
        step_s, bubble, is_simulated = _closed_form(fit, problem)
    return RankedPlan(
        fit=fit,
        samples=problem.samples,
        step_s=step_s,
        bubble=bubble,
        is_simulated=is_simulated,
    )


def staleness(fit: Fit) -> tuple[float, int]:
    """Count by how many updates forwards are behind, once the run is under way.

    Step t of the sequential rule reads version t. Rules that predict move what they read on to
    that version; how well depends on the optimizer and the model, and is not counted here.

    Returns:
        The mean over micro-batches and stages, and the most.
    """
    plan, t = fit.plan, fit.plan.late_step
    late = [
        t - plan.reads(t, i, j)
        for i in range(plan.num_microbatches)
        for j in range(plan.num_stages)
    ]
    return sum(late) / len(late), max(late)


def _closed_form(fit: Fit, problem: Problem) -> tuple[float, float, bool]:
    step_s, compute_s = least_step_s(fit, problem), _compute_s(fit)
    of_each = fit.candidate.num_microbatches // fit.candidate.replicas
    busy_s = sum(compute_s) if fit.candidate.runs_whole_micro else of_each * min(compute_s)
    return step_s, 1 - busy_s / step_s if step_s else 0.0, False


def _compute_s(fit: Fit) -> list[float]:
    """Return the seconds of each stage's compute per micro-batch."""
    costs = fit.stages.costs(remat=fit.candidate.remat)
    return [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]


def least_step_s(fit: Fit, problem: Problem) -> float:
    """Return a step time that a plan with these stages cannot beat.

    A stage runs all micro-batches of its replica. With a flush, the first of them has to come to
    it from the input, and the gradient of the last to go back there.
    """
    candidate, network = fit.candidate, problem.network
    compute_s = _compute_s(fit)
    if candidate.runs_whole_micro:
        return float(sum(compute_s))
    of_each = candidate.num_microbatches // candidate.replicas
    paces = paces_s(fit.stages, candidate, network)
    if not candidate.has_flush:
        return of_each * max(paces)
    sent_s = [2 * (network.latency_s + network.transfer_s(n)) for n in fit.stages.input_bytes[1:]]
    ways_s = accumulate(
        (s + sent for s, sent in zip(compute_s, sent_s, strict=False)), initial=0.0
    )
    return max(
        of_each * max(paces),
        *(of_each * s + way_s for s, way_s in zip(compute_s, ways_s, strict=True)),
    )
