"""What sending less would gain, where the network is what the first plan waits for.

Codecs and local steps train something else, so no search chooses them: here they are
only simulated, on the same workers and links, beside the plan that was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import LocalSteps, make_plan, programs_of
from lightning_cyclic.plan.presets import PLACEMENTS, PRESETS
from lightning_cyclic.planner.candidates import Problem
from lightning_cyclic.planner.ring import quickest
from lightning_cyclic.planner.search import RankedPlan, Ranking, search, timed
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.simulate.coding import Coding
from lightning_cyclic.simulate.costs import Network
from lightning_cyclic.simulate.engine import simulate
from lightning_cyclic.simulate.memory import memory
from lightning_cyclic.simulate.units import show_seconds

WAITS: Final = 1.05  # a step this much longer than without messages is one of the network's
_LOCAL: Final = "diloco"


@final
class Gain(NamedTuple):
    """Hold what a way to send less is predicted to take.

    Args:
        strategy: to paste, but for its stages.
        step_s: seconds per update, of as many samples.
        risk: what may become of what is learnt.
    """

    strategy: str
    step_s: float
    risk: str


@final
class Gains(NamedTuple):
    """Hold what sends less than a plan that waits for the network.

    Args:
        alone_s: seconds of the plan's step without messages.
        ways: what is faster; one at least.
    """

    alone_s: float
    ways: Sequence[Gain]


def of_first(
    ranking: Ranking, codings: Callable[[], Iterable[tuple[Coding, str]]]
) -> Gains | None:
    """Return what sends less than the first plan.

    Args:
        codings: makes codecs, and what each risks; asked for only where that plan waits.

    Returns:
        What gains; None where the network is not waited for, or nothing does.
    """
    plan, problem = ranking.plans[0], ranking.problem
    alone_s = timed(plan.fit, replace(problem, network=Network(), host_network=None)).step_s
    if not plan.is_simulated or plan.step_s < WAITS * alone_s:
        return None
    ways = gains(plan, problem, codings)
    return Gains(alone_s, ways) if ways else None


def told(found: Gains) -> str:
    """Say it, in some lines."""
    rows = (
        f"  {show_seconds(gain.step_s):>8}  {gain.strategy}\n{'':12}{gain.risk}"
        for gain in found.ways
    )
    return "\n".join([
        f"plan 1 waits for the network: without messages its step would take "
        f"{show_seconds(found.alone_s)}. What",
        "sends less trains something else, so it is never chosen here; its step would take",
        *rows,
        "Compare a short run with one without; --compress int8, or int8+int8 of new weights, too,",
        "plans with such a codec.",
    ])  # fmt: skip


def gains(
    plan: RankedPlan, problem: Problem, codings: Callable[[], Iterable[tuple[Coding, str]]]
) -> Sequence[Gain]:
    """Return what sends less and is faster than a plan, on the links of a problem.

    Args:
        plan: the best one without.
        codings: makes codecs, and what each risks.

    Returns:
        Of each codec the fastest plan of the first preset that was asked for whose workers have
        the whole model; and local steps. What has no room in memory, or gains nothing, is not
        among them; nor is anything where no such preset was asked for.
    """
    presets = tuple(x for x in problem.presets if _runs_whole(x))
    if not presets or problem.sparsity is not None or problem.coding is not None:
        return []
    whole = replace(problem, presets=presets[:1], checkpointing=("never",), disk_bytes_per_s=None)
    codecs = [
        (coding, risk)
        for coding, risk in codings()
        if _weights_s(replace(whole, coding=coding)) * WAITS < plan.step_s
    ]
    found = [*_of_codecs(whole, codecs), *_of_local_steps(whole)]
    return [x for x in found if x.step_s * WAITS < plan.step_s]


def _weights_s(problem: Problem) -> float:
    """Return for how long some port is busy with new weights alone, as they are sent.

    However fine stages are: a codec sends no more of parameters that are one than of several.
    """
    profile = problem.profiles[0]
    costs = problem.costs(Stages.of(profile, [0], together=True))
    share = (problem.num_workers - 1) / problem.num_workers
    return quickest(problem.ring_network).transfer_s(share * sum(costs.sent_param_bytes))


def _runs_whole(preset: str) -> bool:
    return PLACEMENTS[PRESETS[preset].placement].runs_whole_micro


def _of_codecs(problem: Problem, codings: Iterable[tuple[Coding, str]]) -> Iterator[Gain]:
    for coding, risk in codings:
        try:
            (best,) = search(replace(problem, coding=coding), most=1).plans
        except PlanError:  # there is no room for what is left of gradients
            continue
        preset = best.fit.candidate.preset
        yield Gain(f'CyclicStrategy("{preset}", compress={coding})', best.step_s, risk)


def _of_local_steps(problem: Problem) -> Iterator[Gain]:
    """Yield local steps: a step alone, and a share of what it takes to meet."""
    rule, num_workers = LocalSteps(), problem.num_workers
    micro_size, rest = divmod(problem.samples, num_workers)
    if num_workers == 1 or rest or not micro_size:
        return
    num_stages = min(num_workers, problem.num_units)
    stages = Stages.even(problem.profile(micro_size), num_stages, together=True)
    costs = problem.costs(stages)
    # all that is waited for is what an exchange takes: two steps of a period show it
    plan = make_plan(
        _LOCAL, num_stages=num_stages, num_workers=num_workers, num_steps=6,
        weights=replace(PRESETS[_LOCAL].local, every=2),
    )  # fmt: skip
    kept = memory(plan.shortest, costs, state_per_param=problem.states.optimizer)
    if max(worker.total for worker in kept) > problem.room_bytes:
        return
    alone_s = sum(costs.forward_s) + sum(costs.backward_s)
    exchange_s = 2 * (simulate(programs_of(plan), costs, problem.ring_network).step_s - alone_s)
    yield Gain(
        f"CyclicStrategy(LocalSteps(every={rule.every}))",
        alone_s + exchange_s / rule.every,
        f"workers train alone for {rule.every} steps, and their mean by another optimizer",
    )
