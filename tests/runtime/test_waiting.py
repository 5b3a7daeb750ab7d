"""Waits that fail: they say who waited for whom, and point into the timetable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_cyclic.errors import PeerError, WaitTimeoutError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.runtime.waiting import Waiter
from tests.local_transport import LocalTransport, PostOffice
from tests.runtime.whole_step.test_engine import Worker, find_stages, loss, mlp, run_workers, sgd


def test_a_wait_at_its_limit_says_who_waited_for_whom_and_then_draws_it() -> None:
    stages = find_stages(mlp(), 2)
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, relayed=stages.relayed)
    alone = Worker(mlp(), plan, stages, LocalTransport(PostOffice(), 1, 2, 0.2), sgd, 1)
    alone.run()
    assert isinstance(alone.error, WaitTimeoutError)
    text = str(alone.error)
    lines = text.splitlines()
    assert lines[0] == (
        "rank 1 waited 0.2 s for rank 0 to send the signal to start, in step 0: "
        "it did not come in time."
    )
    assert lines[1] == "Look at the log of rank 0."
    assert "timeout=timedelta(minutes=...)" in lines[2]
    assert lines[3] == (
        "The arrow shows the action, 0RECV_K<0#0 in slot 2; w0 is rank 0, w1 is rank 1:"
    )
    arrow = next(k for k, line in enumerate(lines) if line.strip() == "^")
    assert lines[arrow - 1].startswith("w1")
    at = lines[arrow].index("^")
    assert "0RECV_K<0" in lines[arrow - 1][max(0, at - 24) : at + 24]


def test_the_reason_that_a_failing_worker_left_is_in_the_message() -> None:
    office = PostOffice()
    words = "rank 0 failed in step 3: ValueError: bad batch\nLook at the log of rank 0."
    LocalTransport(office, 0, 2).crew.tell(words)
    stages = find_stages(mlp(), 2)
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, relayed=stages.relayed)
    alone = Worker(mlp(), plan, stages, LocalTransport(office, 1, 2, 0.2), sgd, 1)
    alone.run()
    assert isinstance(alone.error, PeerError)
    assert str(alone.error) == (
        "rank 0 failed in step 3: ValueError: bad batch; this rank (1) stopped because of it. "
        "Look at the log of rank 0."
    )


def test_a_worker_that_dies_leaves_the_others_with_a_named_wait() -> None:
    def dying(module: object, t: int, i: int) -> object:
        if (t, i) == (4, 2):
            raise ValueError("out of data")
        return loss(module, t, i)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.runtime.whole_step.test_engine.loss", dying)
        workers = run_workers(mlp(), "cyclic_dp", 4, 4, 0, sgd, 8, timeout_s=1.0, check=False)
    errors = [w.error for w in workers]
    assert isinstance(errors[2], ValueError)
    for w in (0, 1, 3):
        assert isinstance(errors[w], WaitTimeoutError)
        assert f"rank {w} waited 1 s for rank" in str(errors[w])
        assert " in slot " in str(errors[w])


def test_an_action_of_any_step_is_drawn_where_a_short_timetable_has_one_like_it() -> None:
    plan = make_plan(
        "pipedream_2bw", num_stages=3, num_workers=3, num_microbatches=4, num_steps=12
    )
    waiter = Waiter(plan, LocalTransport(PostOffice(), 1, 3))
    short = replace(plan, num_steps=4)
    drawn = {(a.kind, a.t, a.i, a.j): a.s for a in short.programs[1] if a.i is not None}
    for a in (a for a in plan.programs[1] if a.kind in (Kind.F, Kind.B)):
        moved, shift = waiter._drawable(a)
        assert moved.t + shift == a.t
        assert drawn[a.kind, moved.t, moved.i, moved.j] == moved.s
