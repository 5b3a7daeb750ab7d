from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import IN_CHUNKS, Action, Kind, Payload, parse
from lightning_cyclic.plan.passes.chunks import chunks
from lightning_cyclic.plan.passes.messages import channel_of
from lightning_cyclic.plan.plan import Plan

WHOLE_MICRO = ("cyclic_dp", "cyclic_dp_v1", "lockstep_dp", "cyclic_zero")


def plan_of(count: int, **more: Any) -> Plan:
    return make_plan("cyclic_dp", num_stages=2, num_workers=2, chunks=count, **more)


def cut(count: int, *texts: str) -> list[str]:
    return [str(a) for a in chunks(plan_of(count), map(parse, texts))]


def test_a_sum_is_sent_on_chunk_by_chunk() -> None:
    assert cut(2, "1ADD1#4~sums", "1SEND_S1>1#4~sums") == [
        "1ADD1.0#4~sums", "1SEND_S1.0>1#4~sums", "1ADD1.1#4~sums", "1SEND_S1.1>1#4~sums",
    ]  # fmt: skip
    assert cut(2, "1ADD1#4~sums", "0SEND_P@3>1#4~weights", "1SEND_T>1#4~sums") == [
        "0SEND_P.0@3>1#4~weights", "0SEND_P.1@3>1#4~weights",
        "1ADD1.0#4~sums", "1SEND_T.0>1#4~sums", "1ADD1.1#4~sums", "1SEND_T.1>1#4~sums",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "behind", ["0B1@3#4", "1SEND_N>1#4", "1UPDATE@5#4", "0SEND_S1>1#4~sums", "1RECV_S0<0#5~sums"]
)
def test_what_may_need_the_whole_sum_comes_behind_it(behind: str) -> None:
    assert cut(2, "1ADD1#4~sums", behind)[:2] == ["1ADD1.0#4~sums", "1ADD1.1#4~sums"]


def test_what_is_small_travels_whole() -> None:
    small = ["0RECV_R1<0#3", "0SEND_N>1#3", "1F1@3#3", "0SEND_K>1#3"]
    assert cut(4, *small) == small
    assert cut(1, "1SEND_S0>1#4~sums") == ["1SEND_S0>1#4~sums"]


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("more", [{}, {"relayed": range(6)}, {"num_micro": 8}])
@pytest.mark.parametrize("preset", WHOLE_MICRO)
def test_each_channel_has_its_messages_in_the_same_order(
    preset: str, more: dict[str, Any], count: int
) -> None:
    numbers = {"num_stages": 6, "num_workers": 4} | more
    # other tests prove whole messages, and a plan of more chunks is proved on few
    whole, plan = (make_plan(preset, chunks=k, proved=k == 2, **numbers) for k in (1, count))
    for w, (before, program) in enumerate(zip(whole.programs, plan.programs, strict=True)):
        compute = (Kind.F, Kind.B, Kind.UPDATE, Kind.TELL, Kind.GATHER, Kind.FREE)
        assert [a for a in program if a.kind in compute] == [
            a for a in before if a.kind in compute
        ]
        for kind in (Kind.SEND, Kind.RECV):
            expected = [a for a in before if a.kind is kind]
            found = [a for a in program if a.kind is kind]
            assert by_channel(found, w, count) == by_channel(expected, w, 1)


def by_channel(actions: list[Action], w: int, count: int) -> dict[Any, list[Action]]:
    """Return the whole messages of each channel, once each has come with all its chunks."""
    found = defaultdict(list)
    for a in actions:
        found[channel_of(a, w)].append(a)
    for channel, each in found.items():
        whole = []
        for a, same in groupby(each, lambda a: replace(a, c=None)):
            numbers = [x.c for x in same]
            is_cut = count > 1 and a.payload in IN_CHUNKS
            times = len(numbers) // (count if is_cut else 1)  # equal ones may follow each other
            assert numbers == (list(range(count)) if is_cut else [None]) * times
            whole += [a] * times
        found[channel] = whole
    return dict(found)


def test_the_plan_without_chunks_is_the_same() -> None:
    assert plan_of(4).whole == plan_of(1)
    assert plan_of(1).whole is plan_of(1).whole
    sent = Counter(a.payload for p in plan_of(4).programs for a in p if a.kind is Kind.SEND)
    assert sent[Payload.S] == 4 * sum(
        a.payload is Payload.S and a.kind is Kind.SEND for p in plan_of(1).programs for a in p
    )


def test_many_are_proved_on_few() -> None:
    proof = plan_of(64).proof
    assert proof.is_smaller
    assert "chunks=3" in str(proof)
    assert not plan_of(3).proof.is_smaller


@pytest.mark.parametrize("count", [0, -1, 2.5, "many"])
def test_other_numbers_are_refused(count: Any) -> None:
    with pytest.raises(PlanError, match=r"chunks=.*; allowed: whole numbers from 1 on"):
        plan_of(count)


@pytest.mark.parametrize("preset", ["1f1b", "pipedream_2bw", "cyclic_mp"])
def test_workers_of_single_stages_hand_on_nothing(preset: str) -> None:
    with pytest.raises(PlanError, match=r"chunks=2 does not fit placement .*; use chunks=1"):
        make_plan(preset, num_stages=4, num_workers=4, num_micro=4, chunks=2)
