"""The search: which plan trains fastest within the memory of the workers.

    candidate ──[1] bound──> heap ──[2] fit──> heap ──[3] simulate──> heap ──> ranked
                 no plan              cut, memory          step time

The heap gives out what may be best: a candidate by the step time that no cut of it can beat, one
that fits by the time that its own stages cannot beat, one that was simulated by its step time.
What comes out simulated is better than all that is left. So few candidates are simulated, and the
ranking is the same as if all had been that can be. A bound is no time: what would take too long
to simulate is listed apart. Where that is all, that with the least bound is simulated after all.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from math import ceil
from typing import TypeAlias, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import programs_of, proof_of
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.planner.candidates import Candidate, Problem, candidates
from lightning_cyclic.planner.fit import Fit, Fitter, pace_s, paces_s
from lightning_cyclic.planner.ring import quickest
from lightning_cyclic.simulate.costs import FIRST_HALF, Network
from lightning_cyclic.simulate.engine import simulate
from lightning_cyclic.simulate.units import show_bytes

_MOST_SIMULATED = 20_000  # (micro-batch, stage, step) cells to simulate: some two seconds
_MOST_CELLS = 100_000  # (micro-batch, stage, step) cells to count memory on: some ten seconds
_Key: TypeAlias = tuple[float, float, float]


@final
@dataclass(frozen=True, kw_only=True)  # no slots: what is derived is cached in __dict__
class RankedPlan:
    """Hold a plan that fits, and what to expect of it.

    Args:
        step_s: seconds per update: of the simulator, in steady state; where that would take too
            long, what no run can be faster than.
        bubble: share of it for which the idlest worker's compute is idle.
    """

    fit: Fit
    samples: int
    step_s: float
    bubble: float
    is_simulated: bool

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s if self.step_s else float("inf")

    @cached_property
    def staleness(self) -> tuple[float, int]:
        """Return by how many updates forwards are behind, on average and at most."""
        return staleness(self.fit)

    @cached_property
    def horizon(self) -> int:
        plan = self.fit.plan
        cells = ((i, j) for i in range(plan.num_microbatches) for j in range(plan.num_stages))
        return max(plan.horizon(plan.late_step, i, j) for i, j in cells)


def timed(fit: Fit, problem: Problem, *, at_any_cost: bool = False) -> RankedPlan:
    """Simulate a plan, or compute its closed form where that would take too long.

    Args:
        at_any_cost: simulate it, however long that takes. [False]
    """
    costs = problem.costs(fit.stages)
    if fit.candidate.offload and problem.disk_bytes_per_s is not None:
        costs = costs.put_away(problem.disk_bytes_per_s)
    plan, runs_whole = fit.plan, fit.candidate.runs_whole_micro
    num_cells = plan.num_microbatches * plan.num_stages * plan.num_steps
    if at_any_cost or num_cells <= _MOST_SIMULATED:
        network = problem.ring_network if runs_whole else problem.network
        result = simulate(programs_of(plan), costs, network, plan)
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
    costs = fit.stages.costs()
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
    return max(of_each * max(paces), *_with_ways_s(fit, network))


def _with_ways_s(fit: Fit, network: Network) -> Iterator[float]:
    """Yield, of each worker, the time of its work, and of the way to it and back; and of all ways.

    The way is that to its first stage. Gradients of weights that are put off may be made behind
    the last gradient that it sends back, while the next step begins elsewhere.
    """
    candidate, costs = fit.candidate, fit.stages.costs()
    of_each = candidate.num_microbatches // candidate.replicas
    share = FIRST_HALF if candidate.schedule.splits else 1.0  # of a backward that others wait for
    homes = [fit.plan.worker_of(0, j) for j in range(fit.plan.num_stages)]
    sent_s = [
        (network.latency_s + network.transfer_s(size)) * (a != b)
        for (a, b), size in zip(pairwise(homes), fit.stages.input_bytes[1:], strict=True)
    ]
    stages = list(zip(costs.forward_s, costs.backward_s, [*sent_s, 0.0], strict=True))
    work_s, sooner_s = defaultdict[int, float](float), defaultdict[int, float](float)
    for w, (f, b, _) in zip(homes, stages, strict=True):
        work_s[w] += of_each * (f + b)
        sooner_s[w] += of_each * (f + b * share)
    there_s = back_s = 0.0
    for j, (f, b, sent) in enumerate(stages):
        if homes.index(homes[j]) == j:
            yield max(work_s[homes[j]], there_s + sooner_s[homes[j]] + back_s)
        there_s += f + sent
        back_s += b * share + sent
    yield there_s + back_s


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Hold the best plans, the best first.

    Args:
        plans: fastest first; of those whose times print alike the least stale, then the one with
            least memory.
        bounds: what may be as fast, and would take too long to simulate; the least bound first.
        num_left_out: how many more have too many micro-batches and stages to look at.
    """

    problem: Problem
    plans: tuple[RankedPlan, ...]
    bounds: tuple[RankedPlan, ...]
    num_candidates: int
    num_left_out: int


