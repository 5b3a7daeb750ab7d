"""What all ranks write a part of: a refusal is everybody's, and says whether it is the disk's."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.written_together import on_all, unwritten
from tests import processes

FULL = OSError(errno.ENOSPC, "No space left on device")
FORBIDDEN = PermissionError(errno.EACCES, "Permission denied")
BROKEN = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ({1: FORBIDDEN, 0: FULL}, "rank 0: No space left on device; rank 1: Permission denied"),
        ({1: BROKEN}, None),
        ({0: FULL, 1: BROKEN}, None),
        ({0: FULL, 1: ZeroDivisionError("division by zero")}, None),
    ],
)
def test_its_cause_is_the_disk_if_it_is_nothing_else(
    errors: dict[int, BaseException], reason: str | None
) -> None:
    error = unwritten(Path("a.ckpt"), errors)
    for rank, each in errors.items():
        assert f"rank {rank}: {each}" in str(error)
    cause = error.__cause__
    assert cause is None if reason is None else cause.strerror == reason  # type: ignore[union-attr]


def write(without_number: bool) -> list[str]:
    rank = processes.here().rank
    error = OSError("a name is too long") if without_number else FORBIDDEN

    def do() -> str:
        if rank == 1:
            raise error
        return f"of rank {rank}"

    dist.init_process_group("gloo", rank=rank, world_size=2)
    assert on_all(lambda: f"of rank {rank}", Path("a.ckpt"), None) == ["of rank 0", "of rank 1"]
    with pytest.raises(ConfigurationError) as caught:
        on_all(do, Path("a.ckpt"), None)
    return [str(caught.value), str(caught.value.__cause__)]


@pytest.mark.multi
@pytest.mark.parametrize(
    ("without_number", "said", "cause"),
    [
        (False, "(rank 1: [Errno 13] Permission denied)", "[Errno 13] rank 1: Permission denied"),
        (True, "(rank 1: [Errno 5] a name is too long)", "None"),
    ],
)
def test_all_ranks_raise_what_one_met(without_number: bool, said: str, cause: str) -> None:
    for text, of in processes.run(write, 2, without_number):
        assert said in text
        assert of == cause
