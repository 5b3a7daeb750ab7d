"""The session of one GPU on the CPU: parts that run, fail, or do not fit; processes that end."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpu import session, shared, steps
from benchmarks.gpu.fits import case_of, flops_per_token
from benchmarks.gpu.ranks import FailedError, Place, Say, run
from benchmarks.gpu.traces import Step, differences
from lightning_cyclic.runtime.transport.shared_gpus import Nccl
from tests.harness.rows import more

SMOKE = ["gpu", "--smoke", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _variables_of_the_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # so that they are put back


@pytest.mark.multi
@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("one", "cyclic_dp"), ("pipelines", "loop zb_h1"),
        ("memory", "rank 1, 1f1b, activation_checkpointing='always'"),
        more("share", "4 more by new_group: memory is not known"),
        more("trace", "rank 0, over gloo"), more("nccl", "all equal"),
        more("data_parallel", "cyclic_zero"),
    ],
)  # fmt: skip
def test_a_part_runs(
    part: str, says: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMOKE, "--only", part, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert says in out
    assert "1 ran, 0 failed, 0 left out" in out
    assert len(list(tmp_path.iterdir())) == 2 * (part == "trace")


def fails(*_: Any) -> Iterator[str]:
    yield "  as far as it came"
    raise RuntimeError("first line\nlast line")


def says(*_: Any) -> Iterator[str]:
    yield "  this one runs"


def test_a_part_that_fails_is_said_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared, "share", fails)
    monkeypatch.setattr(steps, "one", says)
    assert main([*SMOKE, "--only", "one,share"]) == 1
    out = capsys.readouterr().out
    assert out.index("as far as it came") < out.index("FAILED: RuntimeError: last line")
    assert out.index("FAILED") < out.index("this one runs")
    assert "1 ran, 1 failed, 0 left out" in out


def test_a_part_that_would_not_fit_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMOKE, "--only", "share", "--minutes", "0.1"]) == 0
    assert "left out: no time" in capsys.readouterr().out


def test_what_needs_ranks_that_share_a_gpu_is_left_out_where_they_may_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session, "loaded_nccl", lambda: Nccl((2, 30, 0), ""))
    monkeypatch.setattr(shared, "share", fails)
    monkeypatch.setattr(steps, "one", says)
    assert main(["gpu", "--only", "share,one"]) == 0
    out = capsys.readouterr().out
    assert "left out: ranks may not share the GPU: export NCCL_MULTI_RANK_GPU_ENABLE=1" in out
    assert "1 ran, 0 failed, 1 left out" in out


def test_a_part_that_there_is_not_is_refused() -> None:
    with pytest.raises(SystemExit, match="--only 'two' is unknown; allowed: share, nccl, one"):
        main([*SMOKE, "--only", "one,two"])


def test_parts_have_all_of_the_time_together() -> None:
    names = ["trace", "share"]
    assert session.chosen("trace,share") == names[::-1]
    assert session.share_of("trace", ["trace"]) == 1
    for some in (list(session.PARTS), names):
        assert sum(session.share_of(name, some) for name in some) == pytest.approx(1)


# ---------------------------------------------------------------------- processes


def ends(place: Place, say: Say, how: str) -> None:
    say(f"rank {place.rank} of {place.num_ranks}")
    if place.rank == 1:
        {
            "well": lambda: None,
            "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "raises": lambda: 1 // 0,
            "hangs": lambda: time.sleep(60),
        }[how]()


@pytest.mark.multi
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("dies", "rank 1: died without a word"), ("raises", "rank 1: ZeroDivisionError: "),
        ("hangs", "rank 1 did not end in time"),
    ],
)  # fmt: skip
def test_processes_end_whatever_becomes_of_them(how: str, text: str) -> None:
    until = time.monotonic() - 15  # and the seconds for what was begun in time
    lines = run(ends, 2, "cpu", until, how)
    with pytest.raises(FailedError, match=f"^{text}"):
        list(lines)
    assert time.monotonic() < until + 25


@pytest.mark.multi
def test_what_all_processes_say_comes_back() -> None:
    lines = run(ends, 2, "cpu", time.monotonic() + 30, "well")
    assert sorted(lines) == ["rank 0 of 2", "rank 1 of 2"]


# ---------------------------------------------------------------------- figures


def test_what_differs_most_comes_first() -> None:
    before = Step(Counter(a=3000, b=10), Counter(mm=5000), 0)
    after = Step(Counter(a=1000, c=500), Counter(mm=5100), 3)
    first, second, _, *rows = differences(before, after)
    assert first.split()[:3] == ["accumulate:", "5.0", "ms"]
    assert second.endswith("3 times in a step")
    assert [row.split() for row in rows[:3]] == [
        ["-2.00", "host", "3.00", "1.00", "a"],
        ["+0.50", "host", "0.00", "0.50", "c"],
        ["+0.10", "GPU", "5.00", "5.10", "mm"],
    ]


def test_operations_of_a_token_are_those_of_its_matrices_and_of_attention() -> None:
    numbers = {"layers": 3, "width": 32, "heads": 2, "length": 8, "vocabulary": 50}
    sizes = {"micro": 4, "rows": [2], "steps": 1, "rounds": 1, "device": "cpu"}
    case = case_of(session.argparse.Namespace(**numbers, **sizes))
    matrices = 3 * 12 * 32 * 32 + 32 * 50
    attention = 3 * 2 * 8 * 32
    assert flops_per_token(case) == 6 * (matrices + attention)
