"""A program without end: its blocks, what a flush leaves, and that it repeats."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import PRESETS, make_plan, program_of, programs_of
from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.plan.lower import window
from lightning_cyclic.plan.passes.messages import step_of
from tests.harness.programs import replayed, shaped

PLANS = [
    ("pipedream_2bw", 3, 3, 4), ("pipedream_2bw", 4, 2, 4), ("cyclic_pipeline", 4, 4, 3),
    ("cyclic_pipeline", 4, 4, 8), ("cyclic_pipeline", 3, 1, 2), ("pipedream", 4, 4, 1),
    ("pipedream", 4, 2, 1), ("pipedream", 4, 1, 1), ("pipeoptim", 2, 2, 1),
    ("pipedream_2bw", 3, 3, 4), ("cyclic_mp", 3, 4, 4),
    ("cyclic_mp", 2, 3, 3), ("cyclic_dp", 4, 4, 4), ("cyclic_dp", 8, 3, 3),
    ("cyclic_dp_v1", 4, 2, 2), ("lockstep_dp", 3, 2, 2), ("1f1b", 3, 3, 4), ("gpipe", 4, 2, 3),
]  # fmt: skip


@pytest.fixture(params=PLANS, ids=lambda n: "-".join(map(str, n)))
def plan(request):
    preset, num_stages, num_workers, num_microbatches = request.param
    return make_plan(
        preset, num_stages=num_stages, num_workers=num_workers, num_microbatches=num_microbatches,
        relayed=[num_stages - 1],
    )  # fmt: skip


def test_blocks_are_the_actions_of_any_window_cut_where_each_step_begins(plan):
    whole = window(replace(plan, num_steps=40))
    for w, program in enumerate(whole):
        blocks = [program_of(plan).step(w, t) for t in range(22)]
        actions = [a for block in blocks for a in block]
        assert actions == list(program[: len(actions)])
        assert [a.s for a in actions] == [a.s for a in program[: len(actions)]]
        assert all(step_of(a) <= t for t, block in enumerate(blocks) for a in block)
        assert all(step_of(block[0]) == t for t, block in enumerate(blocks))


@pytest.mark.parametrize("sharding", ["none", "optimizer", "full"])
@pytest.mark.parametrize(
    ("num_workers", "num_microbatches", "relayed"), [(2, 2, [0]), (3, 6, [0, 2])]
)
def test_norms_that_are_told_before_an_update_are_in_the_block_of_it(
    num_workers, num_microbatches, relayed, sharding
):
    plan = make_plan(
        "cyclic_dp", num_stages=3, num_workers=num_workers, num_microbatches=num_microbatches,
        relayed=relayed, norms="owners", sharding=sharding,
    )  # fmt: skip
    for w in range(num_workers):
        for t in range(8):
            told = False
            for a in program_of(plan).step(w, t):
                told |= a.kind is Kind.SEND and a.payload is Payload.N
                told &= a.kind is not Kind.UPDATE
            assert not told, (w, t)


def test_a_flush_leaves_nothing_and_does_nothing_twice(plan):
    whole = window(replace(plan, num_steps=40))
    for w, program in enumerate(whole):
        done = []
        for t in range(12):
            done += program_of(plan).step(w, t)
            left = [a for a in program_of(plan).flush(w, t) if a.payload is not Payload.C]
            assert sorted(map(str, done + left)) == sorted(
                str(a) for a in program if step_of(a) <= t
            )


def test_what_a_flush_has_done_is_left_out_of_later_blocks(plan):
    flushed = program_of(plan).flush(0, 3)
    behind = [a for t in range(4, 9) for a in program_of(plan).step(0, t, ended=3)]
    whole = [a for t in range(4, 9) for a in program_of(plan).step(0, t)]
    assert behind == [a for a in whole if a not in set(flushed)]


def test_a_second_flush_leaves_out_what_the_first_did(plan):
    for w in range(plan.num_workers):
        first, second = (program_of(plan).flush(w, t, ended=t - 1, whole=False) for t in (3, 4))
        assert {step_of(a) for a in first} <= {3}
        assert {step_of(a) for a in second} <= {4}
    replayed(plan, {3, 4})


@given(
    preset=st.sampled_from([*sorted(set(PRESETS) - {"cyclic_zero"}), "cyclic_mp, late"]),
    num_stages=st.integers(1, 8),
    num_workers=st.integers(1, 6),
    slack=st.sampled_from([0, 1, 3, 50]),
    norms=st.sampled_from(["none", "owners", "all"]),
    flush_at=st.sets(st.integers(0, 5)),
)
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_any_program_survives_any_flush(preset, num_stages, num_workers, slack, norms, flush_at):
    preset, _, late = preset.partition(", ")
    more = {"weights": "delayed", "num_microbatches": num_stages + slack % 4} if late else {}
    if is_replicated := PRESETS[preset].placement == "replicated":
        norms = "owners" if norms == "all" else norms
    else:
        places = num_stages * (num_stages + 1) // 2 if preset == "cyclic_mp" else num_stages
        num_workers, slack = min(num_workers, places), 0
        num_stages, num_workers = shaped(preset, num_stages, num_workers).values()
    rule = PRESETS[preset].weights
    if rule == "local" or (slack and rule == "freshest"):
        norms = "none"
    may_be_late = late or preset == "pipedream_2bw"
    flows = PRESETS[preset].schedule == "cyclic" and not is_replicated
    if norms == "owners" and flows and not may_be_late:
        norms = "all"
    plan = make_plan(
        preset, num_stages=num_stages, num_workers=num_workers, slack=slack, relayed=[0],
        norms=norms, late_updates=bool(may_be_late) and norms != "none", proved=False, **more,
    )  # fmt: skip
    replayed(plan, flush_at)


def test_workers_that_begin_together_signal_each_other():
    plan = make_plan("cyclic_dp", num_stages=4, num_workers=4)
    signals = [
        [
            str(a)
            for a in program_of(plan).step(w, 5, ended=4, starts=True)
            if a.payload is Payload.K
        ]
        for w in range(4)
    ]
    assert signals == [
        ["0SEND_K>1#5"], ["0RECV_K<0#5", "0SEND_K>2#5"], ["0RECV_K<1#5", "0SEND_K>3#5"],
        ["0RECV_K<2#5"],
    ]  # fmt: skip
    assert not any(a.payload is Payload.K for a in program_of(plan).step(1, 5))
    first = [str(a) for a in program_of(plan).step(0, 5, ended=4, starts=True)]
    assert first.index("0SEND_K>1#5") + 1 == first.index("2F0@4#5")  # two slots into its step


def test_a_norm_that_lets_all_workers_meet_needs_no_start_signal():
    plan = make_plan("cyclic_dp", num_stages=4, num_workers=4, norms="owners")
    assert not any(a.payload is Payload.K for p in programs_of(plan) for a in p)


def test_channels_are_few_and_the_same_for_all():
    plan = make_plan("cyclic_dp", num_stages=8, num_workers=4, relayed=[1])
    named = [(c.source, c.target, c.lane.value, c.is_control) for c in program_of(plan).channels]
    assert named == sorted(named)
    assert len(named) == len(set(named))
    assert {(w, w + 1, "sums", False) for w in range(3)} <= set(named)
    pipeline = make_plan("1f1b", num_stages=4, num_workers=4)
    one_lane = {(c.source, c.target) for c in program_of(pipeline).channels}
    assert len(one_lane) == len(program_of(pipeline).channels)


def test_with_which_block_a_worker_is_told_of_a_step():
    plan = make_plan("pipedream", num_stages=4, num_workers=4)
    assert [program_of(plan).lag(w) for w in range(4)] == [3, 2, 1, 0]


@pytest.mark.parametrize("preset", ["cyclic_dp", "1f1b", "pipedream"])
def test_a_plan_pickles_with_its_program(preset):
    plan = make_plan(preset, num_stages=3, num_workers=3)
    depths, actions = program_of(plan).depths, program_of(plan).step(1, 2)
    again = pickle.loads(pickle.dumps(plan))
    assert (program_of(again).depths, program_of(again).step(1, 2)) == (depths, actions)
