"""Fit a candidate into the memory of the workers: where its stages begin, and what each keeps.

Stages of a pipeline keep different numbers of versions and micro-batches, so that the same units
may fit into the last stage and not into the first. The numbers are counted on the timetable with
one byte of everything; then the cut is the fastest of those that fit, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias, final

from lightning_cyclic.plan import Plan
from lightning_cyclic.planner.candidates import Candidate, Problem
from lightning_cyclic.planner.partition import cut_row, row_of
from lightning_cyclic.planner.profile import ModelProfile
from lightning_cyclic.planner.reruns import least_limit, reruns, units_of
from lightning_cyclic.planner.stages import Stages, even_starts
from lightning_cyclic.simulate.costs import Network
from lightning_cyclic.simulate.memory import Memory, copies, memory, steps_to_count

Kept: TypeAlias = Callable[[int, int, int], float]
"""Bytes that a worker keeps whose stage, by number, goes from one unit to before another."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Hold a candidate that fits.

    Args:
        plan: its plan, of enough steps to reach the steady state.
        stages: where its stages begin, and what each takes.
        limit_bytes: by which a run chooses what its stages run again. [None: it does not]
    """

    candidate: Candidate
    plan: Plan
    stages: Stages
    memory: tuple[Memory, ...]
    limit_bytes: int | None = None

    @property
    def memory_bytes(self) -> float:
        """Return the bytes of the worker that keeps most."""
        return max(memory.total for memory in self.memory)


@final
class Fitter:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._counted: dict[tuple[object, ...], list[Memory]] = {}

    def fit(self, candidate: Candidate) -> Fit | None:
        """Cut the model for a candidate; None where no cut fits into memory.

        Raises:
            PlanError: its axes, numbers and shared parameters do not fit together.
        """
        profile = self._problem.profile(candidate.micro_size)
        limit = self._problem.room_bytes
        plan = self._plan(candidate)
        if candidate.fills_limit:
            return self._rerun(candidate, profile, limit)
        if not _has_one_stage_per_worker(plan):
            if candidate.runs_whole_micro and _least(profile, plan) > limit:
                return None
            found = self._filled(candidate, self._even(profile, candidate))
        else:
            kept = self._kept(candidate, profile)
            starts = _fastest(
                profile, candidate, self._problem.network, lambda p, a, b: kept(p, a, b) <= limit
            )
            if starts is None:
                return None
            found = self._filled(candidate, Stages.of(profile, starts))
        return found if found.memory_bytes <= limit else None

    def least(self, candidate: Candidate) -> Fit:
        """Cut the model so that the worker with most bytes keeps as few as can be."""
        profile = self._problem.profile(candidate.micro_size)
        plan = self._plan(candidate)
        if candidate.fills_limit:
            found = self._rerun(candidate, profile, None)
            assert found is not None  # the least limit is one that can be kept
            return found
        if not _has_one_stage_per_worker(plan):
            return self._filled(candidate, self._even(profile, candidate))
        kept = self._kept(candidate, profile)

        def pieces(p: int, b: int) -> Iterator[tuple[int, float, float]]:
            for a in range(b - 1, -1, -1):
                yield a, 0.0, kept(p, a, b)

        starts = cut_row(len(profile.units), candidate.num_stages, pieces)
        assert starts is not None  # every cut is allowed
        return self._filled(candidate, Stages.of(profile, starts))

    def _plan(self, candidate: Candidate, tied: tuple[tuple[int, ...], ...] = ()) -> Plan:
        key = *_numbers(candidate), tied
        if key not in self._plans:
            num_steps = steps_to_count(candidate.num_stages, candidate.of_each)
            self._plans[key] = candidate.plan(self._problem, num_steps=num_steps, tied=tied)
        return self._plans[key]

    def _even(self, profile: ModelProfile, candidate: Candidate) -> Stages:
        """Cut for speed alone, where every worker keeps much the same."""
        return Stages.even(profile, candidate.num_stages, together=candidate.runs_whole_micro)

    def _filled(self, candidate: Candidate, stages: Stages) -> Fit:
        plan, states = self._plan(candidate, stages.tied), self._problem.states
        found = memory(
            plan, stages.costs(), remat=candidate.remat, state_per_param=states.optimizer,
            gradient_per_param=states.gradient, index_per_param=states.index,
        )  # fmt: skip
        again_s = stages.forward_s if candidate.remat else ()
        return Fit(
            candidate=candidate, plan=plan, stages=stages.running_again(again_s), memory=found
        )

    def _rerun(
        self, candidate: Candidate, profile: ModelProfile, limit: float | None
    ) -> Fit | None:
        """Cut for speed alone, and let stages run again what a limit has no room for.

        Args:
            limit: of each worker. [None: the least that can be kept]
        """
        if _has_one_stage_per_worker(self._plan(candidate)):
            starts = _fastest(profile, candidate, self._problem.network, None)
            assert starts is not None  # candidates have no more stages than units
        else:
            starts = even_starts(profile, candidate.num_stages)
        stages = Stages.of(profile, starts)
        plan, costs, rows = self._plan(candidate, stages.tied), stages.costs(), profile.units
        units = [
            units_of(rows[a:b], rows[b] if b < len(rows) else None)
            for a, b in pairwise([*starts, len(rows)])
        ]
        state = self._problem.states.optimizer
        if limit is None:
            limit = least_limit(plan, units, costs, state_per_param=state)
        found = reruns(plan, units, costs, limit, state_per_param=state)
        if found is None:
            return None
        if not any(found.again_s):  # as there is room for all
            return self._filled(replace(candidate, checkpointing="never"), stages)
        return Fit(
            candidate=candidate, plan=plan, stages=stages.running_again(found.again_s),
            memory=found.memory, limit_bytes=found.limit_bytes,
        )  # fmt: skip

    def _copies(self, candidate: Candidate) -> list[Memory]:
        key, states = (*_numbers(candidate), candidate.remat), self._problem.states
        if key not in self._counted:
            self._counted[key] = copies(
                self._plan(candidate), remat=candidate.remat, state_per_param=states.optimizer,
                gradient_per_param=states.gradient, index_per_param=states.index,
            )  # fmt: skip
        return self._counted[key]

    def _kept(self, candidate: Candidate, profile: ModelProfile) -> Kept:
        """Say what a worker keeps of some units in a row, by its stage: of the replicas', most."""
        counts, units = self._copies(candidate), profile.units
        params = [0.0, *accumulate(unit.param_bytes for unit in units)]
        activations = [0.0, *accumulate(unit.activation_bytes for unit in units)]
        crossing = [*(unit.crossing_bytes for unit in units), 0.0]

        def kept(j: int, a: int, b: int) -> float:
            count = counts[j]
            shared = sum(
                tie.bytes * max(sum(a <= u < b for u in tie.units) - 1, 0) for tie in profile.ties
            )
            return (
                count.of_parameters * (params[b] - params[a] - shared)
                + count.activations * (activations[b] - activations[a])
                + count.inputs * crossing[a]
                + count.returns * crossing[b]
            )

        return kept