def search(problem: Problem, *, most: int = 10) -> Ranking:
    """Rank the plans that fit.

    Args:
        problem: the model, the workers, and what to look at.

    Returns:
        The best plans, at least one, each simulated; the same as if every candidate had been that
        can be in some seconds.

    Raises:
        PlanError: none fits: names the one that needs least memory, or why none can be made.

    Source: the search of PipeDream-2BW's planner over replicas, depth, rematerialisation and size
        of the micro-batch, section 4, https://arxiv.org/abs/2006.09503; step times are simulated.
    """
    every = list(candidates(problem))
    chosen = [c for c in every if _cells(c) <= _MOST_CELLS]
    run = _Search(problem, chosen)
    plans = tuple(islice(_distinct(run.best_first()), most))
    if not plans:
        raise run.nothing_fits()
    return Ranking(
        problem=problem,
        plans=plans,
        bounds=tuple(islice(_distinct(run.bounds()), most)),
        num_candidates=len(chosen),
        num_left_out=len(every) - len(chosen),
    )


def _distinct(plans: Iterator[RankedPlan]) -> Iterator[RankedPlan]:
    """Leave out what a better plan is already but for its name or how fine its stages are."""
    shown: dict[Candidate, list[RankedPlan]] = {}
    for plan in plans:
        candidate = plan.fit.candidate
        others = shown.setdefault(replace(candidate, preset="", num_stages=0, ring=None), [])
        if not any(_is_alike(plan, other) for other in others):
            others.append(plan)
            yield plan


def _is_alike(plan: RankedPlan, other: RankedPlan) -> bool:
    if plan.fit.candidate.preset == other.fit.candidate.preset:
        return True
    return _have_same_programs(plan.fit.plan, other.fit.plan)


def _have_same_programs(one: Plan, other: Plan) -> bool:
    """Compare what workers run, where possible without the messages, which take long to make."""
    if any(a != b for a, b in zip(one.timetable, other.timetable, strict=False)):
        return False
    # beyond what is read when, rules differ in when an update is made alone
    at_end = {plan.axes.weights.at_end_of_step for plan in (one, other)}
    unnamed = [replace(plan, preset="", weights="") for plan in (one, other)]
    if len(at_end) == 1 and unnamed[0] == unnamed[1]:
        return True
    return programs_of(one) == programs_of(other)


def _cells(candidate: Candidate) -> int:
    # as many steps as it takes to be steady: four, and two rounds through a replica's stages
    of_each = candidate.num_microbatches * candidate.num_stages
    return 4 * of_each + 2 * candidate.num_stages**2 * candidate.replicas


