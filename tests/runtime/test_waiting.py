"""Waits that fail: they name worker, action, peer and slot, and point into the timetable."""

from __future__ import annotations

import pytest

from lightning_cyclic.errors import WaitTimeoutError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.runtime.transport import LocalTransport, PostOffice
from tests.runtime.test_engine import Worker, find_stages, loss, mlp, run_workers, sgd


def test_a_wait_that_reaches_its_limit_names_worker_action_peer_and_slot() -> None:
    stages = find_stages(mlp(), 2)
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, relayed=stages.relayed)
    alone = Worker(mlp(), plan, stages, LocalTransport(PostOffice(), 1, 2, 0.2), sgd, 1)
    alone.run()
    assert isinstance(alone.error, WaitTimeoutError)
    text = str(alone.error)
    assert "worker 1 waited for worker 0: action 0RECV_K<0#0, slot 2" in text
    assert "the limit is 0.2 s" in text
    lines = text.splitlines()
    arrow = next(k for k, line in enumerate(lines) if line.strip() == "^")
    assert lines[arrow - 1].startswith("w1")
    at = lines[arrow].index("^")
    assert "0RECV_K<0" in lines[arrow - 1][max(0, at - 24) : at + 24]


def test_the_reason_that_a_failing_worker_left_is_in_the_message() -> None:
    office = PostOffice()
    LocalTransport(office, 0, 2).report_failure("worker 0: ValueError: bad batch")
    stages = find_stages(mlp(), 2)
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, relayed=stages.relayed)
    alone = Worker(mlp(), plan, stages, LocalTransport(office, 1, 2, 0.2), sgd, 1)
    alone.run()
    with pytest.raises(WaitTimeoutError, match="Because worker 0: ValueError: bad batch"):
        raise alone.error  # type: ignore[misc]


def test_a_worker_that_dies_leaves_the_others_with_a_named_wait() -> None:
    def dying(module: object, t: int, i: int) -> object:
        if (t, i) == (4, 2):
            raise ValueError("out of data")
        return loss(module, t, i)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.runtime.test_engine.loss", dying)
        workers = run_workers(mlp(), "cyclic_dp", 4, 4, 0, sgd, 8, timeout_s=1.0, check=False)
    errors = [w.error for w in workers]
    assert isinstance(errors[2], ValueError)
    for w in (0, 1, 3):
        assert isinstance(errors[w], WaitTimeoutError)
        assert f"worker {w} waited for worker" in str(errors[w])
        assert ", slot " in str(errors[w])
