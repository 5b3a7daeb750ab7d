"""Who has ended: processes of this host by the kernel's word, those of others by the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_cyclic.runtime.transport import processes as lives
from lightning_cyclic.runtime.transport.processes import Processes, has_ended, own

SAY_AND_SLEEP = "from lightning_cyclic.runtime.transport import processes as p; import time; "
SAY_AND_SLEEP += "print(p.own(), flush=True); time.sleep(60)"


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SAY_AND_SLEEP], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    known_by = process.stdout.readline().strip()
    yield process, known_by
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_process_lives_until_it_is_killed_though_nobody_has_asked_how_it_ended(
    child: tuple[subprocess.Popen[str], str],
) -> None:
    process, known_by = child
    assert known_by.rsplit("/", 2)[1] == str(process.pid)
    assert not has_ended(known_by)
    process.send_signal(signal.SIGSTOP)
    assert not has_ended(known_by)
    process.kill()
    end = time.monotonic() + 20
    while not has_ended(known_by):  # a zombie, as its parent does not wait for it
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(process.pid, 0)  # its number is not free yet
    process.wait()
    assert has_ended(known_by)


def test_a_number_that_is_given_again_is_of_another_process() -> None:
    kernel, pid, began = own().rsplit("/", 2)
    assert not has_ended(f"{kernel}/{pid}/{began}")
    assert has_ended(f"{kernel}/{pid}/{int(began) - 1}")


def test_what_this_kernel_does_not_know_is_not_judged() -> None:
    store, gone = dist.HashStore(), f"{own().rsplit('/', 2)[0]}/{2**22 + 1}/7"
    assert has_ended(gone)
    elsewhere = "another boot pid:[1] time:[1]/1/7"
    known = Processes(store, [own(), elsewhere, "", gone])
    assert known.ended() == [3]
    assert known.live() == [0]
    known.tell()  # whoever is elsewhere reads it
    assert store.check([f"lightning_cyclic/ended/{gone}"])
    store.set(f"lightning_cyclic/ended/{elsewhere}", "")  # told by its own host
    assert known.ended() == [1, 3]


def test_where_the_kernel_is_not_asked_nobody_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "_kernel", lambda: "")
    assert own() == ""
    known = Processes(dist.HashStore(), ["", ""])
    assert known.ended() == known.live() == []
