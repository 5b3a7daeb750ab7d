"""The self-test by its real command, on the CPU; and what it says of what went wrong."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lightning_cyclic.cli import selftest
from lightning_cyclic.cli.main import main
from lightning_cyclic.cli.trial import Came, Ended, Trial, digests
from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import PRESETS
from lightning_cyclic.runtime.transport import shared_gpus
from lightning_cyclic.runtime.transport.shared_gpus import Nccl

COMMAND = [sys.executable, "-m", "lightning_cyclic.cli.main", "selftest", "--accelerator", "cpu"]


class Done(NamedTuple):
    status: int
    lines: list[str]
    left: list[str]  # processes of the command that have not ended


def run(*arguments: str) -> Done:
    """Run the command as a session of its own."""
    command = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    output, _ = command.communicate(timeout=110)
    until = time.monotonic() + 5  # the fork server ends when it sees that the command has
    while (left := list(of_session(command.pid))) and time.monotonic() < until:
        time.sleep(0.05)
    return Done(command.returncode, output.splitlines(), left)


def of_session(number: int) -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(stat[3]) == number and stat[0] != "Z":
                yield (folder / "cmdline").read_text()
        except OSError:
            continue


TWO = ["--preset", "1f1b", "--preset", "cyclic_dp", "--transport", "edges"]
LATE = ["--preset", "gpipe", "--limit-s", "0.01"]


def assert_all_equal(lines: list[str]) -> None:
    assert lines[0] == "2 workers on the CPU"
    assert lines[-1] == "all equal"
    rows = [line.split()[:-1] for line in lines[2:-1]]
    assert rows == [
        ["1f1b", "1", "none", "8", "Lightning", "equal"],
        ["1f1b", "2", "by", "channel", "8", "one", "process", "equal"],
        ["cyclic_dp", "2", "by", "channel", "8", "one", "process", "equal"],
    ]


def assert_late(lines: list[str]) -> None:
    assert lines[-1].startswith("2 not equal; what the workers wrote lies in ")
    assert lines[3] == "    did not end within 0.01 s"


@pytest.mark.multi
@pytest.mark.parametrize(
    ("arguments", "status", "look"), [(TWO, 0, assert_all_equal), (LATE, 1, assert_late)]
)
def test_two_presets_and_a_limit_that_nobody_meets(
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    look: Callable[[list[str]], None],
) -> None:
    assert main(["selftest", "--accelerator", "cpu", *arguments]) == status
    look(capsys.readouterr().out.splitlines())
    assert not multiprocessing.active_children()


@pytest.mark.multi
@pytest.mark.exhaustive
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes there")
def test_the_command_leaves_no_process() -> None:
    with ThreadPoolExecutor(2) as pool:
        trials, late = (pool.submit(run, *arguments) for arguments in (TWO, LATE))
    assert_all_equal(trials.result().lines)
    assert_late(late.result().lines)
    assert [x.result()[::2] for x in (trials, late)] == [(0, []), (1, [])]


def test_a_word_on_each_outcome() -> None:
    right = Ended([Came({"a": "1", "b": "2"}, "", 8)], "", 1.0)
    wrong = Came({"a": "1", "b": "3"}, "named", 8)
    assert selftest._verdict(right, right) == ("equal", "")
    assert selftest._verdict(Ended([right.came[0], wrong], "", 1.0), right) == (
        "different",
        "on rank 1: 1 of 2 tensors, the first is b",
    )
    failed = Ended([], "StepError: no", 1.0)
    assert selftest._verdict(failed, right) == ("failed", "StepError: no")
    assert selftest._verdict(right, failed) == (
        "failed",
        "what it is compared with: StepError: no",
    )


def test_a_digest_sees_every_bit() -> None:
    x = torch.tensor([0.0, 1.0])
    assert digests({"x": x}) == digests({"x": x.clone()})
    assert digests({"x": x}) != digests({"x": -x * -1 + torch.tensor([-0.0, 1e-7])})
    assert len(set(digests({"x": x, "y": x.double(), "z": x + 1}).values())) == 3


OLD, NEW = Nccl((2, 28, 9), "1"), Nccl((2, 30, 0), "1")


@pytest.mark.parametrize(
    ("num_gpus", "asked", "backend", "nccl", "expected"),
    [
        (0, None, None, OLD, ("cpu", (), 2, None)), (0, 4, "gloo", OLD, ("cpu", (), 4, None)),
        (1, None, None, OLD, ("gpu", (0, 0), 2, "gloo")),
        (1, None, None, NEW, ("gpu", (0, 0), 2, "nccl")),
        (1, 4, "gloo", NEW, ("gpu", (0, 0, 0, 0), 4, "gloo")),
        (2, None, None, OLD, ("gpu", (0, 1), 2, None)),
        (4, None, "gloo", OLD, ("gpu", (0, 1, 2, 3), 4, "gloo")),
        (4, 2, None, OLD, ("gpu", (0, 1), 2, None)),
        (2, 3, "nccl", NEW, ("gpu", (0, 1, 0), 3, "nccl")),
    ],
)  # fmt: skip
def test_where_it_runs(
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    asked: int | None,
    backend: str | None,
    nccl: Nccl,
    expected: object,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(shared_gpus, "loaded_nccl", lambda: nccl)
    place = selftest._place("auto", asked, backend)
    assert place[:4] == expected
    assert bool(place.hint) == (nccl is OLD and backend is None and num_gpus == 1)
    assert selftest._place("cpu", asked).devices == ()


def test_where_nccl_lets_no_workers_share_a_gpu_it_says_what_to_set() -> None:
    assert selftest._sharing(None, OLD) == (
        "gloo",
        "; they share a GPU, which NCCL 2.28.9 refuses: to try NCCL load NCCL 2.30 or later in "
        "front of it (LD_PRELOAD=/path/to/libnccl.so.2)",
    )
    _, hint = selftest._sharing(None, NEW._replace(setting=""))
    assert hint.endswith(": to try NCCL export NCCL_MULTI_RANK_GPU_ENABLE=1")
    text = "share a GPU, which NCCL 2.28.9 refuses; allowed: .*; load NCCL 2.30 .* --backend gloo"
    with pytest.raises(PlanError, match=text):
        selftest._sharing("nccl", OLD)


def test_all_presets_that_run_are_tried_and_some_alone() -> None:
    presets = selftest.presets_of([])
    assert PRESETS.keys() - set(presets) == {"diloco", "streaming_diloco"}  # each has its own
    place = selftest._place("cpu", 2)
    pairs = list(selftest._trials(presets, place, "auto"))
    assert [given.preset for given, _ in pairs if given.num_workers == 2] == presets
    alone = {given.preset for given, expected in pairs if not expected.preset}
    flushed = {"gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"}
    assert alone == flushed | {"lockstep_dp"}
    # what is compared is of one module
    assert all(given.num_stages == expected.num_stages for given, expected in pairs)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--preset dualpipe", "--preset 'dualpipe' is unknown; allowed: cyclic_dp,"),
        ("--devices 1", "--devices 1 leaves nothing to compare; allowed: 2 or more"),
        ("--backend nccl", "--backend nccl was given without a GPU; allowed: gloo on the CPU"),
        ("--accelerator gpu", "torch sees no GPU; allowed: auto or cpu here"),
        ("--accelerator tpu", "invalid choice: 'tpu'"),
    ],
)
def test_what_cannot_be_tried_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    text: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["selftest", *arguments.split()]) == 2
    assert text in capsys.readouterr().err


def test_the_exit_status_is_that_of_the_trials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(arguments: Namespace) -> tuple[str, int]:
        return "3 not equal", 1

    monkeypatch.setattr(selftest, "_run", wrong)
    assert main(["selftest"]) == 1
    assert capsys.readouterr().out == "3 not equal\n"


def test_the_numbers_of_a_trial() -> None:
    def numbers(preset: str, size: int, *, is_cut: bool) -> tuple[int, int]:
        trial = Trial(preset=preset, num_workers=size, size=size, is_cut=is_cut)
        return trial.num_stages, trial.num_microbatches

    assert numbers("cyclic_dp", 3, is_cut=False) == (3, 3)
    assert numbers("1f1b", 2, is_cut=True) == (2, 4)
    assert numbers("pipedream", 2, is_cut=True) == (2, 1)
    assert numbers("cyclic_mp", 6, is_cut=True) == (3, 6)


def test_all_presets_that_allow_it_share_a_weight() -> None:
    def has_tie(preset: str) -> bool:
        return Trial(preset=preset, num_workers=1, size=2, is_cut=True).has_tie

    refuse = {preset for preset in PRESETS if not has_tie(preset)}
    assert refuse == {"cyclic_mp", "pipeoptim", "spectrain"}
    assert has_tie("")  # as Lightning alone is compared with those that have one
