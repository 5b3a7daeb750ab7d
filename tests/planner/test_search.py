import sys
from dataclasses import replace

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.plan.check.proof import proof_of
from lightning_cyclic.planner import Problem, Tie, memory, search
from lightning_cyclic.planner.candidates import candidates
from lightning_cyclic.planner.fit import Fitter
from lightning_cyclic.planner.search import _have_same_programs, least_step_s, timed
from lightning_cyclic.simulate import Network
from tests.harness.rows import more

from .profiles import profile_of, unit

SEARCH = sys.modules["lightning_cyclic.planner.search"]  # the package has a function of that name
FEW = ("gpipe", "1f1b", "pipedream_2bw", "cyclic_pipeline", "cyclic_dp")
FLUSHED = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")


def profile(count=4, *, params=1e6, activations=4e6, crossing=1e5, ties=()):
    units = (
        unit(f"h.{k}", forward_s=0.01, backward_s=0.02, param_bytes=params,
             activation_bytes=activations, crossing_bytes=crossing)
        for k in range(count)
    )  # fmt: skip
    return profile_of(units, micro_size=4, ties=ties)


def problem(**changes):
    return Problem(
        **{"profiles": (profile(),), "num_workers": 2, "memory_bytes": 1e9, "presets": FEW}
        | changes
    )


def key(plan):
    return float(f"{plan.step_s:.3g}"), plan.staleness[0], plan.fit.memory_bytes


def everything(given_):
    """Simulate every candidate that fits, and sort."""
    fitter = Fitter(given_)
    plans = []
    for candidate in candidates(given_):
        try:
            fit = fitter.fit(candidate)
        except PlanError:
            continue
        if fit is not None:
            plans.append(timed(fit, given_))
    distinct = []
    for plan in sorted(plans, key=key):
        unnamed = {"preset": "", "num_stages": 0, "ring": None}
        numbers = replace(plan.fit.candidate, **unnamed)
        alike = [p for p in distinct if replace(p.fit.candidate, **unnamed) == numbers]
        presets = {p.fit.candidate.preset for p in alike}
        programs = [programs_of(p.fit.plan) for p in alike]
        if plan.fit.candidate.preset not in presets and programs_of(plan.fit.plan) not in programs:
            distinct.append(plan)
    return distinct


@pytest.mark.parametrize(
    ("num_workers", "memory_bytes", "bandwidth", "latency_s"),
    [
        (2, 1e9, 1e10, 0.0),
        (2, 1e9, 1e7, 0.01),
        (2, 3e7, 1e8, 0.001),
        (2, 1.9e7, 1e6, 0.0),
        more(4, 3e7, 1e7, 0.001),
    ],
)
def test_the_ranking_is_that_of_all_candidates(num_workers, memory_bytes, bandwidth, latency_s):
    given_ = problem(
        profiles=(profile(), profile().scaled(2)),
        memory_bytes=memory_bytes,
        network=Network(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth),
        num_workers=num_workers,
    )
    expected = [key(plan) for plan in everything(given_)[:6]]
    assert expected
    ranking = search(given_, most=6)
    assert [key(plan) for plan in ranking.plans] == expected
    assert all(plan.fit.memory_bytes <= memory_bytes for plan in ranking.plans)


@pytest.mark.parametrize(
    ("num_workers", "batch_size", "latency_s"),
    [(2, 16, 0.1), more(2, 32, 0.0), more(4, 64, 0.001), more(4, 32, 0.02)],
)
def test_pipelines_with_a_flush_are_ranked_as_all_would_be(num_workers, batch_size, latency_s):
    network = Network(latency_s=latency_s, bandwidth_bytes_per_s=1e8)
    given_ = problem(
        profiles=(profile(8),), num_workers=num_workers, batch_size=batch_size, presets=FLUSHED,
        network=network,
    )  # fmt: skip
    every = everything(given_)
    ranking = search(given_, most=8)
    assert [key(plan) for plan in ranking.plans] == [key(plan) for plan in every[:8]]
    names = {plan.fit.candidate.preset for plan in every}
    assert {"1f1b", "interleaved_1f1b", "zb_h1", "zb_v"} <= names
    for plan in every:  # no bound is above what it stands for
        least_s = least_step_s(plan.fit, given_)
        assert least_s <= plan.step_s * (1 + 1e-9)
        bound_s = SEARCH._Search(given_, [])._bound_s(plan.fit.candidate)
        assert bound_s <= least_s * (1 + 1e-9), plan.fit.candidate


