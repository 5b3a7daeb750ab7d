"""What all benchmarks share: workers in processes of their own, and figures over rounds."""

from __future__ import annotations

import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def start(name: str, payload: Sequence[Any], num_workers: int, network: Any = None) -> list[Any]:
    """Start a benchmark's `work` once for each worker.

    Args:
        name: of the benchmark; what its worker prints by `result` comes back.
        payload: the arguments of `work`, of which JSON can be made.
        num_workers: how many.
        network: that links them, with up() and down(). [loopback]

    Returns:
        What each worker printed that printed something, in the order of the workers.

    Raises:
        SystemExit: a worker failed.
    """
    address, prefixes = "127.0.0.1", [list[str]() for _ in range(num_workers)]
    children = []
    try:
        if network:
            address, prefixes = network.up()
        port = free_port()
        for rank, prefix in enumerate(prefixes):
            env = environment(rank, num_workers, address, port, "eth0" if network else "lo")
            errors = None if os.environ.get("SHOW_ERRORS") else subprocess.DEVNULL
            command = [*prefix, *command_of(name, payload)]
            children.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
                )
            )
        outputs = [child.communicate(timeout=1200)[0] for child in children]
    finally:
        for child in children:
            child.kill()  # where another did not end in time; else it has ended
        if network:
            network.down()
    if any(child.returncode for child in children):
        raise SystemExit(f"a worker of {name} failed; set SHOW_ERRORS=1 to see why")
    return [found for output in outputs for found in results_in(output)]


def command_of(name: str, payload: Sequence[Any]) -> list[str]:
    """Return the command of a benchmark's worker."""
    return [sys.executable, "-P", "-m", "benchmarks", name, "--worker", json.dumps(payload)]


def environment(
    rank: int, num_workers: int, address: str, port: str, device: str
) -> dict[str, str]:
    """Return the environment of a worker: one of several nodes, for Lightning.

    This checkout comes last in PYTHONPATH, so that one which is named there comes before it.
    """
    paths = filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))
    return os.environ | {
        "NODE_RANK": str(rank),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "WORLD_SIZE": str(num_workers),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": device,
        "PYTHONPATH": os.pathsep.join(paths),
    }


def result(found: Any) -> None:
    """Print what a worker found, for whoever started it."""
    print("RESULT " + json.dumps(found), flush=True)


def results_in(output: str) -> list[Any]:
    """Return what workers printed by `result`."""
    lines = [x for x in output.splitlines() if x.startswith("RESULT ")]
    return [json.loads(x.removeprefix("RESULT ")) for x in lines]


def free_port() -> str:
    """Return a port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def quiet(threads: int = 1) -> None:
    """Let this process print figures alone, and compute on so many threads."""
    import torch

    import lightning_cyclic  # noqa: F401  (makes the presets' names known)

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(threads)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return median (lowest - highest)."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"
