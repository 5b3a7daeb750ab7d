"""Plans: presets, refusals, and whole programs as text."""

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError, ValidationError
from lightning_cyclic.plan import PRESETS, make_plan, programs_of, proof_of
from lightning_cyclic.plan.actions import Kind, Lane, Payload
from lightning_cyclic.plan.check.proof import validate
from tests.harness.programs import shaped


def text_of(plan, w):
    return " ".join(map(str, programs_of(plan)[w]))


def test_presets_are_those_of_the_design():
    axes = {name: (p.schedule, p.placement, p.weights, p.sharding) for name, p in PRESETS.items()}
    assert axes == {
        "cyclic_dp": ("cyclic", "replicated", "freshest", "optimizer"),
        "cyclic_dp_v1": ("cyclic", "replicated", "delayed", "none"),
        "cyclic_zero": ("cyclic", "replicated", "freshest", "full"),
        "cyclic_mp": ("cyclic", "shared", "freshest", "none"),
        "cyclic_pipeline": ("cyclic", "pipelined", "freshest", "none"),
        "gpipe": ("gpipe", "pipelined", "sync", "none"),
        "1f1b": ("1f1b", "pipelined", "sync", "none"),
        "interleaved_1f1b": ("interleaved_1f1b", "pipelined", "sync", "none"),
        "zb_h1": ("zb_h1", "pipelined", "sync", "none"),
        "zb_v": ("zb_v", "pipelined", "sync", "none"),
        "dualpipe_v": ("dualpipe_v", "pipelined", "sync", "none"),
        "pipedream": ("cyclic", "pipelined", "stashed", "none"),
        "pipedream_2bw": ("cyclic", "pipelined", "delayed", "none"),
        "pipeoptim": ("cyclic", "pipelined", "predicted", "none"),
        "spectrain": ("cyclic", "pipelined", "predicted", "none"),
        "lockstep_dp": ("lockstep", "replicated", "sync", "optimizer"),
        "diloco": ("lockstep", "replicated", "local", "none"),
        "streaming_diloco": ("lockstep", "replicated", "local", "none"),
    }
    assert all(p.source for p in PRESETS.values())
    assert not any("ddp" in name or "deepspeed" in name for name in PRESETS)


def test_program_of_two_replicas():
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, num_steps=2)
    assert text_of(plan, 0) == (
        "1RECV_T<1#0~sums 0RECV_P@1<1#1 "  # posted as early as there is room
        "0F0@0#0 1F0@0#0 0SEND_K>1#0 1B0@0#0 1SEND_S0>1#0~sums 0B0@0#0 0SEND_S0>1#0~sums "
        "1RECV_T<1#1~sums 0RECV_P@2<1#2 0F0@0#1 1UPDATE@1#0 1SEND_P@1>1#1 1F0@1#1 "
        "1B0@1#1 1SEND_S0>1#1~sums 0B0@0#1 0SEND_S0>1#1~sums "
        "1UPDATE@2#1 1SEND_P@2>1#2"
    )
    assert text_of(plan, 1) == (
        "1RECV_S0<0#0~sums 0RECV_S0<0#0~sums 1RECV_P@1<0#1 0RECV_K<0#0 "
        "0F1@0#0 1F1@0#0 1B1@0#0 1ADD1#0~sums 1SEND_T>0#0~sums 0B1@0#0 0ADD1#0~sums "
        "0UPDATE@1#0 0SEND_P@1>0#1 "
        "1RECV_S0<0#1~sums 0RECV_S0<0#1~sums 1RECV_P@2<0#2 "
        "0F1@1#1 1F1@1#1 1B1@1#1 1ADD1#1~sums 1SEND_T>0#1~sums 0B1@1#1 0ADD1#1~sums "
        "0UPDATE@2#1 0SEND_P@2>0#2"
    )


def test_buffers_are_relayed_before_anything_else_of_a_stage():
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=3, num_steps=1, relayed=[0])
    assert "0F0@0#0 0SEND_R1>1#0 0SEND_K>1#0 1F0@0#0" in text_of(plan, 0)
    assert text_of(plan, 1).startswith("0RECV_R1<0#0 ")
    assert "0F1@0#0 0SEND_R2>2#0 0SEND_K>2#0 1F1@0#0" in text_of(plan, 1)
    assert "0F2@0#0 0SEND_R0>0#1 1F2@0#0" in text_of(plan, 2)  # for the next step
    assert text_of(plan, 0).endswith("0SEND_C>1#0")  # a flush brings them to the others
    assert text_of(plan, 1).endswith("0RECV_C<0#0")


