"""Run a function on N gloo ranks of this machine, as Lightning would on N nodes of one device.

One fork server per pytest run has imported everything heavy, so that four ranks start in a
fraction of a second. Each rank has one torch thread, its own process, and an environment from
which Lightning reads its place: ``Trainer(strategy=..., devices=1, num_nodes=N)``.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.distributed import TCPStore

HUGGING_FACE = ["bert", "gpt2", "llama", "mamba", "mixtral", "t5", "vit", "whisper"]
PRELOAD = [  # modules that no rank need import for itself
    "pytest",
    "torch",
    "torch.distributed",
    "torchmetrics",
    "lightning.pytorch",
    "lightning_cyclic.cyclic_strategy",
    "lightning_cyclic.pipeline_strategy",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",  # what a Trainer imports late
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "fsspec.implementations.chained",  # and when it writes its first checkpoint
    "omegaconf",
    "encodings.idna",  # a connection, when it looks up its host
    *(f"transformers.models.{name}.modeling_{name}" for name in HUGGING_FACE),
    "tests.harness.pipelines",
    "tests.harness.preload",  # the last
]

# what Lightning and torch say about runs as small as these, and we of files of other plans
EXPECTED_WARNINGS = [
    r"The '\w+' does not have many workers",
    r"Consider setting `persistent_workers=True`",
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    r"The `srun` command is available",
    r"GPU available but not used",
    r"You defined a `\w+` but have no `\w+`",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"Starting from v1.9.0, `tensorboardX` has been removed",
    r"Checkpoint directory .* exists and is not empty",
    r"The dirpath has changed from",
    r"It is recommended to use `self.log\(.*sync_dist=True\)`",
    r"Trying to infer the `batch_size`",
    r"The total number of parameters detected may be inaccurate",
    r"Found \d+ module\(s\) in eval mode",
    r"You are trying to `self.log\(\)` but the `self.trainer` reference",
    r"Using `DistributedSampler` with the dataloaders",
    r"This process \(pid=\d+\) is multi-threaded",
    r"You're resuming from a checkpoint that ended before the epoch ended",
    r"Be aware that when using `ckpt_path`, callbacks used",
    r"You requested to overfit but enabled \w+ dataloader shuffling",
    r"barrier\(\): using the device under current context",
    r"`is_gradient_checkpointing` is deprecated",
    r"Couldn't infer the batch indices fetched from your dataloader",
    r"`training_step` returned `None`",
    r"`.fit\(ckpt_path=None\)` was called without a model",  # with OnExceptionCheckpoint
    r".fit\(ckpt_path=\"last\"\) is set",
    r"(You are using the|Found) `dataloader_iter`",
    r"The checkpoint was written behind batch \d+ of an epoch, and by \d+ ranks with loaders",
    r"'set_vital' is deprecated",  # which torchdata calls
    r"`torch.jit.script` is deprecated",  # which torch_geometric calls
    r"The \.grad attribute of a Tensor that is not a leaf",  # torch.compile, of its inputs
]


@dataclass(frozen=True)
class Place:
    """Say which rank of how many this process is; Lightning deletes its variables at the end."""

    rank: int
    num_ranks: int


WORDLESS = "died without a word"

_place: list[Place] = []


def here() -> Place:
    """Return the place of this process."""
    return _place[0]


class RanksFailedError(AssertionError):
    """Say which ranks failed, with their tracebacks, or did not end in time.

    Args:
        errors: rank -> traceback, or what became of it.
    """

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"--- rank {r}: {text}" for r, text in errors.items()))


def run(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    time_limit_s: float = 60.0,
    after_failure_s: float = 5.0,
    frozen: Collection[int] = (),
) -> list[Any]:
    """Return what ``function(*args)`` returned on each rank.

    Args:
        function: defined at the top of a module, so that it pickles.
        num_ranks: how many processes run it.
        *args: pickled for each rank.
        time_limit_s: when it has passed, all are killed, in seconds.
        after_failure_s: when one has failed, the others have this long to end, in seconds.
        frozen: ranks that will never end: they are not waited for when all others have ended.

    Raises:
        RanksFailedError: some rank raised, died, or did not end in time.
    """
    port, processes, ends = free_port(), [], []
    stacks = [tempfile.NamedTemporaryFile("r") for _ in range(num_ranks)]  # noqa: SIM115
    try:
        for rank in range(num_ranks):
            end, child_end = fork_server().Pipe(duplex=False)
            process = fork_server().Process(
                target=_child,
                args=(child_end, Place(rank, num_ranks), port, stacks[rank].name, function, args),
                daemon=True,
            )
            process.start()
            child_end.close()
            processes.append(process)
            ends.append(end)
        outcomes = _collect(ends, frozen, time_limit_s, after_failure_s)
        for r in set(range(num_ranks)) - set(outcomes):
            if r not in frozen:
                _send(processes[r], signal.SIGUSR1)  # which makes it write where it is
                time.sleep(0.5)
            outcomes[r] = (False, f"did not end in time; it is at\n{stacks[r].read()}")
            _send(processes[r], signal.SIGKILL)
    finally:
        _stop(processes)
        for file in stacks:
            file.close()
        for end in ends:
            end.close()
    errors = {r: str(value) for r, (good, value) in sorted(outcomes.items()) if not good}
    if errors:
        raise RanksFailedError(errors)
    return [torch.load(io.BytesIO(outcomes[r][1]), weights_only=False) for r in range(num_ranks)]


@cache
def fork_server() -> multiprocessing.context.ForkServerContext:
    """Return the context of the server that has imported what is heavy."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _collect(
    ends: Sequence[Connection],
    frozen: Collection[int],
    time_limit_s: float,
    after_failure_s: float,
) -> dict[int, tuple[bool, Any]]:
    """Return rank -> (whether it went well, result as bytes or what went wrong), if it ended."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    until = time.monotonic() + time_limit_s
    while set(range(len(ends))) - set(outcomes) - set(frozen):
        open_ends = [end for r, end in enumerate(ends) if r not in outcomes]
        ready = wait(open_ends, max(0.0, until - time.monotonic()))
        if not ready:
            break
        for end in ready:
            outcome = _received(end)
            outcomes[ends.index(end)] = outcome
            if not outcome[0]:
                until = min(until, time.monotonic() + after_failure_s)
    return outcomes


def _received(end: Any) -> tuple[bool, Any]:
    try:
        return end.recv()
    except EOFError:
        return False, WORDLESS


def _stop(processes: Sequence[Any]) -> None:
    until = time.monotonic() + 1.0
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            _send(process, signal.SIGKILL)
            process.join()
        process.close()


def _send(process: Any, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended since it was looked at
        os.kill(process.pid, number)


def free_port() -> int:
    """Choose what nobody else takes before rank 0 listens: neither connections nor other tests."""
    first_of_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    mine = range(10_000 + worker, max(first_of_system, 16_000), num_workers)
    while True:
        port = random.SystemRandom().choice(mine)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _listen(port: int, num_ranks: int) -> None:
    """Listen until rank 0's process group does, or ranks that come first wait a second in vain."""
    limit = timedelta(seconds=60)
    store = TCPStore(  # whose server is that of all stores of this process and port
        "127.0.0.1", port, num_ranks, is_master=True, timeout=limit, wait_for_workers=False,
        multi_tenant=True,
    )  # fmt: skip
    while not torch.distributed.is_initialized():
        time.sleep(0.02)
    del store


def _child(
    end: Connection, place: Place, port: int, stack: str, function: Callable[..., Any], args: Any
) -> None:
    faulthandler.register(signal.SIGUSR1, open(stack, "w"))  # noqa: SIM115  (open to the end)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(place.num_ranks),
        NODE_RANK=str(place.rank),
        LOCAL_RANK="0",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",  # else Lightning's launchers set a number of threads of their own
    )
    _place.append(place)
    multiprocessing.current_process()._config["daemon"] = False  # its loaders may have workers
    torch.set_num_threads(1)
    torch.manual_seed(1234 + place.rank)  # all ranks inherit one state
    random.seed(1234 + place.rank)  # which is in checkpoints, and another one in each process
    if place.rank == 0 and place.num_ranks > 1:
        Thread(target=_listen, args=(port, place.num_ranks), daemon=True).start()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("error")
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    try:
        buffer = io.BytesIO()
        torch.save(function(*args), buffer)
        end.send((True, buffer.getvalue()))
    except BaseException:  # handed to the test
        end.send((False, traceback.format_exc()))
    finally:
        end.close()
    # no clean-up of process groups: peers may be gone, and nothing is needed any more
    os._exit(0)
