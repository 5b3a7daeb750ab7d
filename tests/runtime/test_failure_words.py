from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_cyclic.errors import PeerError, StepError, WaitTimeoutError
from lightning_cyclic.runtime.failure_words import reason_of, words_of
from lightning_cyclic.runtime.transport.crew import Names

NAMES = Names(2, ["a", "b", "node7", "d"])


def test_all_that_an_own_error_says_is_told_on_one_line_but_for_the_timetable() -> None:
    error = StepError("given\n  allowed: this\ndo that\nThe arrow shows it:\nslot 0 1\nw0 0F0 .")
    assert reason_of(error) == "StepError: given allowed: this do that"


def test_of_other_errors_the_first_line_is_told() -> None:
    assert (
        reason_of(RuntimeError("\nout of memory\nframe #0: ...")) == "RuntimeError: out of memory"
    )
    assert len(reason_of(ValueError("x" * 5000))) < 500
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"


class Broken:
    """Has one sample, which fails as a library does that it calls."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, k: int) -> None:
        json.loads("no JSON")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_of_other_errors_the_innermost_line_that_is_the_users_is_told(num_workers: int) -> None:
    data: Any = Broken()
    with pytest.raises((ValueError, RuntimeError), match="Expecting value") as caught:
        next(iter(DataLoader(data, num_workers=num_workers)))
    said, line = "JSONDecodeError: Expecting value: line 1 column 1 (char 0)", 1
    line += Broken.__getitem__.__code__.co_firstlineno
    in_worker = f"json.decoder.{said}"  # the last line of its traceback
    assert reason_of(caught.value) == (
        in_worker if num_workers else f"{said} (test_failure_words.py:{line})"
    )


def test_a_failure_names_the_culprit_first_with_host_and_stages() -> None:
    NAMES.know_stages({2: (0, 2)})
    words = words_of(ZeroDivisionError("broken"), NAMES, "in step 12")
    assert words == (
        "rank 2 on node7 (stages 0 and 2) failed in step 12: ZeroDivisionError: broken\n"
        "Look at the log of rank 2."
    )


def test_what_a_rank_met_in_a_wait_is_told_as_it_is() -> None:
    error = WaitTimeoutError("rank 2 waited: it did not come in time.\nLook there.\nslot 0\n^")
    words = words_of(error, NAMES, "in step 12")
    assert words == "rank 2 waited: it did not come in time.\nLook there."
    assert words_of(PeerError("gone"), NAMES, "in step 12") == "gone\n"