def test_one_worker_alone_sends_nothing():
    plan = make_plan("cyclic_dp", num_stages=1, num_workers=1, num_steps=2)
    assert text_of(plan, 0) == "0F0@0#0 0B0@0#0 0UPDATE@1#0 0F0@1#1 0B0@1#1 0UPDATE@2#1"


def test_full_sharding_gathers_around_each_use():
    plan = make_plan("cyclic_zero", num_stages=2, num_workers=2, num_steps=1)
    assert text_of(plan, 0) == (
        "0GATHER@0#0 0RECV_P0@0<1#0~weights 0F0@0#0 0FREE@0#0 1F0@0#0 1SEND_P1@0>1#0~weights "
        "0GATHER@0#0 0RECV_P0@0<1#0~weights 0SEND_K>1#0 1B0@0#0 1ADD0#0~sums "
        "1SEND_P1@0>1#0~weights 0B0@0#0 0FREE@0#0 0SEND_H0>1#0 "
        "1RECV_H1<1#0 1ADD1#0~sums 1UPDATE@1#0 0GATHER@1#1 0RECV_P@1<1#1~weights "
        "1SEND_P@1>1#1~weights"
    )


def replica_by_rule(plan, w):
    """Write down what a replica does in each step and after the last, straight from the rules."""
    last, stages, steps = plan.num_workers - 1, range(plan.num_stages), plan.num_steps
    nxt, prev = (w + 1) % (last + 1), (w - 1) % (last + 1)
    made = set()
    for t in range(steps + 2):
        for j in stages:
            v = plan.reads(t, w, j)
            is_new = 1 <= v <= steps and v != plan.reads(t - 1, w, j)
            if is_new and w == plan.owner(j):
                due = [k for k in stages[j:] if plan.owner(k) == w and plan.reads(t, w, k) == v]
                due = [k for k in due if (k, v) not in made]
                made |= {(k, v) for k in due}
                yield from [f"{k}RECV_T<{last}#{v - 1}" for k in reversed(due) if w != last]
                yield from [f"{k}UPDATE@{v}#{v - 1}" for k in due]
                yield from [f"{k}SEND_P@{v}>{nxt}" for k in due if last > 0]
            elif is_new:
                yield f"{j}RECV_P@{v}<{prev}"
                yield from [f"{j}SEND_P@{v}>{nxt}~weights"] * (nxt != plan.owner(j))
            yield from [f"{j}F{w}@{v}#{t}"] * (t < steps)
        for j in reversed(stages) if t < steps else ():
            yield f"{j}B{w}@{plan.reads(t, w, j)}#{t}"
            yield from [f"{j}RECV_S{w - 1}<{w - 1}#{t}", f"{j}ADD{w}#{t}"] * (w > 0)
            yield from [f"{j}SEND_S{w}>{w + 1}#{t}"] * (w < last)
            yield from [f"{j}SEND_T>{plan.owner(j)}#{t}"] * (w == last != plan.owner(j))


def as_the_rules_write(a):
    """Write an action without the step of a version's first reader, and where it is no matter."""
    text = str(replace(a, lane=a.lane if a.lane is Lane.WEIGHTS else Lane.MAIN))
    if a.payload is not Payload.P:
        return text
    step = f"#{a.t}"
    return text.replace(step, "") if a.kind is Kind.SEND else text.partition("#")[0]


@given(
    preset=st.sampled_from(["cyclic_dp", "cyclic_dp_v1"]),
    num_stages=st.integers(1, 8),
    num_workers=st.integers(1, 5),
    slack=st.sampled_from([0, 1, 2, 3, 7, 100]),
    num_steps=st.integers(1, 5),
)
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_replicas_do_what_the_rules_say(**numbers):
    plan = make_plan(**numbers, sharding="optimizer")
    for w, program in enumerate(programs_of(plan)):
        texts = [as_the_rules_write(a) for a in program if a.payload is not Payload.K]
        expected = list(replica_by_rule(plan, w))
        assert sorted(texts) == sorted(expected)
        # receives are posted early, and what is handed on goes as soon as it has come
        others = [x for x in texts if "RECV" not in x and "weights" not in x]
        assert others == [x for x in expected if "RECV" not in x and "weights" not in x]


def test_pipeline_program():
    plan = make_plan("pipedream", num_stages=2, num_workers=2, num_steps=2)
    assert text_of(plan, 0) == (
        "1SEND_D>1#0 0RECV_G0<1#0 0RECV_L<1#0 0F0@0#0 1SEND_A0>1#0 "
        "1SEND_D>1#1 0F0@0#1 1SEND_A0>1#1 0B0@0#0 0RECV_G0<1#1 0TELL#0 0RECV_L<1#1 0UPDATE@1#0 "
        "0B0@0#1 0TELL#1 0UPDATE@2#1"
    )


