"""Links between workers that are late and limited in rate, on one machine (Linux, root).

Not every kernel has a queue that delays (netem), so a switch of our own does: each worker has a
network namespace whose only device is a tap, and what it sends is read, kept, and written to the
tap of its destination when it is due. As the simulator has it, a frame keeps the sender's port
busy for its bytes, and the receiver's for as long, one latency later.

    python -m benchmarks late_links 4 --latency-s 0.001     four workers, until it is interrupted
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import select
import struct
import subprocess
import time

from benchmarks.data_parallel.hosts import hold
from benchmarks.rounds import command_of, environment

SMOKE = ("2", "--hold-s", "0")
_MTU = 32_000  # bytes of a frame: fewer of them, as each costs the switch some 20 us
_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002


class LateLinks:
    """Hold one network namespace per worker, on a switch that is a process of its own.

    Args:
        num_workers: how many.
        latency_s: from the end of a frame's sending to the start of its receiving.
        bytes_per_s: of each port and direction.
    """

    def __init__(self, num_workers: int, latency_s: float, bytes_per_s: float) -> None:
        self._names = names(num_workers)
        self._numbers = (num_workers, latency_s, bytes_per_s)
        self._switch: subprocess.Popen[str] | None = None

    def up(self) -> tuple[str, list[list[str]]]:
        """Bring them up; return the first worker's address and each worker's command prefix."""
        self._switch = subprocess.Popen(
            command_of("late_links", self._numbers), env=environment(0, 1, "", "", ""),
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "ready\n":
            raise SystemExit(
                "no switch: network namespaces and taps take root on Linux, and what a run left "
                f"behind is in the way: ip netns del {self._names[0]}, and so on"
            )
        return _address(0), [["ip", "netns", "exec", name] for name in self._names]

    def down(self) -> None:
        """Take them down."""
        if self._switch is not None:
            self._switch.terminate()
            self._switch.wait()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def names(num_workers: int) -> list[str]:
    """Return the names of the namespaces."""
    return [f"late{k}" for k in range(num_workers)]


def _address(k: int) -> str:
    return f"10.79.0.{10 + k}"


def _tap(k: int, name: str) -> int:
    """Make a namespace with a tap; return the tap's file."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = struct.pack("16sH22x", f"{name}tap".encode(), _TAP_WITHOUT_HEADER)
    fcntl.ioctl(tap, _TUNSETIFF, flags)
    for command in (
        f"netns add {name}",
        f"link set {name}tap netns {name} name eth0",
        f"-n {name} link set lo up",
        f"-n {name} link set eth0 address 02:00:00:00:00:{k:02x} mtu {_MTU} txqueuelen 2000",
        f"-n {name} addr add {_address(k)}/24 dev eth0",
        f"-n {name} link set eth0 up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return tap


class Switch:
    """Carry frames.

    Args:
        taps: file of each worker's tap.
        latency_s: of every frame.
        bytes_per_s: of each port and direction.
    """

    def __init__(self, taps: list[int], latency_s: float, bytes_per_s: float) -> None:
        self._taps = taps
        self._latency_s, self._byte_s = latency_s, 1 / bytes_per_s
        self._sent_s, self._received_s = [0.0] * len(taps), [0.0] * len(taps)  # ports busy until
        self._due: list[tuple[float, int, int, bytes]] = []  # seconds, number, destination, frame
        self._number = 0

    def run(self) -> None:
        """Carry frames for ever."""
        while True:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for tap in select.select(self._taps, [], [], wait_s)[0]:
                self._take(self._taps.index(tap))
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                _, _, k, frame = heapq.heappop(self._due)
                try:
                    os.write(self._taps[k], frame)
                except OSError:
                    continue  # its device is gone or full, as frames get lost

    def _take(self, source: int) -> None:
        for _ in range(64):  # then others have their turn
            try:
                frame = os.read(self._taps[source], 1 << 16)
            except BlockingIOError:
                return
            busy_s = len(frame) * self._byte_s
            sent_s = max(time.monotonic(), self._sent_s[source]) + busy_s
            self._sent_s[source] = sent_s
            mine = frame[:5] == b"\x02\0\0\0\0"  # else it asks everybody for an address
            for k in [frame[5]] if mine else range(len(self._taps)):
                if k == source or k >= len(self._taps):
                    continue
                due_s = max(sent_s + self._latency_s, self._received_s[k] + busy_s)
                self._received_s[k] = due_s
                self._number += 1
                heapq.heappush(self._due, (due_s, self._number, k, frame))


def work(num_workers: int, latency_s: float, bytes_per_s: float) -> None:
    """Be the switch, until somebody ends it."""
    taps = [_tap(k, name) for k, name in enumerate(names(num_workers))]
    print("ready", flush=True)
    Switch(taps, latency_s, bytes_per_s).run()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("num_workers", type=int)
    parser.add_argument("--latency-s", type=float, default=1e-3, help="of every frame (0.001)")
    parser.add_argument("--bytes-per-s", type=float, default=1.25e8, help="of a port (1.25e8)")
    parser.add_argument("--hold-s", type=float, help="seconds [until it is interrupted]")


def run(args: argparse.Namespace) -> None:
    """Bring links up, say how to be at one, and take them down in the end."""
    hold(LateLinks(args.num_workers, args.latency_s, args.bytes_per_s), args.hold_s)
