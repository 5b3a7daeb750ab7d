"""The choice of places is the best of all, by trying them all."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.planner import memory
from lightning_cyclic.runtime.stages.best_places import Demands, best_places
from lightning_cyclic.runtime.stages.places import CutPoints, Load, split_by
from lightning_cyclic.simulate import Costs, Network

from .scripts import Writer

costs = st.integers(0, 9), st.integers(0, 5), st.integers(0, 5)
back = st.integers(0, 3)  # a skip makes it more than one
layers = st.tuples(st.just("layer"), *costs) | st.tuples(st.just("layer"), *costs, back, back)
leaves = (
    layers | layers | layers | st.just(("read",)) | st.tuples(st.just("old"), st.integers(0, 5))
)
scripts = st.recursive(
    st.lists(leaves, min_size=1, max_size=4),
    lambda inner: st.lists(leaves | st.tuples(st.just("box"), inner), min_size=1, max_size=4),
    max_leaves=7,
)


def allowed(points, places, limit):
    """Say whether stages may begin at all of these places."""
    split = split_by(places)
    ticks = [0, *(p.tick for p in places), points.survey.end + 1]
    return (
        not any(o.is_hard for p in places for o in points.obstacles.against(p.tick, split))
        and all(
            points.first_uses_before(a) < points.first_uses_before(b) for a, b in pairwise(ticks)
        )
        and (limit is None or all(points.kept_bytes(a, b) <= limit for a, b in pairwise(ticks)))
    )


def slowest(points, places):
    ends = [0, *(p.before_ns for p in places), points.survey.duration_ns]
    return max(b - a for a, b in pairwise(ends))


def best_of_all(points, stages, limit):
    """Return the slowest stage's time for the best choice without shared modules, else with."""
    for places in ([p for p in points.places if not p.obstacles], points.places):
        choices = combinations(places, stages - 1)
        found = [slowest(points, c) for c in choices if allowed(points, c, limit)]
        if found:
            return min(found)
    return None


@settings(max_examples=300, deadline=None)
@given(scripts, st.integers(1, 5), st.none() | st.integers(0, 40))
def test_as_good_as_the_best_of_all(script, stages, limit):
    points = CutPoints(Writer([("layer", 1, 1, 1), *script]).survey())
    best = best_of_all(points, stages, limit)
    if best is None:
        with pytest.raises(PlanError):
            best_places(points, stages, limit)
        return
    places = best_places(points, stages, limit)
    assert len(places) == stages - 1
    assert allowed(points, places, limit)
    assert slowest(points, places) == best


@settings(max_examples=100, deadline=None)
@given(scripts)
def test_the_number_that_a_refusal_allows_is_the_largest(script):
    points = CutPoints(Writer([("layer", 1, 1, 1), *script]).survey())
    most = max(k for k in range(1, 20) if best_of_all(points, k, None) is not None)
    assert len(best_places(points, most)) == most - 1
    with pytest.raises(
        PlanError, match=rf"at most {most}; allowed: 1 to {most}; use stages={most};"
    ):
        best_places(points, most + 1)


@settings(max_examples=100, deadline=None)
@given(scripts, st.integers(1, 3))
def test_the_memory_that_a_refusal_allows_is_the_least(script, stages):
    points = CutPoints(Writer([("layer", 1, 1, 1), *script]).survey())
    if best_of_all(points, stages, None) is None:
        return
    with pytest.raises(PlanError, match=rf"stages={stages}; allowed: \d+ bytes") as caught:
        best_places(points, stages, -1)
    least = int(str(caught.value).split("allowed: ")[1].split()[0])
    assert best_of_all(points, stages, least) is not None
    assert least == 0 or best_of_all(points, stages, least - 1) is None


ROW = [("layer", ns, 1, 1) for ns in (3, 1, 1, 2, 5)]


@pytest.mark.parametrize("stages", [0, -1, 6])
def test_impossible_numbers(stages):
    points = CutPoints(Writer(ROW).survey())
    with pytest.raises(PlanError, match=rf"stages={stages} .* at most 5; allowed: 1 to 5"):
        best_places(points, stages)


def test_stages_of_equal_activations_do_not_depend_on_times():
    sizes = (1, 1, 1, 6, 1)
    for times in ((3, 1, 1, 2, 5), (9, 1, 1, 1, 1)):
        script = [("layer", ns, 1, n) for ns, n in zip(times, sizes, strict=True)]
        points = CutPoints(Writer(script).survey(), "activations")
        assert [p.path for p in best_places(points, 2)] == ["3"]


# ---------------------------------------------------------------------- with a plan's demands


def demanded(preset, stages, bandwidth):
    plan = make_plan(preset, num_stages=stages, num_workers=stages, num_microbatches=stages)
    network = Network(bandwidth_bytes_per_s=bandwidth)
    return Demands.of(plan, again=False, network=network, state_per_param=2.0)


def judged(points, places, demands):
    """Return the slowest stage's seconds and the fullest worker's bytes, from the definition."""
    ticks = [0, *(p.tick for p in places), points.survey.end + 1]
    crossing = [0, *(p.crossing_bytes for p in places), 0]
    times, sizes = [], []
    for j, (a, b) in enumerate(pairwise(ticks)):
        load = points.load(a, b, crossing[j])
        sent_s = demands.sent_s(crossing[j]) + demands.sent_s(crossing[j + 1])
        begin, end = map(points.time_at, (a, b))
        compute_s = demands.compute_s(end) - demands.compute_s(begin)
        times.append(max(compute_s, sent_s))
        sizes.append(demands.kept_bytes(j, load, crossing[j + 1]))
    return max(times), max(sizes)


