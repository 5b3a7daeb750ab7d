"""Workers of loaders leave signals to the rank that they load for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_cyclic.runtime.launchers import shelter

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})


class Pids(Dataset[Tensor]):
    """Gives the number of the process that reads it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, k: int) -> Tensor:
        return torch.tensor([k, os.getpid()])


def begin(worker: int) -> None:
    torch.manual_seed(worker)


def loader(context: str, **given: Any) -> DataLoader[Any]:
    return DataLoader(
        Pids(), batch_size=1, num_workers=1, prefetch_factor=1, multiprocessing_context=context,
        **given,
    )  # fmt: skip


@pytest.mark.multi
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_go_on_behind_signals(context: str) -> None:
    made = loader(context)
    shelter(made, SIGNALS)
    found = []
    for k, pid in (row[0].tolist() for row in made):
        found.append(k)
        if k < len(SIGNALS):
            os.kill(pid, sorted(SIGNALS)[k])
    assert found == list(range(12))


FAILS = """
import signal
from torch.utils.data import DataLoader
from lightning_cyclic.runtime.launchers import shelter
made = DataLoader(range(8), num_workers=2)
shelter(made, frozenset({signal.SIGTERM}))
rows = iter(made)
next(rows)
raise ZeroDivisionError("the batch is broken")
"""


@pytest.mark.multi
def test_a_rank_ends_that_fails_while_its_loader_has_workers() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FAILS], capture_output=True, text=True, check=False, timeout=50
    )
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("ZeroDivisionError: the batch is broken")


def test_a_loader_has_what_it_had_again() -> None:
    for own in (None, begin):
        made = loader("fork", worker_init_fn=own)
        ends = [shelter(made, SIGNALS) for _ in range(2)]  # of two fits, or of two uses in one
        for end in reversed(ends):
            assert made.worker_init_fn is not own
            end()
        assert made.worker_init_fn is own


@pytest.mark.multi
def test_a_worker_that_is_asked_twice_ends() -> None:
    made = loader("fork")
    shelter(made, SIGNALS)
    rows = iter(made)
    pid = next(rows)[0, 1].item()
    os.kill(pid, signal.SIGTERM)
    for _ in range(4):  # more than wait already: the worker has seen the signal behind them
        next(rows)
    time.sleep(0.5)  # until it waits for the next row: then it holds no lock that others want
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid.* {pid}\)"):
        # the loader says so from a handler of SIGCHLD; who reads rows until then may be told by
        # a closed pipe first
        time.sleep(10)


def tell(worker: int) -> None:
    os.environ["TESTS_BEGUN"] = f"{os.environ.get('TESTS_BEGUN', '')}{worker}"


class Begun(Pids):
    def __getitem__(self, k: int) -> Tensor:
        return torch.tensor(os.environ["TESTS_BEGUN"] == "0")


@pytest.mark.multi
def test_what_a_user_begins_workers_with_is_kept() -> None:
    made = DataLoader(Begun(), num_workers=1, worker_init_fn=tell)
    for _ in range(2):  # a loader of two fits
        shelter(made, SIGNALS)
    assert all(map(bool, made))


def test_loaders_without_workers_are_left_alone() -> None:
    made: DataLoader[Any] = DataLoader(Pids())
    shelter(made, SIGNALS)
    assert made.worker_init_fn is None
    shelter([1, 2], SIGNALS)
