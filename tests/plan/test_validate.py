"""validate refuses every broken program, and points at what is wrong."""

import re
from collections import Counter
from dataclasses import MISSING, field, fields, make_dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError, ValidationError
from lightning_cyclic.plan import PRESETS, LocalSteps, make_plan, program_of, programs_of, proof_of
from lightning_cyclic.plan.actions import Kind, parse
from lightning_cyclic.plan.check.proof import KEPT, probe, validate
from lightning_cyclic.plan.check.replay import Replay
from lightning_cyclic.plan.passes.messages import ring_of
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.tiers import Tiers
from tests.harness.programs import from_text, shaped, swapped, to_text


def relayed(preset, **more):
    return make_plan(preset, **shaped(preset, 3, 3) | {"relayed": [1]} | more)


ROUNDS = {"num_stages": 2, "num_microbatches": 9}
WIDE = {"num_stages": 4, "num_workers": 4, "replicas": 2, "tied": ((0, 3),)}
PLANS = {name: relayed(name) for name in PRESETS} | {
    "zero, in rounds": relayed("cyclic_zero", **ROUNDS, relayed=[]),
    "zero, relayed in rounds": relayed("cyclic_zero", **ROUNDS, relayed=[0]),
    "exchanged": relayed("diloco", weights=LocalSteps(every=2), sharding="optimizer"),
    "exchanged in turn, used later": relayed(
        "diloco", weights=LocalSteps(every=3, in_turn=True, delay=2)
    ),
    "exchanged at owners": relayed(
        "diloco", weights=LocalSteps(every=2, delay=1), sharding="optimizer", to_owners=True
    ),
    "wide gpipe": relayed("gpipe", **WIDE),
    "wide 1f1b": relayed("1f1b", **WIDE),
}
# others signal starts, and hand on versions that are read no more
PIPELINES = [name for name in PLANS if PLANS[name].axes.placement.replica(0) != range(1)]


def refusal(plan, programs):
    with pytest.raises(ValidationError) as refused:
        validate(plan, programs)
    text = str(refused.value)
    message, _, timetable = text.partition("\n")
    assert "; allowed: " in message
    assert timetable.startswith("slot")
    assert "^" in timetable
    return text


def with_worker(plan, w, program):
    return (*programs_of(plan)[:w], tuple(program), *programs_of(plan)[w + 1 :])


@pytest.mark.parametrize("name", PLANS)
def test_programs_survive_text(name):
    validate(PLANS[name], from_text(to_text(programs_of(PLANS[name]))))


def left_out(program, n, _change):
    return program[:n] + program[n + 1 :]


def run_twice(program, n, _change):
    return program[: n + 1] + program[n:]


def of_another_version(program, n, change):
    n = next((m for m in [*range(n, len(program)), *range(n)] if program[m].v is not None), n)
    a = program[n]
    return *program[:n], replace(a, v=a.v + (change if a.v else 1)), *program[n + 1 :]


@pytest.mark.parametrize("altered", [left_out, run_twice, of_another_version])
@given(name=st.sampled_from(sorted(PLANS)), data=st.data())
@settings(deadline=None, max_examples=120)
def test_no_action_can_be(altered, name, data):
    plan = PLANS[name]
    w = data.draw(st.integers(0, plan.num_workers - 1))
    program = programs_of(plan)[w]
    n, change = data.draw(st.integers(0, len(program) - 1)), data.draw(st.sampled_from([-1, 1]))
    refusal(plan, with_worker(plan, w, altered(program, n, change)))


@given(name=st.sampled_from(PIPELINES), data=st.data())
@settings(deadline=None, max_examples=100)
def test_no_message_can_be_left_out_on_both_sides(name, data):
    plan = PLANS[name]
    sends = [(w, a) for w, p in enumerate(programs_of(plan)) for a in p if a.kind is Kind.SEND]
    w, a = data.draw(st.sampled_from(sends))
    both = w, replace(a, s=0), a.peer, replace(a, kind=Kind.RECV, peer=w)
    refusal(plan, tuple(
        tuple(b for b in program if (v, b) not in (both[:2], both[2:]))
        for v, program in enumerate(programs_of(plan))
    ))  # fmt: skip


ONE = {"preset": "gpipe", "num_microbatches": 1}
TWO = {"preset": "gpipe", "num_microbatches": 2}
CYCLIC = {"preset": "cyclic_dp"}
IN_ROUNDS = {**CYCLIC, "num_stages": 1, "num_microbatches": 4, "relayed": [0]}
THREE = {**CYCLIC, "num_stages": 3, "num_workers": 3}
TIED = {**TWO, "num_stages": 4, "num_workers": 4, "num_steps": 2, "tied": ((0, 3),)}
NOT_YET = "before what it needs|which is not there"