def judged_all(points, stages, demands):
    """Yield, for places without shared modules and for all, what each allowed choice takes."""
    for places in ([p for p in points.places if not p.obstacles], points.places):
        choices = combinations(places, stages - 1)
        yield [judged(points, c, demands) for c in choices if allowed(points, c, None)]


@settings(max_examples=200, deadline=None)
@given(
    scripts,
    st.sampled_from(["gpipe", "1f1b", "pipedream_2bw", "pipedream"]),
    st.integers(2, 4),
    st.sampled_from([1e8, 1e9, 1e12]),
    st.none() | st.integers(0, 250),
)
def test_as_good_as_the_best_of_all_for_a_plan(script, preset, stages, bandwidth, limit):
    points = CutPoints(Writer([("layer", 1, 1, 1), *script]).survey())
    demands = demanded(preset, stages, bandwidth)
    groups = list(judged_all(points, stages, demands))
    fitting = [[t for t, size in g if limit is None or size <= limit] for g in groups]
    best = next((min(times) for times in fitting if times), None)
    if best is not None:
        places = best_places(points, stages, limit, demands)
        found_s, kept = judged(points, places, demands)
        assert allowed(points, places, None)
        assert limit is None or kept <= limit
        assert found_s == best
        return
    least = min((size for _, size in groups[1]), default=None)
    text = "at most" if least is None else f"allowed: {ceil(least)} bytes or more"
    with pytest.raises(PlanError, match=text):
        best_places(points, stages, limit, demands)


CHAIN = [
    ("layer", ns, 1, size, 0) for ns, size in ((3, 60), (1, 9), (1, 90), (2, 2), (5, 1), (2, 1))
]


@pytest.mark.parametrize(
    ("bandwidth", "limit", "starts"),
    [(1e9, None, ["2", "4"]), (1e10, None, ["3", "5"]), (1e10, 330, ["2", "4"])],
)
def test_a_chain_of_layers(bandwidth, limit, starts):
    points = CutPoints(Writer(CHAIN).survey())
    assert [p.path for p in best_places(points, 3)] == ["1", "4"]
    demands = demanded("1f1b", 3, bandwidth)
    assert [p.path for p in best_places(points, 3, limit, demands)] == starts


def test_the_first_stage_of_a_pipeline_keeps_most():
    demands = demanded("1f1b", 3, 1e9)
    load = Load(compute_ns=1, parameter_bytes=10, activation_bytes=100, crossing_bytes=1000)
    # weights, gradients and Adam's moments; activations and inputs of 3, 2 and 1 micro-batches
    assert [demands.kept_bytes(j, load, 0) for j in range(3)] == [3340, 2240, 1140]
    # and, behind all stages but the last, one gradient of what they have sent
    more = [demands.kept_bytes(j, load, 7) - demands.kept_bytes(j, load, 0) for j in range(3)]
    assert more == [7, 7, 0]


def test_what_a_stage_keeps_of_the_one_before_counts_where_it_was_not_sent():
    load = Load(compute_ns=1, parameter_bytes=10, activation_bytes=100)
    more = replace(load, adopted_bytes=30)
    found = {}
    for preset in ("interleaved_1f1b", "zb_v"):  # a vee comes back on the worker that it turns on
        plan = make_plan(preset, num_stages=4, num_workers=2, num_microbatches=8)
        demands = Demands.of(plan, again=False, network=Network(), state_per_param=0.0)
        each = [demands.kept_bytes(j, more, 0) > demands.kept_bytes(j, load, 0) for j in range(4)]
        found[preset] = each
    assert found["interleaved_1f1b"] == [False] * 4
    assert found["zb_v"] == [False, False, True, False]


def test_workers_that_take_turns_have_no_demands_by_stage():
    plan = make_plan("cyclic_mp", num_stages=3, num_workers=6)
    assert Demands.of(plan, again=False, network=Network(), state_per_param=2.0) is None


@pytest.mark.parametrize("preset", ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("again", [False, True])
def test_workers_with_several_stages_keep_no_more_than_is_demanded(preset, again):
    plan = make_plan(preset, num_stages=4, num_workers=2, num_microbatches=8)
    demands = Demands.of(plan, again=again, network=Network(), state_per_param=2.0)
    load = Load(compute_ns=1, parameter_bytes=10, activation_bytes=100, crossing_bytes=7)
    costs = Costs(
        forward_s=(1,) * 4, backward_s=(2,) * 4, param_bytes=(10,) * 4, cut_bytes=(7,) * 4,
        activation_bytes=(100,) * 4,
    )  # fmt: skip
    demanded = [0.0, 0.0]
    for j in range(4):
        sent = 7 if j < 3 else 0
        w = plan.worker_of(0, j)
        demanded[w] = max(demanded[w], demands.kept_bytes(j, load, sent))
    kept = [worker.total for worker in memory(plan, costs, remat=again)]
    for most, found in zip(demanded, kept, strict=True):
        # forwards that are run again are at their most in one stage at a time
        assert found <= most <= (2 if again else 1.4) * found
