"""Parts "share" and "nccl": whether ranks may share the GPU, at what price, with which bits."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.ranks import FailedError, Place, Say, last_line, run
from lightning_cyclic.cli.selftest import presets_of
from lightning_cyclic.runtime.transport.shared_gpus import loaded_nccl

FIRST = ("1f1b", "cyclic_dp", "cyclic_pipeline", "cyclic_zero")
_COUNT = 4  # communicators that are made, so that what one costs is seen
_NUMBERS = 1 << 20
_LATE_S = 0.5
_LEAVES_S = 30.0


def backend(device: str) -> str:
    """Return by what ranks that share a device talk."""
    return "nccl" if device == "cuda" else "gloo"


def share(args: argparse.Namespace, until: float) -> Iterator[str]:
    """Say what a communicator costs, plain and split from another, and whether the host waits."""
    for is_bound in (False, True) if args.device == "cuda" else (False,):
        yield from run(_share, 2, args.device, until, is_bound)


def _share(place: Place, say: Say, is_bound: bool) -> None:
    """Make groups of two ranks; where the first is bound to its GPU, torch splits them from it."""
    device = torch.device("cuda", 0) if place.device == "cuda" else torch.device("cpu")
    tell: Say = say if place.rank == 0 else lambda text: None
    torch.ones(1, device=device)  # the context, which is no communicator
    both = "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo"
    dist.init_process_group(both, device_id=device if is_bound else None)
    if not is_bound:
        tell(f"  the first communicator: {_cost(place, lambda: dist.group.WORLD, 1, device)}")
        found = _cost(place, partial(_group, device), _COUNT, device)
        tell(f"  {_COUNT} more by new_group: {found}")
        _waits(place, say, device)
        return
    _cost(place, lambda: dist.group.WORLD, 1, device)
    for shares in (False, True):
        how = "shared resources" if shares else "resources of their own, as under Lightning"
        try:
            found = _cost(place, partial(_group, device, shares), _COUNT, device)
        except (AttributeError, RuntimeError) as error:  # which an older torch does not offer
            found = last_line(error)
        tell(f"  {_COUNT} split from the first, with {how}: {found}")


def _group(device: torch.device, shares: bool = False) -> Any:
    options: Any = None
    if shares:
        options = dist.ProcessGroupNCCL.Options()
        options.config.split_share = 1
    talks = "nccl" if device.type == "cuda" else "gloo"
    return dist.new_group([0, 1], backend=talks, pg_options=options)


def _cost(place: Place, make: Callable[[], Any], count: int, device: torch.device) -> str:
    """Make groups and use each in both directions; say what one takes, of both ranks together."""
    before = _used(device)
    groups = [make() for _ in range(count)]
    for group in groups:
        for sender in (0, 1):
            _send(place, sender, group, device)
    after = _used(device)
    if before is None or after is None:
        return "memory is not known"
    return f"{(after - before) / count / 2**20:.1f} MiB each"


def _send(place: Place, sender: int, group: Any, device: torch.device) -> None:
    x = torch.full((_NUMBERS,), float(sender), device=device)
    if place.rank == sender:
        dist.send(x, 1 - sender, group=group)
    else:
        dist.recv(x, sender, group=group)
        assert x[0].item() == sender, "what came is not what was sent"


def _used(device: torch.device) -> int | None:
    """Return the bytes of the GPU that all processes have, between two meetings of the hosts."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.all_reduce(torch.zeros(1))  # over gloo
    free, total = torch.cuda.mem_get_info()
    dist.all_reduce(torch.zeros(1))
    return total - free


def _waits(place: Place, say: Say, device: torch.device) -> None:
    """Post a receive half a second before its send; say when the host went on."""
    z = torch.zeros(1 << 22, device=device)
    dist.all_reduce(torch.zeros(1))  # of the hosts
    began_s = time.perf_counter()
    if place.rank == 0:
        time.sleep(_LATE_S)
        dist.send(torch.ones_like(z), 1)
        return
    work = dist.irecv(z, 0)
    posted_s = time.perf_counter() - began_s
    assert work is not None
    work.wait()  # on a GPU of the stream alone
    total = z.sum()
    queued_s = time.perf_counter() - began_s
    assert total.item() == z.numel(), "what was received was read before it had come"
    done_s = time.perf_counter() - began_s
    say(f"  a receive {_LATE_S:g} s before its send: posted after {1e3 * posted_s:.1f} ms, work "
        f"behind it queued after {1e3 * queued_s:.1f} ms, done after {1e3 * done_s:.1f} ms: the "
        f"host {'waits' if queued_s > _LATE_S / 2 else 'goes on'}")  # fmt: skip


# ---------------------------------------------------------------------- bits


def nccl(args: argparse.Namespace, until: float) -> Iterator[str]:
    """Run the self-test over NCCL on ranks that share the GPU, the most telling presets first."""
    presets = dict.fromkeys((*FIRST, *presets_of([]))) if not args.presets else args.presets
    chosen = [word for preset in presets for word in ("--preset", preset)]
    place = ["--accelerator", "gpu", "--backend", "nccl"]
    command = [
        sys.executable, "-m", "lightning_cyclic.cli.main", "selftest", "--devices", "2",
        *(place if args.device == "cuda" else ["--accelerator", "cpu"]), *chosen,
    ]  # fmt: skip
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    lines: Queue[str | None] = Queue()
    Thread(target=_read, args=(child, lines), daemon=True).start()
    bad = 0
    try:
        with suppress(Empty):  # at the limit: what has been tried is said
            while (line := lines.get(timeout=max(0.0, until - time.monotonic()))) is not None:
                bad += any(word in line.split() for word in ("different", "failed"))
                yield f"  {line}"
            child.wait(_LEAVES_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the session that was made for it
        status = child.wait()
    if bad or status > 0:
        raise FailedError(f"{bad} not equal" if bad else f"it ended with status {status}")
    if status < 0:
        yield "  ended at its limit: the presets above are those that were tried"


def _read(child: subprocess.Popen[str], lines: Queue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line.rstrip())
    lines.put(None)


def missing_nccl(device: str) -> str:
    """Return what to set before ranks may share the GPU over NCCL; nothing where they may."""
    return loaded_nccl().missing if device == "cuda" else ""
