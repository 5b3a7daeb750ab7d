"""Jobs under torchrun, with restarts, to which things happen at random.

    python -m tests.scripts.faults --faults 200 --seed 0   a line for each fault, a table
    python -m tests.scripts.faults --faults 40 --hosts     four hosts, links are cut, too (root)

A job trains tests/scripts/faulted.py on four ranks. At steps drawn from a seed something happens
to a rank, drawn, too; whoever started the job starts it again where it ends too early. In the end
every file of a step, and the last weights, must be those of a job to which nothing happened;
nothing may be left running; and the log must say what was wrong with whom.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from benchmarks.data_parallel.hosts import Hosts
from lightning_cyclic.plugin.checkpoint_file import check_file
from lightning_cyclic.runtime.assembly import Assembly
from tests.harness.interrupted import contents, difference
from tests.harness.processes import free_port

ROOT = Path(__file__).parents[2]
NUM_RANKS = 4
WAIT_S = 12.0  # of ranks for each other
LIMIT_S = 150.0  # from one fault to the step of the next
MARK = "TESTS_FAULTED"  # in the environment of all that a job starts
SHORT, LONG = 1.0, WAIT_S + 6.0

ON_ONE_HOST = ("kill", "stop", "stop for long", "SIGTERM", "loader", "memory")
UNNOTICED = ("stop", "cut")  # so short that nobody need notice
ON_HOSTS = ("kill", "SIGTERM", "cut", "cut for long", "kill host")


@dataclass(frozen=True)
class Fault:
    """What happens to whom.

    Args:
        kind: one of the above.
        rank: to whom.
        step: that rank 0 must have made.
        delay_s: behind that step.
    """

    kind: str
    rank: int
    step: int
    delay_s: float


def drawn(kinds: Sequence[str], num: int, seed: object) -> list[Fault]:
    """Draw faults, each at a later step than the last one."""
    draws = random.Random(str(seed))
    step, faults = 0, []
    for k in range(num):
        step += draws.randint(1, 4)
        kind = kinds[k] if k < len(kinds) else draws.choice(kinds)
        faults.append(Fault(kind, draws.randrange(NUM_RANKS), step, draws.uniform(0, 0.15)))
    return faults


@final
class Job:
    """Run a job to its end, whatever happens.

    Args:
        folder: of all its files.
        preset: of CyclicStrategy.
        num_steps: that it trains.
        hosts: on which a rank each runs. [all on this one]
        num_ranks: how many.
    """

    def __init__(
        self, folder: Path, preset: str, num_steps: int, hosts: Hosts | None = None,
        num_ranks: int = NUM_RANKS,
    ) -> None:  # fmt: skip
        self.folder = folder
        self._num_ranks = num_ranks
        self.over: list[Fault] = []  # faults behind which it went on
        self._preset, self._num_steps, self._hosts = preset, num_steps, hosts
        self._prefixes = hosts.up()[1] if hosts is not None else [[]]
        self._agents: list[subprocess.Popen[bytes]] = []
        self._mark = f"{folder}-{os.getpid()}"
        (folder / "ranks").mkdir(parents=True)
        self._log = (folder / "log").open("ab")

    def run(self, faults: Sequence[Fault]) -> None:
        """Run it with these faults.

        Raises:
            AssertionError: it does not finish, or something is wrong behind it.
        """
        try:
            for fault in faults:
                self._until(lambda f=fault: self.step >= f.step)
                time.sleep(fault.delay_s)
                begins, step, began_s = self._log_size, self.step, time.monotonic()
                before = self._pid(0)
                self._befall(fault)
                if fault.kind not in UNNOTICED:
                    self._until(
                        lambda b=begins, f=fault: names(self._said(b), f) or self._again(f)
                    )
                    self._until(lambda b=before: self._is_done or self._pid(0) not in (0, b))
                self._until(lambda s=step: self._is_done or self.step > s)
                print(f"  {fault}: went on behind {time.monotonic() - began_s:.1f} s", flush=True)
                self.over.append(fault)
            self._until(lambda: self._is_done)
            self._until(lambda: all(agent.poll() is not None for agent in self._agents))
            assert [agent.poll() for agent in self._agents] == [0] * len(self._agents)
            left = self._left()
            assert not left, f"left running: {left}"
        finally:
            self.close()

    @property
    def _is_done(self) -> bool:
        return (self.folder / "done").exists()

    @property
    def step(self) -> int:
        """Return how many steps have been made."""
        return step_of(self.folder)

    def close(self) -> None:
        """End all that there is of it."""
        for pid in self._left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self._agents:
            agent.wait()
        self._log.close()
        if self._hosts is not None:
            self._hosts.down()

    # ------------------------------------------------------------------ what there is

    def _start(self) -> None:
        num_nodes, port = len(self._prefixes), free_port()
        numbers = [num_nodes, self._num_ranks // num_nodes, self._num_steps, WAIT_S]
        each = ["--nproc-per-node", str(self._num_ranks // num_nodes), "--max-restarts", "100"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *each]
        script = ["--module", "tests.scripts.faulted", str(self.folder), self._preset]
        script += map(str, numbers)
        env = os.environ | {
            MARK: self._mark,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if self._hosts is None else "eth0",
        }
        for file in (self.folder / "ranks").iterdir():
            file.unlink()
        self._agents = [
            subprocess.Popen(
                [*prefix, *torchrun, *self._rendezvous(k, port), *script],
                env=env, cwd=ROOT, stdout=self._log, stderr=self._log,
            )
            for k, prefix in enumerate(self._prefixes)
        ]  # fmt: skip

    def _rendezvous(self, k: int, port: int) -> list[str]:
        """Return how the agent of a host meets the others."""
        if self._hosts is None:
            return ["--standalone"]
        more = f"is_host={int(k == 0)},keep_alive_interval=1,keep_alive_max_attempt=3"
        return [
            "--nnodes", str(len(self._prefixes)), "--rdzv-backend", "c10d",
            "--rdzv-id", str(port), "--rdzv-endpoint", f"{Hosts.address(0)}:{port}",
            "--rdzv-conf", more, "--local-addr", Hosts.address(k),
        ]  # fmt: skip

    def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait, and start the job anew where it has ended too early."""
        end = time.monotonic() + LIMIT_S
        while not is_so():
            codes = [agent.poll() for agent in self._agents]
            if self._is_done:
                pass
            elif all(code is not None for code in codes):
                self._start()
            elif any(codes):  # as SLURM does, --kill-on-bad-exit
                self._end_all()
            assert time.monotonic() < end, f"not within {LIMIT_S} s; the log ends:\n{self._tail()}"
            time.sleep(0.02)

    def _end_all(self) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                agent.terminate()
        end = time.monotonic() + 40
        while any(agent.poll() is None for agent in self._agents) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in self._left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self._agents:
            agent.wait()

    def _left(self) -> list[int]:
        """Return the processes that the job has started and that still run."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environment = (path / "environ").read_bytes()
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if f"{MARK}={self._mark}".encode() in environment.split(b"\0") and state != "Z":
                    found.append(int(path.name))
        return found

    def _pid(self, rank: int) -> int:
        """Return the number of a rank's process that trains; 0 if there is none."""
        with suppress(OSError, ValueError):
            pid = int((self.folder / "ranks" / str(rank)).read_text())
            if Path(f"/proc/{pid}").exists():
                return pid
        return 0

    @property
    def _log_size(self) -> int:
        return (self.folder / "log").stat().st_size

    def _said(self, begins: int) -> str:
        with (self.folder / "log").open("rb") as file:
            file.seek(begins)
            return file.read().decode(errors="replace")

    def _tail(self) -> str:
        return self._said(max(0, self._log_size - 6000))

    # ------------------------------------------------------------------ what happens

    def _befall(self, fault: Fault) -> None:
        if fault.kind in ("cut", "cut for long", "kill host"):
            self._befall_host(fault)
            return
        self._until(lambda: self._pid(fault.rank) > 0)
        pid = self._pid(fault.rank)
        if fault.kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif fault.kind == "SIGTERM":
            os.kill(pid, signal.SIGTERM)
        elif fault.kind == "memory":
            most = _num_bytes(pid) + (1 << 20)
            resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        elif fault.kind == "loader":
            self._until(lambda: _kill_loader(pid) or self._pid(fault.rank) != pid)
        else:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(LONG if fault.kind == "stop for long" else SHORT)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _again(self, fault: Fault) -> bool:
        """Kill the next worker that loads data where the last one had done its part."""
        if fault.kind == "loader" and (pid := self._pid(fault.rank)) > 0:
            _kill_loader(pid)
        return False

    def _befall_host(self, fault: Fault) -> None:
        assert self._hosts is not None
        if fault.kind == "kill host":
            for pid in self._hosts.processes(fault.rank):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        self._hosts.cut(fault.rank)
        time.sleep(LONG if fault.kind == "cut for long" else SHORT)
        self._hosts.restore(fault.rank)