@final
class _Search:
    def __init__(self, problem: Problem, chosen: list[Candidate]) -> None:
        self._problem = problem
        self._chosen = chosen
        self._fitter = Fitter(problem)
        self._paces: dict[tuple[int, int, bool], float] = {}
        self._refusals: list[tuple[int, PlanError]] = []  # with the candidate's replicas
        self._too_large: list[Candidate] = []
        self._bounds: list[tuple[_Key, int, RankedPlan]] = []
        self._heap: list[tuple[_Key, int, Candidate | Fit | RankedPlan]] = []
        self._pushed = 0

    def best_first(self) -> Iterator[RankedPlan]:
        """Yield plans that were simulated, each better than all that follow; one at least."""
        has_any = False
        for candidate in self._chosen:
            self._push((_shown(self._bound_s(candidate)), 0.0, 0.0), candidate)
        while self._heap:
            (time_s, _, _), _, item = heapq.heappop(self._heap)
            if isinstance(item, RankedPlan):
                if self._can_run(item):
                    has_any = True
                    yield item
            elif isinstance(item, Fit):
                self._time(item, time_s)
            else:
                self._fit(item, time_s)
        if not has_any and (first := next(self.bounds(), None)):
            self._bounds = [bound for bound in self._bounds if bound[-1] is not first]
            yield timed(first.fit, self._problem, at_any_cost=True)

    def bounds(self) -> Iterator[RankedPlan]:
        """Yield what was not simulated, the least bound first."""
        return (plan for _, _, plan in sorted(self._bounds) if self._can_run(plan))

    def _time(self, fit: Fit, time_s: float) -> None:
        plan = timed(fit, self._problem)
        key = max(_shown(plan.step_s), time_s), plan.staleness[0], fit.memory_bytes
        if plan.is_simulated:
            self._push(key, plan)
        else:
            self._bounds.append((key, len(self._bounds), plan))

    def _can_run(self, plan: RankedPlan) -> bool:
        """Prove a plan; only those that are shown, as that takes as long as to simulate it."""
        try:
            proof_of(plan.fit.plan)
        except PlanError as error:
            self._refusals.append((plan.fit.candidate.replicas, error))
            return False
        return True

    def nothing_fits(self) -> PlanError:
        """Say why there is no plan, and which is nearest."""
        problem = self._problem
        if not self._too_large:
            return self._refusal() or self._no_candidate()
        near = min(self._least(), key=lambda fit: fit.memory_bytes, default=None)
        if near is None:
            return self._refusal() or self._no_candidate()
        c, least = near.candidate, ceil(near.memory_bytes + problem.besides_bytes)
        return PlanError(
            f"no plan fits into memory_bytes={problem.memory_bytes:.0f} "
            f"({show_bytes(problem.memory_bytes)}) per worker; allowed: "
            f"{least} ({show_bytes(least)}) or more, which {c.preset} "
            f"needs with replicas={c.replicas}, {c.num_stages} stages, {c.num_microbatches} "
            "micro-batches of "
            f'{c.micro_size} and activation_checkpointing="{c.checkpointing}"; '
            "give workers more "
            "memory, use more workers, smaller batches, or an optimizer with less state"
        )

    def _refusal(self) -> PlanError | None:
        """Return why the first candidate cannot be: a plain pipeline, if there was one."""
        return min(self._refusals, key=lambda found: found[0], default=(0, None))[1]

    def _no_candidate(self) -> PlanError:
        problem = self._problem
        return PlanError(
            f"batch_size={problem.samples} cannot be cut into micro-batches of "
            f"{', '.join(map(str, sorted(problem.by_size)))} for {problem.num_workers} workers "
            f"and {problem.num_units} units with {', '.join(problem.presets)}; allowed: multiples "
            f"of one of these sizes; use batch_size={max(problem.by_size) * problem.num_workers}"
        )

    def _least(self) -> Iterator[Fit]:
        for candidate in self._too_large:
            try:
                yield self._fitter.least(candidate)
            except PlanError:  # this cut parts units that share parameters
                continue

    def _push(self, key: _Key, item: Candidate | Fit | RankedPlan) -> None:
        heapq.heappush(self._heap, (key, self._pushed, item))
        self._pushed += 1

    def _bound_s(self, candidate: Candidate) -> float:
        """Return a step time that no cut of a candidate can beat."""
        profile = self._problem.profile(candidate.micro_size)
        through_s = sum(u.forward_s * (1 + candidate.remat) + u.backward_s for u in profile.units)
        if candidate.ring is not None and candidate.ring.group_size > 1:
            return through_s  # groups have ports of two kinds
        if candidate.runs_whole_micro:
            return max(through_s, self._exchange_s())
        key = candidate.micro_size, candidate.num_stages, candidate.remat
        of_each, depth = candidate.of_each, self._problem.num_workers // candidate.replicas
        if candidate.num_stages > depth > 0 and candidate.has_flush:  # several on each worker
            bound_s = of_each * through_s / depth
        else:
            if key not in self._paces:
                self._paces[key] = pace_s(profile, candidate, self._problem.network)
            bound_s = of_each * self._paces[key]
        if candidate.schedule.splits:  # but the first half of its backward
            through_s = sum(
                u.forward_s + (u.forward_s * candidate.remat + u.backward_s) * FIRST_HALF
                for u in profile.units
            )
        return max(bound_s, through_s) if candidate.has_flush else bound_s

    def _exchange_s(self) -> float:
        """Return for how long some port is busy where all workers hold all stages.

        Each parameter's gradient travels N-1 times until it is whole, and its new value as often;
        of what codecs make of them nothing is claimed.
        """
        problem = self._problem
        whole = 2 if problem.coding is None else 2 - len(list(problem.coding.parts()))
        share = whole * (problem.num_workers - 1) / problem.num_workers
        size = problem.param_bytes * problem.states.kept
        return quickest(problem.ring_network).transfer_s(share * size)

    def _fit(self, candidate: Candidate, time_s: float) -> None:
        try:
            found = self._fitter.fit(candidate)
        except PlanError as error:
            self._refusals.append((candidate.replicas, error))
            return
        if found is None:
            self._too_large.append(candidate)
            return
        if found.candidate != candidate and "never" in self._problem.checkpointing:
            return  # there is room for all, and that is a candidate of its own
        least_s = _shown(least_step_s(found, self._problem))
        self._push((max(least_s, time_s), staleness(found)[0], found.memory_bytes), found)


def _shown(seconds: float) -> float:
    """Round to the digits that are shown, so that equal times are equal."""
    return float(f"{seconds:.3g}")
