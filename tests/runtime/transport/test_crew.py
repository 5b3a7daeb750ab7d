"""Ranks that fail, are killed, stop or do not come: the others end soon, and name them."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_cyclic.errors import CyclicError, PeerError, WaitTimeoutError
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.transport import crew as crews
from lightning_cyclic.runtime.transport.crew import AbstractCrew, Crew, Names
from tests.harness import processes
from tests.runtime.transport.rings import join

HERE_S, LIMIT_S = 1.5, 2.0  # how long a rank stays that says nothing itself, and waits


def test_stages_stand_behind_rank_and_host() -> None:
    names = Names(2, ["x", "y", "z"])
    names.rank_of = lambda w: 2 - w
    names.know_stages({0: (0,), 1: (1, 2), 2: (0, 1, 2)})
    assert names.of(2) == "rank 2 on z (stage 0)"
    assert names.of(1, 0) == ("rank 1 on y (stages 1 and 2) and rank 0 on x (stages 0, 1 and 2)")
    assert Names(0).of(3) == "rank 3"


# ---------------------------------------------------------------------- who is to blame


class Called(AbstractCrew):
    """Be rank 1 of three, of which some answer what they wait for.

    Args:
        answers: of ranks; None where the store is gone.
        words: that another rank leaves while ranks are called.
    """

    def __init__(self, answers: dict[int, str] | None, words: str | None = None) -> None:
        super().__init__(Names(1, ["a", "b", "c"]), 4.0)
        self._answers, self._words = answers, words
        self._heard: str | None = None

    def failure(self) -> str | None:
        return self._heard

    def tell(self, words: str) -> None:
        raise NotImplementedError

    def call(self) -> dict[int, str] | None:
        self._heard = self._words
        return self._answers


def of(crew: AbstractCrew) -> Assembly:
    made = Assembly(when=lambda: "in step 3")
    made.crew = crew  # type: ignore[assignment]
    return made


def met(crew: Called, said: str, peer: int | None = None) -> CyclicError:
    with pytest.raises(CyclicError) as caught, of(crew).waiting("to meet", peer):
        raise RuntimeError(f"gloo: {said}")
    assert crew.waits == ""
    return caught.value


@pytest.mark.parametrize(
    ("answers", "peer", "said", "at"),
    [
        ({0: "to meet"}, None, "rank 2 on c to meet, in step 3: it did not come in time; rank 2 "
         "on c did not answer.", "log of rank 2"),
        ({}, None, "rank 0 on a and rank 2 on c to meet, in step 3: it did not come in time; rank "
         "0 on a and rank 2 on c did not answer.", "logs of ranks 0, 2"),
        ({0: "to meet", 2: ""}, None, "rank 2 on c to meet, in step 3: it did not come in time.",
         "log of rank 2"),
        (None, None, "rank 0 on a to meet, in step 3: it did not come in time; rank 0 on a, "
         "through which ranks find each other, cannot be reached from rank 1 on b.",
         "log of rank 0"),
        ({0: "to meet", 2: "to meet"}, None, "all ranks to meet, in step 3: it did not come in "
         "time.", "all logs"),
        ({0: "", 2: "to dine"}, 2, "rank 2 on c to meet, in step 3: it did not come in time; rank "
         "2 on c waits itself for all ranks to dine.", "log of rank 2"),
        ({2: ""}, 2, "rank 2 on c to meet, in step 3: it did not come in time; rank 0 on a did "
         "not answer.", "log of rank 0"),
    ],
)  # fmt: skip
def test_of_a_wait_at_its_limit_those_are_named_that_do_not_come(
    answers: dict[int, str] | None, peer: int | None, said: str, at: str
) -> None:
    error = met(Called(answers), "Timed out", peer)
    assert isinstance(error, WaitTimeoutError)
    first, second, *_ = str(error).splitlines()
    assert first == f"rank 1 on b waited 4 s for {said}"
    assert at in second


@pytest.mark.parametrize(
    ("answers", "peer", "said"),
    [
        ({0: ""}, None, "rank 2 on c ended without a word of why: rank 1 on b waited for all "),
        ({}, None, "rank 0 on a and rank 2 on c ended without a word of why: rank 1 on b waited "),
        ({0: "", 2: ""}, 0, "rank 0 on a ended without a word of why: rank 1 on b waited for it "),
        ({0: ""}, 0, "rank 2 on c ended without a word of why: rank 1 on b waited for rank 0 on "),
    ],
)
def test_of_a_closed_connection_those_are_named_that_do_not_answer(
    answers: dict[int, str], peer: int | None, said: str
) -> None:
    error = met(Called(answers), "Connection closed by peer", peer)
    assert isinstance(error, PeerError)
    assert str(error).startswith(said)


@pytest.mark.parametrize("said", ["Timed out", "Connection closed by peer"])
@pytest.mark.parametrize("answers", [{0: "", 2: ""}, {0: ""}, None])
def test_words_that_come_while_ranks_are_called_are_told(
    answers: dict[int, str] | None, said: str
) -> None:
    words = "rank 0 on a waited 4 s for rank 2 on c to meet.\nLook there."
    assert str(met(Called(answers, words), said)) == (
        "rank 0 on a waited 4 s for rank 2 on c to meet; this rank (1) stopped because of it. "
        "Look there."
    )


def test_errors_of_other_code_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="^mine$"), of(Called({})).waiting("to meet"):
        raise RuntimeError("mine")


# ---------------------------------------------------------------------- ranks


def report_in_turn() -> tuple[str | None, str | None, bool]:
    """Let rank 1 report first, then rank 0; return the words before and after, and what ended."""
    rank, _ = join()
    crew, ended = Crew(20.0), []
    crew.hang_ups.append(lambda: ended.append(True))
    before = crew.failure()
    dist.barrier()
    for reporter, words in ((1, "the first reason"), (0, "what followed from it")):
        if rank == reporter:
            crew.tell(words)
        dist.barrier()
    end = time.monotonic() + 3
    while not ended and time.monotonic() < end:
        time.sleep(0.05)
    dist.barrier()
    crew.close()
    return before, crew.failure(), ended == [True]


@pytest.mark.multi
def test_the_first_reason_stays_and_ends_all_waits() -> None:
    assert processes.run(report_in_turn, 3) == [(None, "the first reason", True)] * 3


def learn(slow: int, teller: int) -> str | None:
    """Tell of a failure or be told, and end; one looks late."""
    rank, _ = join()
    crews._POLL_S = 2.0 if rank == slow else 0.1
    crew = Crew(20.0)
    if rank == teller:
        crew.tell(f"rank {teller} failed: boom")
    until = time.monotonic() + 8.0
    while crew.failure() is None and time.monotonic() < until:
        time.sleep(0.02)
    crew.tell("heard")  # as who fails because of others does: their words stay
    return crew.failure()


@pytest.mark.multi
@pytest.mark.parametrize("teller", [0, 1])
def test_the_rank_with_the_store_stays_until_all_have_read(teller: int) -> None:
    assert processes.run(learn, 3, 2, teller) == [f"rank {teller} failed: boom"] * 3


def leave() -> bool:
    """Let rank 1 end while its thread is busy with what it has read; say on 0 if that is known."""
    rank, _ = join()
    crew = Crew(20.0)
    if rank == 0:
        crew.tell("rank 0 failed: boom")
        return crew.store.check([crew._read[1]])
    crew.hang_ups.append(lambda: time.sleep(2.0))
    while crew.failure() is None:
        time.sleep(0.02)
    crew.tell("heard")
    return True


@pytest.mark.multi
def test_who_ends_has_said_that_it_has_read() -> None:
    assert processes.run(leave, 2) == [True, True]


def meet(victim: int, how: int, comes: bool) -> None:
    """Send a rank a signal at a meeting, or on the way to it; fail with what others learn."""
    rank, num = join()
    limit_s = LIMIT_S if how == signal.SIGSTOP else 20.0
    group = dist.new_group(timeout=timedelta(seconds=limit_s), backend="gloo")
    crew, store = Crew(limit_s), dist.distributed_c10d._get_default_store()
    dist.barrier(group)
    if not comes and rank == 2:  # it is on the way, and alive
        time.sleep(2 * HERE_S)
        return
    began = time.monotonic()
    try:
        with of(crew).waiting("to meet"):
            store.add("come", 1)
            while rank == victim:
                if store.add("come", 0) == num - (not comes):
                    time.sleep(0.2)
                    os.kill(os.getpid(), how)
            dist.barrier(group)
    except (PeerError, WaitTimeoutError) as error:
        waited_s = time.monotonic() - began
        time.sleep(HERE_S)  # the others find out by themselves
        raise AssertionError(f"{waited_s:.1f} s: {error}") from None


def said_of(victim: int, how: int, comes: bool = True) -> dict[int, tuple[float, str]]:
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(meet, 3, victim, how, comes, time_limit_s=40, after_failure_s=15,
                      frozen={victim} if how == signal.SIGSTOP else ())  # fmt: skip
    errors = caught.value.errors
    del errors[victim]
    found = {r: re.search(r"AssertionError: (\d+\.\d) s: (.*\n.*)", x) for r, x in errors.items()}
    assert all(found.values()), errors
    return {r: (float(match[1]), match[2]) for r, match in found.items() if match is not None}


@pytest.mark.multi
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_where_all_have_come_is_named(victim: int) -> None:
    said = said_of(victim, signal.SIGKILL)
    assert len(said) == 2
    for waited_s, text in said.values():
        assert waited_s < 5
        assert re.match(rf"rank {victim} on \S+ ended without a word of why", text), text
        assert f"Look at the log of rank {victim}." in text


@pytest.mark.multi
def test_whoever_is_on_the_way_is_not_named() -> None:
    ((rank, (_, text)),) = said_of(1, signal.SIGKILL, comes=False).items()
    assert rank == 0
    assert text.startswith("rank 1 on ")
    assert "rank 2" not in text


@pytest.mark.multi
@pytest.mark.parametrize(
    ("victim", "why"),
    [(1, r"did not answer"), (0, r"through which ranks find each other, cannot")],
)
def test_a_rank_that_is_stopped_where_all_have_come_is_named(victim: int, why: str) -> None:
    said = said_of(victim, signal.SIGSTOP)
    assert len(said) == 2
    for rank, (waited_s, text) in said.items():
        assert waited_s < 12
        first = rf"rank {rank} on \S+ waited {LIMIT_S:g} s for rank {victim} on \S+ to meet"
        assert re.match(first, text)
        assert re.search(rf"; rank {victim} on \S+ {why}|; rank {victim} on \S+, {why}", text)
