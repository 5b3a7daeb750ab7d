"""The weight service: who asks gets another rank's weights, or an error with names."""

from __future__ import annotations

import re
import socket
import time
from multiprocessing.connection import Connection
from multiprocessing.util import _exit_function

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cyclic.errors import PeerError, StepError, WaitTimeoutError
from lightning_cyclic.runtime.transport.limit import Limit
from lightning_cyclic.runtime.weight_service import Stamp, WeightService
from tests import processes
from tests.runtime.transport.rings import join

pytestmark = pytest.mark.multi


class Owner:
    """Have weights that are those of a stamp."""

    def __init__(self, limit_s: float = 20) -> None:
        self.rank, _ = join()
        self.stamp: Stamp | None = (0, 0)
        self.service = WeightService("test", lambda: self.stamp, self.give, Limit(limit_s))

    def give(self, names: list[str]) -> list[Tensor]:
        made = [torch.full((2, 3), 10.0 * self.rank + int(n)).t() for n in names]  # not contiguous
        return [*made, torch.tensor(self.rank), torch.ones(0), torch.ones(2, dtype=torch.bfloat16)]

    def ask(self, rank: int, stamp: Stamp, names: list[str]) -> list[Tensor]:
        dtypes = [torch.int64, torch.float32, torch.bfloat16]
        sizes = [(), (0,), (2,)]
        into = [torch.zeros(3, 2) for _ in names]
        into += [torch.zeros(size, dtype=d) for size, d in zip(sizes, dtypes, strict=True)]
        self.service.ask(rank, stamp, names, into)
        return into

    def refused(self, kind: type[Exception], rank: int, stamp: Stamp) -> str:
        with pytest.raises(kind) as caught:
            self.ask(rank, stamp, ["0"])
        return str(caught.value)

    def end(self) -> None:
        dist.barrier()
        self.service.close()
        dist.destroy_process_group()


def ask_each_other() -> list[list[float]]:
    owner = Owner()
    got = [owner.ask(rank, (0, 0), ["0", str(rank)]) for rank in range(3) if rank != owner.rank]
    owner.end()
    return [[float(x.sum()) for x in tensors] for tensors in got]


def test_all_may_ask_each_other_at_once() -> None:
    def of(rank: int) -> list[float]:
        return [60.0 * rank, 60.0 * rank + 6 * rank, rank, 0, 2]

    ranks = processes.run(ask_each_other, 3)
    assert ranks == [[of(r) for r in range(3) if r != rank] for rank in range(3)]


def ask_early() -> list[float]:
    """Rank 1 reads weights of the second step; rank 0 has not come to it, nor has rank 2."""
    owner = Owner()
    owner.stamp = None if owner.rank == 0 else (0, 0)
    got: list[float] = []
    if owner.rank == 1:
        owner.stamp = (1, 1)
        got = [float(owner.ask(0, (1, 1), ["0"])[1])]
    elif owner.rank == 2:
        got = [float(owner.ask(1, (1, 1), ["0"])[1])]  # meanwhile rank 1 waits itself
        owner.stamp = (1, 1)
    else:
        owner.ask(2, (1, 1), ["0"])
        owner.stamp = (1, 1)
    owner.end()
    return got


def test_an_owner_answers_when_it_has_come_so_far() -> None:
    assert processes.run(ask_early, 3) == [[], [0.0], [1.0]]


def ask_late() -> str:
    owner = Owner()
    owner.stamp, text = (4, 2), ""
    dist.barrier()
    if owner.rank == 1:
        text = owner.refused(StepError, 0, (0, 0))
    owner.end()
    return text


def test_weights_that_are_gone_are_refused() -> None:
    here = socket.gethostname()
    (_, text) = processes.run(ask_late, 2)
    assert re.match(
        f"rank 1 reads weights of step 0, but rank 0 on {here} has updated its stages up to "
        "step 2; allowed: between steps",
        text,
    )


def ask_in_vain() -> tuple[str, float]:
    owner = Owner(limit_s=1)
    began, text = time.monotonic(), ""
    if owner.rank == 1:
        text = owner.refused(WaitTimeoutError, 0, (9, 9))
    took = time.monotonic() - began
    owner.end()
    return text, took


def test_a_wait_in_vain_has_a_limit_and_says_for_whom() -> None:
    here = socket.gethostname()
    text, took = processes.run(ask_in_vain, 2)[1]
    assert text == (
        f"rank 1 on {here} waited for weights (0) from rank 0 on {here}; the limit "
        "is 1 s: they did not come in time\nLook at the log of rank 0."
    )
    assert took < 10


def ask_who_is_gone() -> str:
    owner = Owner()
    if owner.rank == 0:
        owner.service.close()
    dist.barrier()
    text = owner.refused(PeerError, 0, (0, 0)) if owner.rank == 1 else ""
    owner.end()
    return text


def test_whoever_is_gone_is_named() -> None:
    text = processes.run(ask_who_is_gone, 2)[1]
    assert re.search(r"waited for weights \(0\) from rank 0 on .*: the connection is gone", text)


def end_while_others_ask() -> list[float]:
    owner = Owner()
    owner.service.stay()
    dist.barrier()
    got: list[float] = []
    if owner.rank == 1:
        time.sleep(0.5)
        got = [float(x.sum()) for x in owner.ask(0, (0, 0), ["1"])]
    _exit_function()  # as Python does where a process ends
    if owner.rank == 0:
        got = [float(owner.service._store.add("test/ends", 0))]
    return got


def test_a_process_that_ends_waits_for_those_that_ask() -> None:
    assert processes.run(end_while_others_ask, 2) == [[2], [6, 0, 0, 2]]


def ask_as_a_stranger() -> tuple[bool, list[float]]:
    owner = Owner()
    host, port, _ = owner.service._addresses[0]
    got, was_told = [0.0], False
    if owner.rank == 1:
        for said in (b'["guess", 1, [0, 0], [0]]', b"not JSON", b"[]", b"[1, 2, 3, 4]"):
            with Connection(socket.create_connection((host, port)).detach()) as line:
                line.send_bytes(said)
                with pytest.raises((EOFError, ConnectionError)):
                    was_told = bool(line.recv_bytes()) or True
        got = [float(x.sum()) for x in owner.ask(0, (0, 0), ["0"])]  # it still listens
    owner.end()
    return was_told, got


def test_strangers_are_told_nothing() -> None:
    assert processes.run(ask_as_a_stranger, 2)[1] == (False, [0.0, 0, 0, 2])
