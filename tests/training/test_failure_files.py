"""Files of what ranks did last: real fits over gloo that fail, die, lack memory, or only stop."""

from __future__ import annotations

import re
import resource
import signal
import traceback
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_cyclic.plan import make_plan, program_of
from lightning_cyclic.registration import make_strategy
from lightning_cyclic.runtime.flight_recorder import FOLDER
from tests.harness import processes
from tests.harness.trainers import make_trainer
from tests.harness.troubles import (
    Troubled,
    TroubledStage,
    batches,
    be_asked_to_stop,
    die,
    errors_of,
    fail,
    said_by,
    strategy_of,
)
from tests.modules.classifier import MicroBatches, loader

pytestmark = pytest.mark.multi

BAD_STEP = 3
LINE = re.compile(
    r"(?P<mark>[> ]) +\d+\.\d{4} (?: +(?P<taken>\d+\.\d{4}))? +"
    r"(?P<action>\S*#\S+ )? *(?P<words>.*)"
)


class Did(NamedTuple):
    """Hold one line of a file."""

    is_over: bool
    action: str
    words: str


def file_of(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"failure-rank{rank}.txt"


def read(folder: Path, rank: int) -> tuple[list[str], list[Did]]:
    """Return the first lines of the one report in a file, and what was done."""
    text = file_of(folder, rank).read_text()
    assert text.count("=" * 80) == 1
    did = []
    for line in text.splitlines():
        if match := LINE.fullmatch(line):
            is_over = match["mark"] == " "
            assert is_over is (match["taken"] is not None), line
            did.append(Did(is_over, (match["action"] or "").strip(), match["words"]))
    return text.splitlines()[1:4], did


def without_waits(did: Sequence[Did]) -> list[str]:
    return [one.action for one in did if one.action and not one.words.startswith("wait for")]


# ---------------------------------------------------------------------- one that fails


def attempt(folder: Path, trouble: Callable[[], None], preset: str) -> tuple[str, list[str]]:
    """Return the error as it is printed, and what the program has for this worker from step 1."""
    strategy = make_strategy(preset, stages=2)
    module = Troubled(trouble, culprit=1, bad_batch=BAD_STEP)
    trainer = make_trainer(strategy, max_epochs=1, default_root_dir=folder)
    with pytest.raises(Exception) as caught:  # noqa: PT011  (the test looks at it)
        trainer.fit(module, loader(MicroBatches(module.kind, 40)))
    program, w = program_of(strategy.plan), trainer.global_rank
    # behind the first step, which finds the stages, all start anew
    steps = chain.from_iterable(program.step(w, t, starts=t == 1) for t in range(1, BAD_STEP + 4))
    return "".join(traceback.format_exception_only(caught.value)), list(map(str, steps))


def on_lane(actions: Sequence[str], lane: str) -> list[str]:
    return [a for a in actions if a.partition("~")[2] == lane]


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1"])
def test_every_rank_tells_what_it_did_last_in_the_order_of_the_program(
    preset: str, tmp_path: Path
) -> None:
    ends = processes.run(attempt, 2, tmp_path, fail, preset, time_limit_s=50)
    for rank, (text, program) in enumerate(ends):
        assert text.rstrip().endswith(f"What this rank did last is in {file_of(tmp_path, rank)}")
        (head, reason, numbers), did = read(tmp_path, rank)
        step = BAD_STEP if rank == 1 else "[34]"  # which may have gone on meanwhile
        assert re.search(rf": rank {rank} on \S+ .*ended in step {step}$", head), head
        assert "ZeroDivisionError: the batch is broken" in reason
        assert ("stopped because of it" in reason) is (rank == 0)
        assert re.match(rf"worker {rank}, process \d+, {preset}: num_workers=2, ", numbers)
        actions = without_waits(did)
        for lane in {a.partition("~")[2] for a in program}:
            of_lane, planned = on_lane(actions, lane), on_lane(program, lane)
            of_lane = of_lane[of_lane.index(planned[0]) :]  # behind step 0
            assert of_lane == planned[: len(of_lane)]
            assert len(of_lane) >= 5
            assert int(of_lane[-1].partition("~")[0].partition("#")[2]) >= BAD_STEP - 1
    assert any(not one.is_over for one in read(tmp_path, 0)[1])  # it waited for rank 1


def test_of_a_folder_that_cannot_be_written_the_error_says_so_last(tmp_path: Path) -> None:
    (tmp_path / FOLDER).touch()
    (other, _), (own, _) = processes.run(attempt, 2, tmp_path, fail, "cyclic_dp", time_limit_s=50)
    said = r"\S+failure-rank{}\.txt is not written: .*\n"
    assert re.fullmatch("ZeroDivisionError: the batch is broken\n" + said.format(1), own)
    assert re.fullmatch(
        r"lightning_cyclic\.errors\.PeerError: rank 1 on \S+ .*failed in step 3: "
        r"ZeroDivisionError: the batch is broken \(troubles.py:\d+\); this rank \(0\) "
        r"stopped because of it\. Look at the log of rank 1\.\n" + said.format(0),
        other,
    )
    assert (tmp_path / FOLDER).read_bytes() == b""


def lack_memory() -> None:
    """Ask for more than this process may have."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (1 << 29)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.empty(1 << 31, dtype=torch.uint8)


def test_a_rank_that_lacks_memory_says_so_to_all_and_what_to_do(tmp_path: Path) -> None:
    ends = processes.run(attempt, 2, tmp_path, lack_memory, "cyclic_dp", time_limit_s=50)
    (other, _), (own, _) = ends
    lack = "out of the host's memory (asked for 2.147 GB)"
    todo = "To need less memory, use one of: smaller batches, with Trainer("
    assert re.match(
        r"lightning_cyclic\.errors\.PeerError: rank 1 on \S+ .*failed in step 3: "
        + re.escape(lack) + r": RuntimeError: .*can't allocate memory.*; this rank \(0\) stopped "
        r"because of it\. Look at the log of rank 1\. " + re.escape(todo),
        other,
    )  # fmt: skip
    told = rf"^rank 1 on \S+ .*ran {re.escape(lack)} in step 3\. {re.escape(todo)}"
    assert re.search(told, own, re.MULTILINE), own
    assert read(tmp_path, 1)[0][1].startswith(f"{lack}: RuntimeError: ")


# ---------------------------------------------------------------------- one that is killed


def lose_a_stage(folder: Path) -> None:
    module = TroubledStage(die, culprit=0, phase="train")
    trainer = make_trainer(strategy_of("1f1b", 2), max_epochs=2, default_root_dir=folder)
    trainer.fit(module, batches())


def test_of_a_rank_that_is_killed_the_other_shows_what_it_waited_for(tmp_path: Path) -> None:
    errors = errors_of(lose_a_stage, 2, tmp_path)
    assert errors.pop(1) == "died without a word"
    assert not file_of(tmp_path, 1).exists()
    (arrow,) = re.findall(r"The arrow shows the action, (\S+) in slot", errors[0])
    (_, reason, numbers), did = read(tmp_path, 0)
    assert reason == f"PeerError: {' '.join(said_by(errors[0]).splitlines()[:3])}"
    assert numbers.startswith("worker 1, ")  # the last stage is on rank 0
    (open_,) = [one for one in did if not one.is_over]
    assert open_ == did[-1]
    assert open_.action == arrow
    # gloo may have lost what was on its way, too
    waited = r"wait for (the batch|activations, stage 1, micro-batch \d), of step 5, from worker 0"
    assert re.fullmatch(waited, open_.words), open_
    program = program_of(make_plan("1f1b", num_stages=2, num_workers=2, num_microbatches=4))
    planned = [str(a) for t in range(6) for a in program.step(1, t)]
    actions = without_waits(did)
    assert "1UPDATE@5#4" in actions
    assert planned[: len(actions)] == actions
    assert str(file_of(tmp_path, 0)) in errors[0]


# ---------------------------------------------------------------------- all that stop in order


def stop(folder: Path) -> str:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    module = Troubled(be_asked_to_stop, culprit=1, bad_batch=BAD_STEP)
    trainer = make_trainer("cyclic_dp", max_epochs=1, default_root_dir=folder)
    with pytest.raises(SIGTERMException) as caught:
        trainer.fit(module, loader(MicroBatches(module.kind, 40)))
    return "".join(traceback.format_exception_only(caught.value))


def test_an_orderly_stop_is_no_failure(tmp_path: Path) -> None:
    for text in processes.run(stop, 2, tmp_path, time_limit_s=50):
        assert "What this rank did last" not in text
    assert list(tmp_path.iterdir()) == []