def _numbers(candidate: Candidate) -> tuple[object, ...]:
    """Return what a plan depends on: not how large micro-batches are, nor what they keep."""
    c = candidate
    return c.preset, c.replicas, c.num_stages, c.num_microbatches, c.offload, c.ring


def _has_one_stage_per_worker(plan: Plan) -> bool:
    if plan.axes.placement.runs_whole_micro or plan.axes.placement.takes_turns:
        return False
    homes = [w for j in range(plan.num_stages) for w in plan.axes.placement.workers_of(j)]
    return len(homes) == len(set(homes))


def _least(profile: ModelProfile, plan: Plan) -> float:
    """Return what a worker that runs whole micro-batches keeps at least, whatever the stages.

    Before its first backward that is all activations, and from the beginning all parameters,
    unless they are fetched for each use.
    """
    units, shared = profile.units, sum(tie.bytes * (len(tie.units) - 1) for tie in profile.ties)
    params = 0.0 if plan.axes.sharding.gathers else sum(u.param_bytes for u in units) - shared
    return params + sum(u.activation_bytes for u in units)


def pace_s(profile: ModelProfile, candidate: Candidate, network: Network) -> float:
    """Return the seconds per micro-batch of a pipeline's slowest stage, cut for speed alone."""
    starts = _fastest(profile, candidate, network, None)
    assert starts is not None  # candidates have no more stages than units
    stages = Stages.of(profile, starts)
    if candidate.remat:
        stages = stages.running_again(stages.forward_s)
    return max(paces_s(stages, candidate, network))


def paces_s(stages: Stages, candidate: Candidate, network: Network) -> list[float]:
    """Return the seconds per micro-batch of each stage: of its compute, or of its messages."""
    costs = stages.costs()
    compute_s = map(sum, zip(costs.forward_s, costs.backward_s, strict=True))
    sent = [network.transfer_s(size) for size in (0.0, *stages.input_bytes[1:], 0.0)]
    if candidate.schedule.shape == "vee":  # where micro-batches turn
        sent[candidate.num_stages // 2] = 0.0
    return [max(s, sent[j] + sent[j + 1]) for j, s in enumerate(compute_s)]


def _fastest(
    profile: ModelProfile,
    candidate: Candidate,
    network: Network,
    fits: Callable[[int, int, int], bool] | None,
) -> Sequence[int] | None:
    work = [unit.forward_s * (1 + candidate.remat) + unit.backward_s for unit in profile.units]
    sent = [network.transfer_s(unit.crossing_bytes) for unit in profile.units[1:]]
    return cut_row(len(work), candidate.num_stages, row_of(work, [0.0, *sent, 0.0]), fits=fits)
