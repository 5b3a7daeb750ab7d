"""Waits that fail: they say who waited for whom, and point into the timetable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_cyclic.errors import CyclicError, PeerError, WaitTimeoutError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.runtime.transport import AbstractPending, LocalTransport, PostOffice
from lightning_cyclic.runtime.transport.line import Gone
from lightning_cyclic.runtime.transport.names import Names
from lightning_cyclic.runtime.waiting import Waiter, naming_peers
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
    LocalTransport(office, 0, 2).report_failure(words)
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


class Ended:
    """Know which of three ranks of this host have ended."""

    def __init__(self, *ranks: int) -> None:
        self._ranks = [*ranks]

    def ended(self) -> list[int]:
        return self._ranks

    def live(self) -> list[int]:
        return [r for r in range(3) if r not in self._ranks]


def closed(*ended: int) -> tuple[LocalTransport, AbstractPending]:
    """Return the transport of rank 1, and a message whose connection is closed."""
    transport = LocalTransport(PostOffice(), 1, 3)
    transport.names = Names(1, processes=Ended(*ended))  # type: ignore[arg-type]
    return transport, Gone(ConnectionError("closed"))


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ((0,), "rank 0 ended without a word of why: rank 1 waited for it to"),
        ((2,), "rank 2 ended without a word of why: rank 1 waited for rank 0 to"),
        ((0, 2), "rank 0 ended without a word of why: rank 1 waited for it to"),
    ],
)
def test_whoever_has_ended_is_named_and_not_who_stopped_because_of_it(
    ended: tuple[int, ...], said: str
) -> None:
    plan = make_plan("cyclic_dp", num_stages=3, num_workers=3)
    action = next(a for a in plan.programs[1] if a.peer == 0)
    transport, pending = closed(*ended)
    with pytest.raises(PeerError) as caught:
        Waiter(plan, transport).wait(pending, action)
    assert str(caught.value).startswith(said)
    assert f"\nLook at the log of rank {said[5]}.\n" in str(caught.value)


@pytest.mark.parametrize(
    ("ended", "peer", "said"),
    [
        ((2,), None, "rank 2 ended without a word of why: rank 1 waited for all ranks to meet"),
        ((0, 2), None, "rank 0 and rank 2 ended without a word of why: rank 1 waited for all"),
        ((0,), 0, "rank 0 ended without a word of why: rank 1 waited for it to meet, in step 3"),
        ((2,), 0, "rank 2 ended without a word of why: rank 1 waited for rank 0 to meet, in"),
    ],
)
def test_so_it_is_at_a_meeting(ended: tuple[int, ...], peer: int | None, said: str) -> None:
    transport, _ = closed(*ended)
    with pytest.raises(PeerError) as caught, naming_peers(transport, "in step 3", "to meet", peer):
        raise RuntimeError("Connection closed by peer")
    assert str(caught.value).startswith(said)


class Called:
    """Be rank 1 of three, all of which have come to a meeting.

    Args:
        silent: who does not answer.
        words: that another rank leaves in the meantime.
    """

    timeout_s = 4.0

    def __init__(self, silent: list[int] | None, words: str | None = None) -> None:
        self.names = Names(1, lambda w: 2 - w, ["a", "b", "c"])
        self._silent, self._words = silent, words
        self._heard: str | None = None

    def failure(self) -> str | None:
        return self._heard

    def silent(self) -> list[int] | None:
        self._heard = self._words
        return self._silent


def met(crew: Called, said: str) -> CyclicError:
    with pytest.raises(CyclicError) as caught, naming_peers(crew, "in step 3", "to meet"):
        raise RuntimeError(said)
    return caught.value


@pytest.mark.parametrize(
    ("silent", "said", "at"),
    [
        ([2], "rank 2 on c to meet, in step 3: it did not come in time; rank 2 on c did not "
         "answer.", "log of rank 2"),
        ([0, 2], "rank 0 on a and rank 2 on c to meet, in step 3: it did not come in time; rank 0 "
         "on a and rank 2 on c did not answer.", "logs of ranks 0, 2"),
        (None, "rank 0 on a to meet, in step 3: it did not come in time; rank 0 on a, through "
         "which ranks find each other, cannot be reached from rank 1 on b.", "log of rank 0"),
        ([], "all ranks to meet, in step 3: it did not come in time.", "all logs"),
    ],
)  # fmt: skip
def test_where_all_have_come_whoever_does_not_answer_is_named(
    silent: list[int] | None, said: str, at: str
) -> None:
    error = met(Called(silent), "Timed out")
    assert isinstance(error, WaitTimeoutError)
    first, second, *_ = str(error).splitlines()
    assert first == f"rank 1 on b waited 4 s for {said}"
    assert at in second


@pytest.mark.parametrize("said", ["Timed out", "Connection closed by peer"])
@pytest.mark.parametrize("silent", [[], [2], None])  # the store is gone where rank 0 has ended
def test_words_that_come_while_ranks_are_called_are_told(
    silent: list[int] | None, said: str
) -> None:
    words = "rank 0 on a waited 4 s for rank 2 on c to meet\nLook there."
    error = met(Called(silent, words), said)
    first = "rank 0 on a waited 4 s for rank 2 on c to meet; this rank (1) stopped because of it"
    assert str(error) == f"{first}. Look there."


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
