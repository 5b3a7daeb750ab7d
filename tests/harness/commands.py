"""Run commands two at a time, in fresh interpreters, or in processes that have imported all.

A fresh interpreter imports for some seven seconds. What is forked from the fork server of
:mod:`tests.harness.processes` does at once what ``python FILE`` or ``python -m MODULE`` would do;
what it starts itself by a command is a fresh interpreter again.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness import processes

# they say where a process of another run is
NOT_INHERITED = ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
ENDS_BEHIND_FAILURE_S = 5.0  # the ranks that the first one has started
LATE = -1


@dataclass(frozen=True, kw_only=True)
class Command:
    """Say what is run.

    Args:
        arguments: the program and its arguments.
        is_forked: whether Python is the program, and need not begin anew.
        env: variables besides those of this process.
        folder: where it runs; here by default.
        limit_s: after which it is ended; a test's own limit is to be longer.
    """

    arguments: Sequence[str]
    is_forked: bool = False
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
        self._running: set[Forked | subprocess.Popen[bytes]] = set()
        self._ends: dict[str, Future[tuple[int, str]]] = {
            name: self._pool.submit(self._run, command) for name, command in commands.items()
        }

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self._running):
            os.killpg(process.pid, signal.SIGKILL)
        self._pool.shutdown(cancel_futures=True)

    def end(self, name: str) -> tuple[int, str]:
        """Return the status of a command, and what it wrote; wait for its end."""
        return self._ends[name].result()

    def output(self, name: str) -> str:
        """Return what a command wrote; wait for its end, which must be a good one."""
        status, output = self.end(name)
        assert status == 0, output
        return output

    def _run(self, command: Command) -> tuple[int, str]:
        with tempfile.NamedTemporaryFile("w+") as said:  # no pipe: children may hold it for ever
            process = start(command, said.name)
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
            return status, Path(said.name).read_text()


class Forked:
    """Be what subprocess.Popen is, for a command that is forked.

    Args:
        command: what is run.
        env: all of its variables.
        said: file for what it writes.
    """

    def __init__(self, command: Command, env: dict[str, str], said: str) -> None:
        self._arguments = command.arguments
        context = processes.fork_server()
        args = list(command.arguments[1:]), env, str(command.folder or Path.cwd()), said
        self._process = context.Process(target=_be_python, args=args, daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, limit_s: float | None = None) -> int:
        self._process.join(limit_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(list(self._arguments), limit_s or 0.0)
        return self._process.exitcode


def start(command: Command, said: str) -> Forked | subprocess.Popen[bytes]:
    """Start a command, as a session of its own, that writes into a file."""
    env = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED} | dict(command.env)
    if command.is_forked:
        return Forked(command, env, said)
    with open(said, "ab") as file:
        return subprocess.Popen(
            command.arguments, cwd=command.folder, env=env, start_new_session=True,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _be_python(arguments: list[str], env: dict[str, str], folder: str, said: str) -> None:
    """Do in this process what Python does with these arguments."""
    os.setsid()
    file = os.open(said, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.current_process()._config["daemon"] = False  # it may start others
    status: Any = 0
    try:
        if arguments[0] == "-m":
            sys.path.insert(0, folder)
            sys.argv = arguments[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        status = 1
    # with all that an interpreter tears down; what is forked leaves by os._exit else
    ctypes.pythonapi.Py_Exit(status)


def until(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    """Return what a condition is, once it is true; ask it again and again.

    Raises:
        AssertionError: it was not within the limit, in seconds.
    """
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {limit_s:g} s"
        time.sleep(0.05)
    return found


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