@pytest.mark.parametrize("preset", ["interleaved_1f1b", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("remat", [False, True])
def test_what_workers_keep_does_not_grow_with_many_micro_batches(preset, remat):
    given_ = problem(
        profiles=(profile(4),), batch_size=4 * 17, presets=(preset,),
        checkpointing=("always" if remat else "never",),
    )  # fmt: skip
    (candidate,) = (c for c in candidates(given_) if c.replicas == 1)
    fit = Fitter(given_).fit(candidate)
    assert candidate.num_microbatches == 17
    found = memory(fit.plan, fit.stages.costs(), remat=remat)
    assert found == fit.memory


def test_of_plans_that_are_as_fast_the_least_stale_comes_first():
    plans = search(problem(presets=("pipedream_2bw", "cyclic_pipeline"))).plans
    assert plans[0].step_s == pytest.approx(plans[1].step_s)
    assert plans[0].fit.candidate.preset == "cyclic_pipeline"


def test_a_program_is_listed_under_one_name():
    # with as many micro-batches as this, PipeDream's rule reads what the freshest rule reads
    given_ = problem(
        presets=("cyclic_pipeline", "pipedream"), batch_size=32, checkpointing=("never",)
    )
    names = [plan.fit.candidate.preset for plan in search(given_).plans]
    assert names
    assert set(names) == {"cyclic_pipeline"}
    one = problem(presets=("cyclic_pipeline", "pipedream"), batch_size=4, num_workers=3)
    assert "pipedream" in {plan.fit.candidate.preset for plan in search(one).plans}


@pytest.mark.parametrize(
    ("one", "other", "num_stages", "num_microbatches"),
    [
        ("cyclic_pipeline", "pipedream", 2, 4),
        ("cyclic_pipeline", "pipedream", 3, 4),
        ("cyclic_pipeline", "pipedream_2bw", 2, None),
        ("cyclic_pipeline", "pipeoptim", 2, None),
        ("gpipe", "1f1b", 3, 1),
        ("gpipe", "1f1b", 3, 3),
        ("cyclic_dp", "cyclic_dp_v1", 2, None),
        ("pipedream_2bw", "pipedream", 1, 1),
        ("cyclic_pipeline", "pipedream", 1, 2),
        ("gpipe", "cyclic_pipeline", 1, 2),
        ("pipedream", "1f1b", 1, 2),
    ],
)
def test_programs_are_compared_without_their_messages(one, other, num_stages, num_microbatches):
    first, second = (
        make_plan(
            preset, num_stages=num_stages, num_workers=num_stages,
            num_microbatches=num_microbatches,
        )
        for preset in (one, other)
    )  # fmt: skip
    assert _have_same_programs(first, second) == (programs_of(first) == programs_of(second))


def test_what_is_ranked_can_run():
    for plan in search(problem(num_workers=4, profiles=(profile(6),))).plans:
        proof_of(plan.fit.plan)


def test_rematerialisation_is_for_those_without_memory():
    roomy = search(problem(presets=("1f1b",)), most=1).plans[0]
    assert not roomy.fit.candidate.remat
    # in four stages of one unit the first keeps four micro-batches of one sample at least
    given_ = problem(
        presets=("1f1b",), num_workers=4, profiles=(profile(params=0),),
        checkpointing=("never", "always"),
    )  # fmt: skip
    least = {
        remat: min(
            Fitter(given_).least(c).memory_bytes for c in candidates(given_) if c.remat == remat
        )
        for remat in (False, True)
    }
    assert least[True] < least[False]
    tight = replace(given_, memory_bytes=least[True])
    assert all(plan.fit.candidate.remat for plan in search(tight).plans)


def test_slow_links_favour_pipelines_and_fast_ones_replicas():
    heavy = profile(params=1e9, crossing=1e4)
    slow = problem(
        profiles=(heavy,), network=Network(bandwidth_bytes_per_s=1e8), memory_bytes=1e12
    )
    assert search(slow, most=1).plans[0].fit.candidate.num_stages == 2
    wide = profile(params=1e3, crossing=1e8)
    fast = problem(profiles=(wide,), network=Network(bandwidth_bytes_per_s=1e9))
    best = search(fast, most=1).plans[0].fit.candidate
    assert best.replicas == 2 or best.runs_whole_micro


def test_shared_parameters_leave_what_does_not_predict():
    shared = profile(ties=(Tie(units=(0, 3), bytes=1e5),))
    asked = problem(profiles=(shared,), presets=("1f1b", "pipedream_2bw", "pipeoptim"))
    plans = search(asked, most=100).plans
    cut = [plan.fit.candidate.preset for plan in plans if plan.fit.candidate.num_stages > 1]
    assert set(cut) == {"1f1b", "pipedream_2bw"}


def test_the_nearest_plan_is_named_where_none_fits():
    given_ = problem(memory_bytes=1e6)
    with pytest.raises(PlanError) as caught:
        search(given_)
    text = str(caught.value)
    assert "no plan fits into memory_bytes=1000000 (1 MB) per worker" in text
    assert 'activation_checkpointing="optimal"; give workers more memory' in text
    least = int(text.split("allowed: ")[1].split(maxsplit=1)[0])
    assert search(replace(given_, memory_bytes=least)).plans
    with pytest.raises(PlanError, match="no plan fits"):
        search(replace(given_, memory_bytes=least - 1))


def test_why_no_plan_can_be_made():
    with pytest.raises(PlanError, match="batch_size=7 cannot be cut .* use batch_size=32"):
        search(problem(batch_size=7, num_workers=2, presets=("cyclic_dp",)))
    with pytest.raises(PlanError, match="num_microbatches=1 with num_stages=4"):
        search(problem(batch_size=16, num_workers=4, presets=("pipedream_2bw",), profiles=(
            replace(profile(), micro_size=16), replace(profile(), micro_size=17),
        )))  # fmt: skip


def test_candidates_that_are_too_large(monkeypatch):
    given_ = problem(presets=("gpipe",), profiles=(profile(), profile().scaled(1)))
    every = len(list(candidates(given_)))
    monkeypatch.setattr(SEARCH, "_MOST_SIMULATED", 30)
    monkeypatch.setattr(SEARCH, "_MOST_CELLS", 60)
    ranking = search(given_, most=every)
    assert 0 < ranking.num_left_out == every - ranking.num_candidates
    assert ranking.bounds
    assert all(plan.is_simulated for plan in ranking.plans)
    assert not any(plan.is_simulated for plan in ranking.bounds)
    assert sorted(ranking.plans, key=key) == list(ranking.plans)
    assert sorted(ranking.bounds, key=key) == list(ranking.bounds)


def test_no_bound_comes_before_what_was_simulated(monkeypatch):
    # with many micro-batches, whose messages the bound leaves out
    slow = Network(latency_s=0.1, bandwidth_bytes_per_s=1e8)
    given_ = problem(
        presets=("cyclic_pipeline",), batch_size=32, network=slow, checkpointing=("never",)
    )
    by_time = [plan.fit.candidate for plan in search(given_).plans]
    fine = max(by_time, key=lambda c: c.num_microbatches * c.num_stages)
    assert fine != by_time[0]
    most = 5 * fine.num_microbatches * fine.num_stages - 1
    monkeypatch.setattr(SEARCH, "_MOST_SIMULATED", most)
    ranking = search(given_)
    (bound,) = ranking.bounds
    assert bound.fit.candidate == fine
    assert bound.step_s < ranking.plans[0].step_s  # and it would be slower
    assert [plan.fit.candidate for plan in ranking.plans] == [c for c in by_time if c != fine]


def test_the_least_bound_is_simulated_where_all_would_take_too_long(monkeypatch):
    given_ = problem(presets=("gpipe",))
    every = search(given_, most=100).plans
    monkeypatch.setattr(SEARCH, "_MOST_SIMULATED", 0)
    ranking = search(given_, most=100)
    (best,) = ranking.plans
    assert best.is_simulated
    assert best in every
    assert {plan.fit.candidate for plan in ranking.bounds} | {best.fit.candidate} == {
        plan.fit.candidate for plan in every
    }