@pytest.mark.parametrize(
    ("numbers", "w", "first", "second", "said"),
    [
        (ONE, 0, "1SEND_A0>1#0", "0B0@0#0", r"waits for ever.*0B0@0#0"),
        (ONE, 0, "0F0@0#0", "1SEND_A0>1#0", NOT_YET),
        (TWO, 1, "1RECV_A0<0#0", "1RECV_A1<0#0", "takes what was sent as 1SEND_A0>1#0"),
        (TWO, 1, "1RECV_D<0#0", "1F0@0#0", NOT_YET),
        (TWO, 1, "0SEND_L>0#0", "1F1@0#0", NOT_YET),
        ({**CYCLIC, "num_steps": 2}, 1, "0ADD1#0~sums", "0UPDATE@1#0", "0UPDATE@1#0"),
        (IN_ROUNDS, 0, "0F2@0#0", "0SEND_R1>1#0", "0SEND_R1>1#0"),
        # which is behind it on its lane
        (THREE, 1, "1ADD1#0~sums", "1SEND_S1>2#0~sums", rf"({NOT_YET}).*1SEND_S1>2#0~sums"),
        # messages of other kinds share one queue
        ({**CYCLIC, "num_steps": 3, "relayed": [0]}, 0, "0RECV_R0<1#1", "0RECV_P@1<1#1",
         "takes what was sent as 0SEND_R0>0#1"),
        (TIED, 3, "3B0@0#0", "0SEND_W0>0#0", NOT_YET),
        (TIED, 0, "0RECV_W0<3#0", "0B0@0#0", NOT_YET),
        (TIED, 0, "0UPDATE@1#0", "0SEND_V@1>3#1", NOT_YET),
        (TIED, 3, "0RECV_V@1<0#1", "3F0@1#1", NOT_YET),
    ],
)  # fmt: skip
def test_what_is_out_of_order_is_refused(numbers, w, first, second, said):
    plan = make_plan(**{"num_stages": 2, "num_workers": 2, "num_steps": 1} | numbers)
    assert re.search(said, refusal(plan, swapped(plan, w, first, second)))


@pytest.mark.parametrize(
    ("numbers", "w", "action", "said"),
    [
        (CYCLIC, 0, "0UPDATE@2#1", "updates somebody else's stage"),
        ({"preset": "1f1b"}, 0, "0RECV_L<1#0", "waits for a message that nobody sends"),
        ({"preset": "1f1b"}, 1, "0SEND_L>0#0", "is sent and never received"),
    ],
)
def test_what_is_too_much_is_refused(numbers, w, action, said):
    plan = make_plan(**numbers, num_stages=2, num_workers=2, num_steps=1)
    text = refusal(plan, with_worker(plan, w, (*programs_of(plan)[w], parse(action))))
    assert said in text
    assert action in text


def test_a_round_before_the_one_whose_gradient_it_adds_to():
    plan = make_plan("cyclic_zero", num_stages=1, num_workers=1, num_microbatches=4, num_steps=1)
    order = [0, 2, 1, 3]
    given = [parse(f"0{kind}{i}@0#0") for i in order for kind in "FB"]
    text = refusal(plan, ((*given, *programs_of(plan)[0][8:]),))
    assert "0B2@0#0" in text
    assert "before what it needs" in text


def test_a_sum_that_leaves_before_the_last_round():
    plan = make_plan("cyclic_dp", num_stages=1, num_workers=2, num_microbatches=4, num_steps=1)
    programs = from_text(to_text(programs_of(plan)).replace("_S2", "_S0"))  # at both ends
    assert "0SEND_S0>1#0" in refusal(plan, programs)


def test_more_in_flight_than_the_timetable_says():
    plan = make_plan("1f1b", num_stages=2, num_workers=2, num_microbatches=4, num_steps=1)
    eager = make_plan("gpipe", num_stages=2, num_workers=2, num_microbatches=4, num_steps=1)
    assert "keeps 4 activations at once" in refusal(plan, programs_of(eager))


def test_one_more_in_flight_than_the_timetable_says():
    numbers = {"num_stages": 2, "num_workers": 2, "num_microbatches": 3, "num_steps": 1}
    plan, eager = (make_plan(preset, **numbers) for preset in ("1f1b", "gpipe"))
    assert "keeps 3 activations at once" in refusal(plan, programs_of(eager))


@pytest.mark.parametrize("replicas", [2, 64])
def test_a_probe_is_small_and_as_wide_as_needed(replicas):
    plan = make_plan(
        "1f1b", num_stages=64, num_workers=64 * replicas, replicas=replicas, tied=((0, 63),)
    )
    small = probe(plan)
    assert small.num_stages * small.num_microbatches * small.num_steps <= 2_000
    assert (small.replicas, small.num_workers) == (min(replicas, 3), 8 * min(replicas, 3))
    assert small.tied == ((0, 7),)


def test_micro_batches_default_to_one_per_stage_and_replica():
    assert make_plan("gpipe", num_stages=3, num_workers=6, replicas=2).num_microbatches == 6


