from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lightning_cyclic.plan import PRESETS, Plan, make_plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.messages import Channel, Ring, ring_of
from lightning_cyclic.runtime.transport.base import Part
from tests import processes
from tests.nccl_model import AbstractModel, Fabric, GlooModel, ModelError, Rules, ThreadedModel
from tests.runtime.transport.rings import (
    BACK,
    START,
    SUMS,
    THERE,
    join,
    ring,
    room,
    some,
)

RULES = Rules((THERE, SUMS, BACK), defaultdict(lambda: 2, {ring(SUMS): 3}))
FIRST, SECOND = ring(), ring(payload=Payload.R, j=3)


def pair(rules: Rules = RULES, timeout_s: float = 5.0) -> tuple[ThreadedModel, ThreadedModel]:
    fabric = Fabric()
    return (
        ThreadedModel(fabric, 0, 2, timeout_s, rules),
        ThreadedModel(fabric, 1, 2, timeout_s, rules),
    )


# ---------------------------------------------------------------------- between threads


def test_a_channel_is_one_queue_and_a_send_waits_for_its_receive() -> None:
    sender, receiver = pair()
    sends = [sender.isend(FIRST, some(1)), sender.isend(SECOND, some(2, 2))]
    other = sender.isend(ring(SUMS), some(3))
    got = [room(), room(2), room()]
    assert not any(pending.is_done() for pending in (*sends, other))
    receiver.irecv(FIRST, got[0]).wait()
    assert [pending.is_done() for pending in (*sends, other)] == [True, False, False]
    waits = [receiver.irecv(SECOND, got[1]), receiver.irecv(ring(SUMS), got[2])]
    for pending in (*waits, *sends, other):
        pending.wait()
    assert [b.tolist() for b in got] == [[1], [2, 2], [3]]
    sender.assert_idle()
    receiver.assert_idle()


def test_what_meets_another_message_is_named() -> None:
    sender, receiver = pair()
    sends = [sender.isend(FIRST, some(1)), sender.isend(SECOND, some(2))]
    waits = [receiver.irecv(SECOND, room()), receiver.irecv(FIRST, room(2))]
    text = "send of A of stage 0, worker 0 -> worker 1 of A/0/1 met recv of R of stage 3"
    for pending in (sends[0], waits[0]):
        with pytest.raises(ModelError, match=text):
            pending.wait()
    with pytest.raises(ModelError, match=r"of R/3/1 met recv of A .* of A/0/2"):
        waits[1].wait()
    assert len(receiver.mismatches) == 2


def test_buffers_are_not_read_or_written_before_a_wait() -> None:
    sender, receiver = pair()
    data, into = some(1), torch.zeros(4, dtype=torch.uint8)
    sent = sender.isend(FIRST, data)
    data.fill_(2)
    receiver.irecv(FIRST, room())
    with pytest.raises(ModelError, match="content changed while it was under way"):
        sent.wait()
    receiver.irecv(SECOND, into)
    assert bool(into.view(torch.float32).isnan())


def test_no_more_sends_are_under_way_than_a_ring_is_deep() -> None:
    sender, receiver = pair()
    sends = [sender.isend(FIRST, some(1)) for _ in range(2)]
    with pytest.raises(ModelError, match="A of stage 0.*: 2 are under way, as many as its depth"):
        sender.isend(FIRST, some(2))
    receiver.irecv(FIRST, room()).wait()
    sends[0].wait()
    sender.isend(FIRST, some(3))
    assert sender.pending() == 2


def test_first_contact_is_an_error_unless_warmed_up() -> None:
    sender, _ = pair(Rules((BACK,)))
    with pytest.raises(ModelError, match=r"first contact on Channel\(source=0, target=1"):
        sender.isend(FIRST, some(1))


def test_only_content_has_no_names_and_the_rest_goes_by_control() -> None:
    sender, receiver = pair()
    with pytest.raises(ModelError, match="HEAD has to go by control"):
        sender.isend(FIRST, some(1), Part.HEAD)
    with pytest.raises(ModelError, match="goes the other way"):
        receiver.isend(FIRST, some(1))
    sender.control.isend(FIRST, some(4), Part.HEAD)
    sender.isend(ring(START, Payload.K), some(5))
    head, start = room(), room()
    receiver.irecv(ring(START, Payload.K), start).wait()
    receiver.control.irecv(FIRST, head, Part.HEAD).wait()
    assert (int(head), int(start)) == (4, 5)


def test_what_is_pending_is_named() -> None:
    sender, receiver = pair(timeout_s=0.05)
    late = receiver.irecv(SECOND, room())
    with pytest.raises(TimeoutError, match="worker 1, recv of R of stage 3.* not run within 0.05"):
        late.wait()
    assert (sender.pending(), receiver.pending()) == (0, 1)
    with pytest.raises(ModelError, match="worker 1 leaves 1 pending: .'recv of R of stage 3"):
        receiver.assert_idle(0.01)
    threading.Timer(0.1, sender.isend, (SECOND, some(1))).start()
    receiver.assert_idle(5)


def test_a_failure_wakes_all_who_wait() -> None:
    sender, receiver = pair()
    pending = receiver.irecv(FIRST, room())
    threading.Timer(0.05, sender.crew.tell, ("worker 0: boom",)).start()
    with pytest.raises(ConnectionError, match="worker 0: boom"):
        pending.wait()
    with pytest.raises(ConnectionError, match="worker 0: boom"):
        receiver.irecv(FIRST, room()).wait()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("num_workers", "num_stages"), [(2, 4), (3, 3), (4, 4)])