@st.composite
def numbers(draw):
    """Draw what any preset may be made with."""
    preset = draw(st.sampled_from(sorted(PRESETS)))
    num_workers = draw(st.integers(1, 6))
    num_stages, depth = shaped(preset, draw(st.integers(1, 8)), num_workers).values()
    stages = st.integers(0, num_stages - 1)
    found = {"preset": preset, "num_stages": num_stages, "num_steps": draw(st.integers(1, 5)),
             "relayed": draw(st.sets(stages, max_size=2))}  # fmt: skip
    placement = PRESETS[preset].placement
    if placement == "replicated":
        sharding = draw(st.sampled_from([None, "none"]))
        slack = draw(st.sampled_from([0, 1, 2, 3, 5, 100]))
        return found | {"num_workers": num_workers, "sharding": sharding, "slack": slack}
    if placement == "shared":
        return found | {"num_workers": min(num_workers, num_stages * (num_stages + 1) // 2)}
    groups = st.sets(stages, min_size=2, max_size=3).map(sorted).map(tuple)
    has_ties = num_stages > 1 and PRESETS[preset].weights != "predicted"
    replicas, depth = draw(st.integers(1, 3)), min(depth, num_stages)
    least = num_stages if preset == "dualpipe_v" else 1
    return found | {
        "num_workers": depth * replicas,
        "num_microbatches": max(least, num_stages + draw(st.integers(-1, 4))) * replicas,
        "replicas": replicas,
        "tied": draw(st.lists(groups, max_size=2)) if has_ties else (),
    }


@given(numbers())
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_any_numbers_make_a_program_that_holds(numbers):
    validate(make_plan(**numbers))


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize(
    ("preset", "extra"),
    # 2(N-1) messages of a stage per stage, and one hop of the total but where it starts; or, fully
    # sharded, two of parameters for each use elsewhere
    [("cyclic_dp", 1), ("cyclic_zero", 0)],
)
def test_volume_per_step_is_that_of_one_ring_all_reduce(preset, extra, num_workers):
    few, more = (
        make_plan(preset, num_stages=num_workers, num_workers=num_workers, num_steps=steps)
        for steps in (4, 5)
    )
    counted = set(Payload) - {Payload.K} if extra else {Payload.P}
    sends = [
        sum(a.kind is Kind.SEND and a.payload in counted for p in programs_of(plan) for a in p)
        for plan in (few, more)
    ]
    hops = extra * (num_workers - 1)
    assert sends[1] - sends[0] == 2 * num_workers * (num_workers - 1) + hops


def test_a_single_worker_reads_the_versions_of_the_workers_it_stands_for():
    many = make_plan("cyclic_dp", num_stages=5, num_workers=3)
    one = make_plan(
        "cyclic_dp", num_stages=5, num_workers=1, placement="single", num_microbatches=3
    )
    cells = [(t, i, j) for t in range(4) for i in range(3) for j in range(5)]
    assert [one.reads(*cell) for cell in cells] == [many.reads(*cell) for cell in cells]
    assert not any(a.peer is not None for a in programs_of(one)[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"preset": "cdp"}, r"preset 'cdp' is unknown; allowed: cyclic_dp, .*use preset="),
        ({"schedule": "spiral"}, r"schedule 'spiral' is unknown; .*use schedule=\"cyclic\""),
        ({"placement": "here"}, r"placement 'here' is unknown"),
        ({"weights": "old"}, r"weights 'old' is unknown"),
        ({"sharding": "half"}, r"sharding 'half' is unknown"),
        ({"num_stages": 0}, r"num_stages=0; allowed: whole numbers from 1 on; use num_stages=1"),
        ({"num_workers": 0}, r"num_workers=0"),
        ({"num_workers": True}, r"num_workers=True"),
        ({"num_steps": 0}, r"num_steps=0"),
        ({"num_microbatches": 0}, r"num_microbatches=0"),
        ({"slack": -1}, r"slack=-1; allowed: whole numbers from 0 on"),
        ({"slack": 0.5}, r"slack=0.5"),
        (
            {"num_microbatches": 3},
            r"num_microbatches=3 with num_workers=2; .*use num_microbatches=2",
        ),
        ({"schedule": "gpipe"}, r"'gpipe' does not fit placement 'replicated'; allowed with it"),
        ({"weights": "stashed"}, r"'stashed' does not fit .*sync, delayed, freshest"),
        (
            {"placement": "pipelined", "sharding": "full"},
            r"'full' does not fit placement 'pipelined'",
        ),
        ({"placement": "pipelined", "num_workers": 3}, r"at most one worker per stage"),
        (
            {"preset": "interleaved_1f1b", "num_stages": 5, "num_workers": 2},
            r"num_stages=5 with 2 workers of each replica; .* use num_stages=4 or 6",
        ),
        (
            {"preset": "interleaved_1f1b", "num_stages": 4, "weights": "delayed"},
            r"weights 'delayed' do not fit schedule 'interleaved_1f1b'.*use weights=\"sync\"",
        ),
        ({"placement": "single"}, r"use num_workers=1"),
        ({"placement": "shared", "num_workers": 4}, r"use num_workers=3 or fewer"),
        ({"relayed": [2]}, r"relayed=\(2,\); allowed: stages 0 to 1"),
        ({"relayed": 1}, r"relayed=1; allowed: whole numbers of stages"),
        ({"relayed": [0], "relayed_until": [0, 1]}, r"relayed_until=\(0, 1\) with .*for each of"),
        ({"relayed": [1], "relayed_until": [0]}, r"allowed: .* between itself and stage 1"),
        ({"relayed": [0, 0], "relayed_until": [0, 1]}, r"allowed: for each of these stages one"),
        (
            {"preset": "1f1b", "relayed": [0], "relayed_until": [1]},
            r"relayed_until=1 of stage 0, which other workers run under placement 'pipelined'",
        ),
        (
            {"preset": "1f1b", "num_workers": 1, "relayed": [0], "relayed_until": [1]},
            r"buffers of stages \[0\] that travel between workers behind the forwards of stages",
        ),
        ({"tied": [5]}, r"tied=\[5\]; allowed: groups of two or more stages"),
        ({"tied": [["a", "b"]]}, r"tied=\['a', 'b'\]; allowed: whole numbers of stages"),
    ],
)
def test_what_does_not_fit_is_refused(change, text):
    arguments = {"preset": "cyclic_dp", "num_stages": 2, "num_workers": 2} | change
    with pytest.raises(PlanError, match=text):
        make_plan(**arguments)


