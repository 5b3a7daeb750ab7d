"""The model of NCCL sees programs that keep its rules, and names what does not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_cyclic.plan import make_plan, program_of
from lightning_cyclic.plan.actions import Action, Kind, Lane, Payload
from lightning_cyclic.plan.passes.messages import Channel, Ring, ring_of
from lightning_cyclic.runtime.transport.base import Part
from tests.harness import processes
from tests.harness.nccl_model import GlooModel, ModelError, Rules
from tests.runtime.transport.rings import BACK, SUMS, THERE, join, ring, room, some

pytestmark = pytest.mark.multi
FIRST, SECOND = ring(), ring(payload=Payload.R, j=3)


def run_a_program(preset: str) -> int:
    """Do the sends and receives of three steps and a flush, and compute nothing."""
    rank, num = join()
    program = program_of(make_plan(preset, num_stages=num, num_workers=num))
    model = GlooModel(20.0, Rules(program.channels, program.depths))
    count = follow(model, program.first(3)[rank], program.depths)
    model.assert_idle(5)
    model.close()
    return count


def follow(model: GlooModel, actions: Sequence[Action], depths: Any) -> int:
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
        for check in (
            pending.wait, lambda: model.isend(ring(SUMS), room()), model.assert_idle,
            lambda: model.isend(ring(BACK), room()),
            lambda: model.isend(ring(Channel(0, 1, Lane.WEIGHTS)), room()),
            lambda: model.isend(FIRST, room(), Part.HEAD),
        ):  # fmt: skip
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


@pytest.mark.parametrize(
    ("preset", "num_ranks"), [("cyclic_dp", 2), ("cyclic_dp", 4), ("1f1b", 3), ("pipedream", 4)]
)
def test_programs_run(preset: str, num_ranks: int) -> None:
    plan = make_plan(preset, num_stages=num_ranks, num_workers=num_ranks)
    for worker, count in enumerate(processes.run(run_a_program, num_ranks, preset)):
        assert count == sum(a.kind is Kind.SEND for a in program_of(plan).first(3)[worker])


def test_broken_rules_are_named_between_processes() -> None:
    (sent, _), (received, mismatches) = processes.run(break_rules, 2)
    assert len(received) == len(mismatches) == 1
    assert "recv of A of stage 0, worker 0 -> worker 1 of A/0/2 met a send of R/3/2" in received[0]
    late, deep, left, other, cold, head = sent
    name = "send of A of stage 0 on lane sums, worker 0 -> worker 1"
    assert late == f"worker 0, {name}: not run within 1 s"
    assert deep == f"worker 0, {name}: 1 are under way, as many as its depth"
    assert left == f"worker 0 leaves 1 pending: ['{name}']"
    assert "goes the other way" in other
    assert "first contact on Channel(source=0, target=1" in cold
    assert "HEAD has to go by control" in head


def test_a_failure_wakes_all_who_wait_between_processes() -> None:
    texts, waited = processes.run(fail_on_rank_1, 2)[0]
    assert waited < 5
    assert len(texts) == 2
    assert texts[0].endswith("recv of A of stage 0, worker 1 -> worker 0: worker 1: boom")