def _kill_loader(pid: int) -> bool:
    """Kill a worker that loads data for a process, if it has one that has not done its part."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in file.read_text().split():
                command = Path(f"/proc/{child}/cmdline").read_text()
                if "tests.scripts.faulted" in command and "tracker" not in command:
                    os.kill(int(child), signal.SIGKILL)
                    return True
    return False


def _num_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def names(said: str, fault: Fault) -> bool:
    """Say whether a log names the rank to which something has happened, and what."""
    r = fault.rank
    words = {
        # torchrun's agent may end the others before they have said so
        "kill": rf"PeerError: .*rank {r} on \S+ .*ended without a word"
        rf"|exitcode: -9\) local_rank: {r} .*\n",
        "SIGTERM": rf"Rank {r} received SIGTERM",
        "loader": rf"rank {r} on .* failed in .*DataLoader worker|DataLoader worker .* is killed",
        # where a thread cannot begin, Python waits for it for ever
        "memory": rf"rank {r} on .* out of the host's memory|waited .* for rank {r} on",
        "stop for long": rf"waited .* for rank {r} on|rank {r} on \S+ did not answer",
        "cut for long": r"waited .* for rank \d on",
        "kill host": rf"rank {r} on",
    }
    return re.search(words[fault.kind], said) is not None


# ---------------------------------------------------------------------- what is left of a job


def step_of(folder: Path) -> int:
    """Return how many steps the job of a folder has made."""
    file = folder / "step"
    return int(file.read_text()) if file.exists() else 0


def assert_as_unbroken(folder: Path, unbroken: Path) -> None:
    """Compare every file of a step, and the last weights, with those of another job."""
    names = sorted(path.name for path in (unbroken / "checkpoints").iterdir())
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == names
    for name in names:
        path = folder / "checkpoints" / name
        check_file(path, Assembly(), reads=True)
        where = difference(contents(path), contents(unbroken / "checkpoints" / name))
        assert where is None, f"{path}: {where}"
    last = (torch.load(x / "done", weights_only=True) for x in (folder, unbroken))
    assert difference(*last) is None


def main() -> None:
    """Run jobs until so many things have happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--of-a-job", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--presets", nargs="*", default=["cyclic_dp", "1f1b", "pipedream_2bw"])
    parser.add_argument("--hosts", action="store_true", help="a rank on each of four hosts")
    args = parser.parse_args()
    kinds, num_steps = ON_HOSTS if args.hosts else ON_ONE_HOST, 5 * args.of_a_job
    above = Path(tempfile.mkdtemp())
    well, badly, number = Counter[str](), Counter[str](), 0
    for preset in args.presets:
        Job(above / preset, preset, num_steps).run([])
    while well.total() + badly.total() < args.faults:
        preset = args.presets[number % len(args.presets)]
        faults = drawn(kinds, args.of_a_job, f"{args.seed} {number}")
        print(f"job {number}, {preset}", flush=True)
        hosts = Hosts(NUM_RANKS, name="flt") if args.hosts else None
        job = Job(above / f"{preset}-{number}", preset, num_steps, hosts)
        try:
            job.run(faults)
            assert_as_unbroken(job.folder, above / preset)
        except AssertionError as error:
            print(f"FAILED {job.folder}: {error}", flush=True)
            badly.update(fault.kind for fault in faults[len(job.over) :][:1])
        else:
            shutil.rmtree(job.folder)
        well.update(fault.kind for fault in job.over)
        number += 1
    print("kind, went well, did not:")
    for kind in kinds:
        print(f"  {kind}: {well[kind]}, {badly[kind]}")


if __name__ == "__main__":
    main()