def test_programs_keep_the_rules(preset: str, num_workers: int, num_stages: int) -> None:
    keep_the_rules(make_plan(preset, num_stages=num_stages, num_workers=num_workers))


def keep_the_rules(plan: Plan) -> None:
    num_workers, program = plan.num_workers, plan.program
    actions, fabric = program.first(4), Fabric()
    rules = Rules(program.channels, program.depths)
    models = [ThreadedModel(fabric, w, num_workers, 5.0, rules) for w in range(num_workers)]
    with ThreadPoolExecutor(num_workers) as threads:
        counts = list(threads.map(lambda m: follow(m, actions[m.worker], rules.depths), models))
    for model, mine, count in zip(models, actions, counts, strict=True):
        model.assert_idle()
        assert count == sum(a.kind is Kind.SEND for a in mine)


# ---------------------------------------------------------------------- between processes


def run_a_program(preset: str) -> int:
    """Do the sends and receives of three steps and a flush, and compute nothing."""
    rank, num = join()
    program = make_plan(preset, num_stages=num, num_workers=num).program
    model = GlooModel(20.0, Rules(program.channels, program.depths))
    count = follow(model, program.first(3)[rank], program.depths)
    model.assert_idle(5)
    model.close()
    return count


def follow(model: AbstractModel, actions: Sequence[Action], depths: Any) -> int:
    """Post what a worker posts: sends wait where the ring is full, receives for nothing."""
    sends: dict[Ring, list[Any]] = {}
    count = 0
    for a in actions:
        if a.kind not in (Kind.SEND, Kind.RECV):
            continue
        r = ring_of(a, model.worker)
        if a.kind is Kind.RECV:
            model.irecv(r, room(5))
            continue
        under_way = sends.setdefault(r, [])
        if len(under_way) >= depths[r]:
            under_way.pop(0).wait()
        under_way.append(model.isend(r, some(a.j % 251, a.t % 251, 1, 2, 3)))
        count += 1
    for under_way in sends.values():
        for pending in under_way:
            pending.wait()
    return count


def break_rules() -> tuple[list[str], list[str]]:
    """Let rank 1 receive other than is sent, and rank 0 leave a send."""
    rank, _ = join()
    rules = Rules((THERE, SUMS), {FIRST: 2, SECOND: 2, ring(SUMS): 1})
    model = GlooModel(1.0, rules)
    texts: list[str] = []
    posts = [FIRST, SECOND, FIRST] if rank == 0 else [FIRST, FIRST, FIRST]
    sizes = [3, 2, 1]
    for r, size in zip(posts, sizes, strict=True):
        try:
            (model.isend if rank == 0 else model.irecv)(r, room(size)).wait()
        except ModelError as error:
            texts.append(str(error))
    if rank == 0:
        pending = model.isend(ring(SUMS), room(7))
        for check in (pending.wait, lambda: model.isend(ring(SUMS), room()), model.assert_idle):
            try:
                check()
            except (ModelError, TimeoutError) as error:
                texts.append(str(error))
    torch.distributed.barrier()
    model.close()
    return texts, model.mismatches


def fail_on_rank_1() -> tuple[list[str], float]:
    rank, _ = join()
    model = GlooModel(30.0, Rules((THERE, BACK)))
    start, texts = time.monotonic(), []
    if rank == 1:
        time.sleep(0.2)
        model.crew.tell("worker 1: boom")
        time.sleep(1)
    else:
        posted = [model.irecv(ring(BACK), room()), model.irecv(ring(BACK), room())]
        for pending in posted:
            with pytest.raises(ConnectionError) as caught:
                pending.wait()
            texts.append(str(caught.value))
    return texts, time.monotonic() - start


@pytest.mark.multi
@pytest.mark.parametrize(
    ("preset", "num_ranks"), [("cyclic_dp", 2), ("cyclic_dp", 4), ("1f1b", 3), ("pipedream", 4)]
)
def test_programs_run(preset: str, num_ranks: int) -> None:
    plan = make_plan(preset, num_stages=num_ranks, num_workers=num_ranks)
    for worker, count in enumerate(processes.run(run_a_program, num_ranks, preset)):
        assert count == sum(a.kind is Kind.SEND for a in plan.program.first(3)[worker])


@pytest.mark.multi
def test_broken_rules_are_named_between_processes() -> None:
    (sent, _), (received, mismatches) = processes.run(break_rules, 2)
    assert len(received) == len(mismatches) == 1
    assert "recv of A of stage 0, worker 0 -> worker 1 of A/0/2 met a send of R/3/2" in received[0]
    late, deep, left = sent
    name = "send of A of stage 0 on lane sums, worker 0 -> worker 1"
    assert late == f"worker 0, {name}: not run within 1 s"
    assert deep == f"worker 0, {name}: 1 are under way, as many as its depth"
    assert left == f"worker 0 leaves 1 pending: ['{name}']"


@pytest.mark.multi
def test_a_failure_wakes_all_who_wait_between_processes() -> None:
    texts, waited = processes.run(fail_on_rank_1, 2)[0]
    assert waited < 5
    assert len(texts) == 2
    assert texts[0].endswith("recv of A of stage 0, worker 1 -> worker 0: worker 1: boom")


def test_channels_of_others_are_not_used() -> None:
    sender, _ = pair()
    with pytest.raises(ModelError, match="of other workers"):
        sender.isend(ring(Channel(1, 2, THERE.lane)), room())
