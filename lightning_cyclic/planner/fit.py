"""Fit a candidate into the memory of the workers: where its stages begin, and what each keeps.

Stages of a pipeline keep different numbers of versions and micro-batches, so that the same units
may fit into the last stage and not into the first. The numbers are counted on the program with
one byte of everything; then the cut is the fastest of those that fit, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias, final

from lightning_cyclic.plan import Plan
from lightning_cyclic.planner.candidates import Candidate, Problem
from lightning_cyclic.planner.copies import Copies, Counter, Row, steps_to_count
from lightning_cyclic.planner.partition import cut_row, row_of
from lightning_cyclic.planner.profile import ModelProfile
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.simulate.costs import Network
from lightning_cyclic.simulate.memory import KINDS, Memory, memory

Kept: TypeAlias = Callable[[int, int, int], float]
"""Bytes that a worker keeps whose stage, by number, goes from one unit to before another."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Hold a candidate that fits.

    Args:
        plan: its plan, of enough steps to reach the steady state.
        stages: where its stages begin, and what each takes.
    """

    candidate: Candidate
    plan: Plan
    stages: Stages
    memory: tuple[Memory, ...]

    @property
    def memory_bytes(self) -> float:
        """Return the bytes of the worker that keeps most."""
        return max(memory.total for memory in self.memory)


@final
class Fitter:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._plans: dict[tuple[object, ...], Plan] = {}
        states = problem.states
        self._counter = Counter(
            problem.slack,
            states.optimizer,
            gradient_per_param=states.gradient,
            index_per_param=states.index,
        )

    def fit(self, candidate: Candidate) -> Fit | None:
        """Cut the model for a candidate; None where no cut fits into memory.

        Raises:
            PlanError: its axes, numbers and shared parameters do not fit together.
        """
        profile = self._problem.profile(candidate.micro_size)
        limit = self._problem.memory_bytes
        plan = self._plan(candidate)
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
        num_steps = steps_to_count(candidate.num_stages, candidate.of_each)
        key = (
            candidate.preset, candidate.replicas, candidate.num_stages, candidate.num_microbatches,
            candidate.ring, tied,
        )  # fmt: skip
        if key not in self._plans:
            self._plans[key] = candidate.plan(self._problem, num_steps=num_steps, tied=tied)
        return self._plans[key]

    def _even(self, profile: ModelProfile, candidate: Candidate) -> Stages:
        """Cut for speed alone, where every worker keeps much the same."""
        return Stages.even(profile, candidate.num_stages, together=candidate.runs_whole_micro)

    def _filled(self, candidate: Candidate, stages: Stages) -> Fit:
        plan = self._plan(candidate, stages.tied)
        if _has_one_stage_per_worker(plan):
            found = _times(plan, self._copies(candidate), stages)
        else:
            costs = stages.costs()
            found = memory(
                self._plan(_full(candidate), stages.tied),
                costs,
                remat=candidate.remat,
                state_per_param=self._problem.states.optimizer,
                gradient_per_param=self._problem.states.gradient,
                index_per_param=self._problem.states.index,
            )
        return Fit(candidate=candidate, plan=plan, stages=stages, memory=found)

    def _copies(self, candidate: Candidate) -> Copies:
        return self._counter.copies(
            candidate.preset,
            candidate.num_stages,
            candidate.of_each,
            candidate.replicas,
            remat=candidate.remat,
        )

    def _kept(self, candidate: Candidate, profile: ModelProfile) -> Kept:
        """Say what a worker keeps of some units in a row, by its stage: of the replicas', most."""
        copies = zip(*self._copies(candidate), strict=True)
        counts = [_most(rows) for rows in copies]
        units = profile.units
        params = [0.0, *accumulate(unit.param_bytes for unit in units)]
        activations = [0.0, *accumulate(unit.activation_bytes for unit in units)]
        crossing = [*(unit.crossing_bytes for unit in units), 0.0]

        def kept(j: int, a: int, b: int) -> float:
            copies = counts[j]
            shared = sum(
                tie.bytes * max(sum(a <= u < b for u in tie.units) - 1, 0) for tie in profile.ties
            )
            return (
                copies.of_parameters * (params[b] - params[a] - shared)
                + copies.activations * (activations[b] - activations[a])
                + copies.inputs * crossing[a]
                + copies.returns * crossing[b]
            )

        return kept


def _full(candidate: Candidate) -> Candidate:
    """Return a candidate with no more micro-batches than it takes to keep the most, if it flushes.

    By then each worker runs a forward and a backward in turn, however many are to come.
    """
    if candidate.runs_whole_micro or not candidate.has_flush:
        return candidate
    enough = min(candidate.of_each, 2 * candidate.num_stages)
    return replace(candidate, num_microbatches=enough * candidate.replicas)


def _has_one_stage_per_worker(plan: Plan) -> bool:
    if plan.axes.placement.runs_whole_micro or plan.axes.placement.takes_turns:
        return False
    homes = [w for j in range(plan.num_stages) for w in plan.axes.placement.workers_of(j)]
    return len(homes) == len(set(homes))


def _most(rows: Sequence[Row]) -> Memory:
    """Return the most that any replica keeps, of each kind."""
    return Memory(**{
        kind: max(values) for kind, values in zip(KINDS, zip(*rows, strict=True), strict=True)
    })  # fmt: skip


def _times(plan: Plan, copies: Copies, stages: Stages) -> tuple[Memory, ...]:
    """Return what workers keep whose stage is their only one: copies times bytes.

    A worker holds inputs of its own stage, and the gradients of what it sends to the next.
    """
    placement, replicas = plan.axes.placement, plan.replicas
    outputs = [*stages.input_bytes[1:], 0.0]
    found: dict[int, Memory] = {}
    for j in range(plan.num_stages):
        params, sent = stages.param_bytes[j], outputs[j]
        sizes = {"activations": stages.activation_bytes[j], "inputs": stages.input_bytes[j],
                 "returns": sent}  # fmt: skip
        for q, w in enumerate(placement.workers_of(j)):
            row = copies[0 if q == 0 else -1 if q == replicas - 1 else 1][j]
            found[w] = Memory(**{
                kind: count * sizes.get(kind, params)
                for kind, count in zip(KINDS, row, strict=True)
            })  # fmt: skip
    return tuple(found[w] for w in range(plan.num_workers))


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
    return max(paces_s(stages, candidate, network))


def paces_s(stages: Stages, candidate: Candidate, network: Network) -> list[float]:
    """Return the seconds per micro-batch of each stage: of its compute, or of its messages."""
    costs = stages.costs(remat=candidate.remat)
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