@pytest.mark.parametrize("name", PRESETS)
def test_probes_are_small_and_of_the_same_kind(name):
    plan = make_plan(name, **shaped(name, 256, 256))
    small = probe(plan)
    assert small.num_stages * small.num_microbatches * small.num_steps <= 2_000
    assert (small.schedule, small.placement, small.weights) == (
        plan.schedule,
        plan.placement,
        plan.weights,
    )
    if plan.axes.placement.shape != "block":  # as many stages on each worker
        each = plan.num_stages // plan.num_workers
        assert small.num_stages == each * small.num_workers
    assert small.num_stages > 4


LARGE = {"preset": "cyclic_dp", "num_stages": 64, "num_workers": 64, "proved": False}
WITH = {  # a field of a plan that has a default -> what a large plan is made with to have another
    "replicas": {"preset": "1f1b", "num_workers": 128, "replicas": 2},
    "tied": {"preset": "1f1b", "tied": [(1, 2)]},
    "late_updates": {"preset": "pipedream_2bw", "late_updates": True},
    "norms": {"norms": "owners", "slack": 0},
    "relayed_until": {"relayed": [5], "relayed_until": [6]},
    "updates_meet": {"norms": "owners", "slack": 0},
    "group_size": {"group_size": 2},
    "offloads": {"preset": "1f1b", "offloads": True},
    "local": {"preset": "diloco"},
    "to_owners": {"to_owners": True},
}


def shape(plan):
    return plan.num_stages, plan.num_workers, plan.num_microbatches


@pytest.mark.parametrize("name", [f.name for f in fields(Plan)])
def test_no_smaller_plan_leaves_out_what_a_plan_says(name):
    unless = next(f.default for f in fields(Plan) if f.name == name)
    if unless is MISSING:  # lists of stages and numbers that every plan has
        unless = {"relayed": (), "slack": 0}.get(name)
    plan = make_plan(**LARGE | {"relayed": [5], "slack": 1} | WITH.get(name, {}))
    if name == "updates_meet":
        plan = replace(plan, updates_meet=True)
    if name == "tiers":
        plan = replace(plan, tiers=Tiers(moved=(8,) * 64, kept=(0,) * 64))
    small = probe(plan)
    assert getattr(plan, name) != unless, "add the field to WITH"
    assert getattr(small, name) != unless
    if name in KEPT:
        assert getattr(small, name) == getattr(plan, name)
    elif name == "relayed_until":
        assert shape(small) == shape(plan)


def test_a_field_that_nobody_thought_of_has_the_plan_itself_replayed():
    later = make_dataclass(
        "Later", [("later", tuple[int, ...], field(default=()))], bases=(Plan,), frozen=True,
        kw_only=True,
    )  # fmt: skip
    plan = make_plan(**LARGE)
    given = {f.name: getattr(plan, f.name) for f in fields(plan)}
    assert shape(probe(later(**given))) != shape(plan)
    assert shape(probe(later(**given, later=(3,)))) == shape(plan)


def test_what_waits_in_a_circle_is_refused_though_fewer_workers_would_not():
    stages = range(16)
    with pytest.raises(PlanError, match=r"buffers of stages \[0, 1.*only when another has begun"):
        make_plan(
            "cyclic_zero", num_stages=16, num_workers=16, relayed=stages, relayed_until=[15] * 16
        )


def test_owners_meet_where_they_must_though_fewer_workers_need_not():
    plan = make_plan(
        "cyclic_dp", num_stages=16, num_workers=16, norms="owners", relayed=[0], relayed_until=[15]
    )
    assert plan.updates_meet
    assert not proof_of(plan).is_smaller


def test_what_only_the_plan_itself_can_prove_is_refused_where_that_takes_too_long():
    with pytest.raises(PlanError, match=r"relayed_until=\(2,\) .*; allowed: fewer stages and"):
        make_plan("cyclic_dp", num_stages=512, num_workers=512, relayed=[1], relayed_until=[2])


def test_sends_wait_where_as_many_are_under_way_as_there_are_buffers():
    plan = make_plan(
        "pipedream", num_stages=8, num_workers=8, num_steps=12
    )  # batches are sent far ahead
    to_the_last = ring_of(parse("7SEND_D>7#0"), 0)
    assert program_of(plan).depths[to_the_last] > 2
    validate(plan)
    vars(program_of(plan))["depths"] = Counter(dict.fromkeys(program_of(plan).depths, 2))
    with pytest.raises(ValidationError, match="waits for ever for a message, or for its receiver"):
        validate(plan)


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_zero"])
def test_no_step_ends_with_what_waits_for_the_next_steps_of_others(preset):
    plan = make_plan(preset, num_stages=2, num_workers=2, num_steps=4, norms="owners")
    replay = Replay(plan)
    replay.run([program_of(plan).step(w, 0, starts=True) for w in range(2)])
    replay.check_step_ended()
    first, second = (program_of(plan).step(w, 1) for w in range(2))
    update = next(a for a in second if a.kind is Kind.UPDATE)
    replay.run([[], second[: second.index(update) + 1]])  # as if it ended the step before
    with pytest.raises(ValidationError, match="in their next one .*UPDATE@1#0"):
        replay.check_step_ended()
    replay.run([first, second[second.index(update) + 1 :]])
    replay.check_step_ended()
