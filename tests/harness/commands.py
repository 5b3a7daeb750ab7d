"""Run commands in fresh interpreters, two at a time: nearly all of their time is imports."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# they say where a process of another run is
NOT_INHERITED = ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
ENDS_BEHIND_FAILURE_S = 5.0  # the ranks that the first one has started
LATE = -1


@dataclass(frozen=True, kw_only=True)
class Command:
    """Say what is run.

    Args:
        arguments: the program and its arguments.
        env: variables besides those of this process.
        folder: where it runs; here by default.
        limit_s: after which it is ended; a test's own limit is to be longer.
    """

    arguments: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    limit_s: float = 100.0


class Commands:
    """Run commands from now on, each once; end with no process of them left.

    Args:
        commands: name -> command; those that come first run first.
    """

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ends: dict[str, Future[tuple[int, str]]] = {
            name: self._pool.submit(self._run, command) for name, command in commands.items()
        }

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self._running):
            os.killpg(process.pid, signal.SIGKILL)
        self._pool.shutdown(cancel_futures=True)

    def output(self, name: str) -> str:
        """Return what a command wrote; wait for its end, which must be a good one."""
        status, output = self._ends[name].result()
        assert status == 0, output
        return output

    def _run(self, command: Command) -> tuple[int, str]:
        env = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED} | dict(command.env)
        with tempfile.TemporaryFile("w+") as said:  # no pipe: children may hold it for ever
            process = subprocess.Popen(
                command.arguments, cwd=command.folder, env=env, start_new_session=True,
                stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self._running.add(process)
            until = time.monotonic() + command.limit_s
            try:
                status = process.wait(command.limit_s)
                if status:
                    until = min(until, time.monotonic() + ENDS_BEHIND_FAILURE_S)
                while _is_left(process.pid) and time.monotonic() < until:
                    time.sleep(0.05)
            except subprocess.TimeoutExpired:
                status = LATE
            finally:
                if _is_left(process.pid):
                    status = status or LATE
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._running.discard(process)
            said.seek(0)
            return status, said.read()


def _is_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def asked_for(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """Return the values of a parameter that the selected tests of this module have."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(p[parameter] for p in parameters if parameter in p))
