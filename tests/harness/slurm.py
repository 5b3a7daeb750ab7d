"""A SLURM of its own on this machine: two nodes on 127.0.0.1, or more, for as long as tests run.

    munged <- slurmctld <- slurmd n0, slurmd n1 <- slurmstepd <- a job's tasks

All files are in one new folder, to which SLURM_CONF leads; nothing of the machine's own set-up is
read or written, and no root is needed. The daemons run in the foreground, so that they are ended
by their process numbers, and nothing else is; they end, too, when the test's process is killed.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import final

from tests.harness import processes
from tests.harness.commands import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES, CPUS = ("n0", "n1"), 4
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
COMMAND_LIMIT_S, START_LIMIT_S, STOP_LIMIT_S = 30.0, 60.0, 30.0
STARTED_AS = re.compile(r"SLURM_|SBATCH_|SRUN_|PMI|TORCHELASTIC_")  # of a job around this one
CONFIG = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=30
KillWait=2
JobRequeue=1
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN\n"
)


def missing() -> list[str]:
    """Return the programs of SLURM that this machine does not have."""
    return [name for name in PROGRAMS if _path_of(name) is None]


def variable(pid: int, name: str) -> str | None:
    """Return a variable with which a process was started; None where it has none of that name."""
    pairs = (text.partition("=") for text in _environment_of(pid).decode().split("\0"))
    return next((value for key, _, value in pairs if key == name), None)


@final
class Cluster:
    """Run the daemons from entry to exit."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm"))  # short: a socket's path is
        self._config = self.folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._write_config()
            self._start_daemons()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.SubprocessError, AssertionError):
            self.command("scancel", "--me")
            until(lambda: not self.processes(), STOP_LIMIT_S, "jobs end")
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, *arguments: str) -> str:
        """Return what one of SLURM's commands writes.

        Raises:
            CalledProcessError: it failed.
        """
        return self._run(arguments, {}, None)

    def submit(
        self, script: Path, *arguments: str, options: Sequence[str] = (),
        env: Mapping[str, str], folder: Path,
    ) -> Job:  # fmt: skip
        """Put a script into the queue.

        Args:
            script: for sbatch.
            *arguments: of the script.
            options: of sbatch.
            env: variables of the job, besides those of this process.
            folder: where sbatch runs, and the job.
        """
        line = ("sbatch", "--parsable", *options, str(script), *arguments)
        return Job(self, self._run(line, env, folder).strip())

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return the variables with which SLURM's commands find this cluster."""
        mine = {k: v for k, v in os.environ.items() if not STARTED_AS.match(k)}
        return mine | {"SLURM_CONF": str(self._config)} | dict(more)

    def processes(self) -> list[int]:
        """Return the processes of all jobs: SLURM gives them the variables of who submitted."""
        mark = f"SLURM_CONF={self._config}\0".encode()
        return [pid for pid in _process_numbers() if mark in _environment_of(pid)]

    def process_with(self, **variables: str) -> int:
        """Return the one process of all jobs that was started with these variables."""
        (pid,) = (
            pid for pid in self.processes()
            if all(variable(pid, name) == value for name, value in variables.items())
        )  # fmt: skip
        return pid

    def nodes_are(self, state: str) -> bool:
        """Say whether all nodes are in a state."""
        return self.command("sinfo", "-h", "-N", "-o", "%T").split() == [state] * len(NODES)

    def fail(self, node: str) -> None:
        """Let a node be down, as if it had failed, and come back when its jobs have ended."""
        self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=a test")
        until(lambda: not self.processes(), STOP_LIMIT_S, f"jobs on {node} end")
        with suppress(subprocess.CalledProcessError):  # it has come back by itself
            self.command("scontrol", "update", f"nodename={node}", "state=resume")

    def log(self) -> str:
        """Return what the daemons wrote."""
        return "\n".join(f"{p.name}:\n{p.read_text()}" for p in self.folder.glob("*.log"))

    def _run(self, line: Sequence[str], env: Mapping[str, str], folder: Path | None) -> str:
        done = subprocess.run(
            line, env=self.environment(env), cwd=folder, check=True, capture_output=True,
            text=True, timeout=COMMAND_LIMIT_S,
        )  # fmt: skip
        return done.stdout

    def _write_config(self) -> None:
        config = CONFIG.format(
            folder=self.folder, user=getpass.getuser(), controller=processes.free_port()
        )
        host = socket.gethostname().partition(".")[0]
        nodes = (
            NODE.format(name=name, host=host, port=processes.free_port(), cpus=CPUS)
            for name in NODES
        )
        self._config.write_text(config + "".join(nodes))
        # not looked for: slurmd starts also where there are no control groups
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)

    def _start_daemons(self) -> None:
        files = ("key", "pid", "log", "seed")
        self._start(
            "munged", "--foreground", "--force", f"--socket={self.folder}/munge.sock",
            "--num-threads=2",
            *(f"--{name}-file={self.folder}/munge.{name}" for name in files),
        )  # fmt: skip
        until((self.folder / "munge.sock").exists, START_LIMIT_S, "munged listens")
        self._start("slurmctld", "-D", "-f", str(self._config))
        for name in NODES:
            self._start("slurmd", "-D", "-f", str(self._config), "-N", name)

        def ready() -> bool:
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not dead, f"{dead} ended:\n{self.log()}"
            with suppress(subprocess.SubprocessError):
                return self.nodes_are("idle")
            return False

        until(ready, START_LIMIT_S, "the nodes are idle")

    def _start(self, program: str, *arguments: str) -> None:
        path = _path_of(program)
        assert path is not None, program
        with_this_process = ("setpriv", "--pdeathsig", "TERM") if _path_of("setpriv") else ()
        env = {k: v for k, v in os.environ.items() if not STARTED_AS.match(k)}
        self._daemons.append(
            subprocess.Popen(
                (*with_this_process, path, *arguments), env=env, cwd=self.folder,
                start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip


@final
class Job:
    """Be one job in a cluster's queue.

    Args:
        cluster: that has it.
        number: by which SLURM knows it.
    """

    def __init__(self, cluster: Cluster, number: str) -> None:
        self.number = number
        self._cluster = cluster

    def facts(self) -> dict[str, str]:
        """Return what scontrol shows of it."""
        text = self._cluster.command("scontrol", "show", "job", self.number, "-o")
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def is_in(self, *states: str) -> bool:
        """Say whether it is in one of some states."""
        return self.facts()["JobState"] in states

    def wait(self, limit_s: float, *states: str) -> str:
        """Return the first of some states that it is in, by default one of its ends."""
        ends = states or ENDS
        what = f"job {self.number} is {' or '.join(ends)}"
        self._wait_until(partial(self.is_in, *ends), limit_s, what)
        return self.facts()["JobState"]

    def signal(self, name: str) -> None:
        """Send a signal to all tasks."""
        self._cluster.command("scancel", f"--signal={name}", self.number)

    def cancel(self) -> None:
        """Take it out of the queue."""
        self._cluster.command("scancel", self.number)

    def start_again(self, limit_s: float) -> None:
        """Wait until it runs again; take from it the two minutes that it waits in the queue."""

        def started() -> bool:
            facts = self.facts()
            now = datetime.now().isoformat()
            if facts["JobState"] == "PENDING" and facts["EligibleTime"] > now:
                # again and again: the end of its tasks, where it comes later, sets the time anew
                update = ("update", f"jobid={self.number}", "StartTime=now")
                self._cluster.command("scontrol", *update)
            return facts["Restarts"] != "0" and facts["JobState"] in ("RUNNING", *ENDS)

        self._wait_until(started, limit_s, f"job {self.number} runs again")

    def _wait_until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        try:
            until(condition, limit_s, what)
        except AssertionError as e:
            nodes = self._cluster.command("sinfo", "-h", "-N", "-o", "%N %T %E")
            raise AssertionError(f"{e}; instead {self.facts()}\n{nodes}") from None


def _path_of(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def _process_numbers() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _environment_of(pid: int) -> bytes:
    with suppress(OSError):  # it has ended, or is another user's
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""