def test_stages_whose_buffers_travel_keep_their_last_ones_in_any_order():
    numbers = {"num_stages": 4, "num_workers": 2, "proved": False}
    plan = make_plan("cyclic_dp", relayed=[3, 0], relayed_until=[3, 2], **numbers)
    assert (plan.relayed, plan.relayed_until) == ((0, 3), (2, 3))
    own = make_plan("cyclic_dp", relayed=[3, 0], relayed_until=[3, 0], **numbers)
    assert own == make_plan("cyclic_dp", relayed=[0, 3], **numbers)


def test_sync_on_cyclic_is_refused_with_an_arrow_at_the_first_read():
    with pytest.raises(ValidationError) as refused:
        make_plan("cyclic_dp", num_stages=2, num_workers=2, weights="sync")
    message, *lines = str(refused.value).splitlines()
    assert "read version 1 of stage 0 before its update has been made" in message
    assert "allowed: version 0 or older" in message
    assert 'use weights="delayed"' in message
    assert lines[:3] == [
        "slot     0     1     2     3     4     5     6     7     8",
        "w0   0F0@0 1F0@0 1B0@0 0B0@0 0F0@1 1F0@1 1B0@1 0B0@1 0F0@2",
        "                                 ^",
    ]


def test_sync_on_cyclic_needs_no_refusal_where_nothing_overlaps():
    plan = make_plan("cyclic_dp", num_stages=3, num_workers=1, weights="sync")
    assert [plan.reads(t, 0, 0) for t in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("preset", "num_stages", "num_workers"),
    [
        ("cyclic_dp", 1024, 1024),
        ("cyclic_dp", 100, 37),
        ("cyclic_dp", 8, 1024),
        ("cyclic_zero", 64, 64),
        ("cyclic_mp", 64, 100),
        ("pipedream", 300, 300),
        ("1f1b", 1024, 512),
    ],
)
def test_a_thousand_workers_are_planned_without_a_program_of_theirs(
    preset, num_stages, num_workers
):
    plan = make_plan(preset, num_stages=num_stages, num_workers=num_workers)
    assert len(list(islice(plan.timetable, 2_000))) == 2_000
    assert "program" not in vars(plan)  # nothing was lowered for it
    assert proof_of(plan).is_smaller
    assert "proved on a smaller plan that stands for it (num_workers=" in str(proof_of(plan))
