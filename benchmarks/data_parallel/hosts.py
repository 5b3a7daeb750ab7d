"""Hosts of their own on this machine: network namespaces on a bridge, with rates and cut links.

    python -m benchmarks hosts 4 --rate 1gbit       four hosts, until it is interrupted

Takes root on Linux, and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import threading
from typing import Final, Protocol, final

SMOKE = ("2", "--rate", "1gbit", "--hold-s", "0")
_SWITCH: Final = "sw"


class Links(Protocol):
    """Link workers that have a network namespace each."""

    def up(self) -> tuple[str, list[list[str]]]:
        """Bring it up; return the first host's address and each host's command prefix."""

    def down(self) -> None:
        """Take it down."""


@final
class Hosts:
    """Hold one network namespace per host on a bridge.

    Args:
        num_hosts: how many.
        rate: of what each host sends, as tc has it, like "1gbit". [no limit]
        burst: bytes that a host sends at once behind a pause, as tc has it; small beside the
            messages that are to meet the rate.
        name: begins the names of the namespaces, so that several networks can be up at once; of at
            most six letters.
        close: neighbours that a switch of their own joins, without a rate, as the workers of a
            node are joined; each has its own link to the others, too. [1: nobody]
    """

    def __init__(
        self,
        num_hosts: int,
        rate: str | None = None,
        name: str = "lc",
        close: int = 1,
        burst: str = "128kb",
    ) -> None:
        self._name = name
        self._names = [f"{name}{k}" for k in range(num_hosts)]
        self._rate = rate
        self._close = close
        self._burst = burst

    def up(self) -> tuple[str, list[list[str]]]:
        """Bring it up; return the first host's address and each host's command prefix."""
        self.down()
        switch = self._name + _SWITCH
        self._ip(f"netns add {switch}")
        self._ip(f"-n {switch} link add br0 type bridge")
        self._ip(f"-n {switch} link set br0 up")
        for k, name in enumerate(self._names):
            self._ip(f"netns add {name}")
            self._ip(f"-n {switch} link add p{k} type veth peer name eth0 netns {name}")
            self._ip(f"-n {switch} link set p{k} master br0 up")
            self._ip(f"-n {name} link set lo up")
            self._ip(f"-n {name} addr add {self.address(k)}/24 dev eth0")
            self._ip(f"-n {name} link set eth0 up")
            if self._rate is not None:
                limit = f"rate {self._rate} burst {self._burst} latency 100ms"
                command = f"tc -n {name} qdisc add dev eth0 root tbf {limit}"
                subprocess.run(command.split(), check=True)
        for first in range(0, len(self._names), self._close) if self._close > 1 else ():
            self._join(switch, range(first, first + self._close))
        return self.address(0), [["ip", "netns", "exec", name] for name in self._names]

    def _join(self, switch: str, hosts: range) -> None:
        """Join neighbours by a switch of their own, which packets between them take."""
        self._ip(f"-n {switch} link add in{hosts[0]} type bridge")
        self._ip(f"-n {switch} link set in{hosts[0]} up")
        for k in hosts:
            name = self._names[k]
            self._ip(f"-n {switch} link add q{k} type veth peer name eth1 netns {name}")
            self._ip(f"-n {switch} link set q{k} master in{hosts[0]} up")
            self._ip(f"-n {name} link set eth1 up")
            for other in (x for x in hosts if x != k):
                route = f"route add {self.address(other)}/32 dev eth1 src {self.address(k)}"
                self._ip(f"-n {name} {route}")

    @staticmethod
    def address(k: int) -> str:
        """Return a host's address."""
        return f"10.78.0.{10 + k}"

    def cut(self, k: int) -> None:
        """Cut a host off: what is sent to it and by it is lost, and nobody is told."""
        self._ip(f"-n {self._name}{_SWITCH} link set p{k} down")

    def restore(self, k: int) -> None:
        """Connect a host again."""
        self._ip(f"-n {self._name}{_SWITCH} link set p{k} up")

    def processes(self, k: int) -> list[int]:
        """Return the numbers of all processes of a host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self._names[k]], stdout=subprocess.PIPE, text=True, check=True
        )
        return [int(pid) for pid in found.stdout.split()]

    def down(self) -> None:
        """Take it down, whatever of it there is."""
        for name in [*self._names, self._name + _SWITCH]:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    @staticmethod
    def is_possible() -> bool:
        """Say whether this machine lets us."""
        if os.geteuid() != 0:
            return False
        probe = ["unshare", "--net", "ip", "link", "add", "type", "bridge"]
        try:
            return subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode == 0
        except FileNotFoundError:
            return False

    @staticmethod
    def _ip(arguments: str) -> None:
        subprocess.run(["ip", *arguments.split()], check=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("num_hosts", type=int)
    parser.add_argument("--rate", help='of what each host sends, as "1gbit" [no limit]')
    parser.add_argument("--hold-s", type=float, help="seconds [until it is interrupted]")


def run(args: argparse.Namespace) -> None:
    """Bring hosts up, say how to be on one, and take them down in the end."""
    hold(Hosts(args.num_hosts, args.rate), args.hold_s)


def hold(links: Links, hold_s: float | None) -> None:
    """Hold links for some time, or until somebody interrupts."""
    try:
        address, prefixes = links.up()
        print(f"the first host is {address}; a command on each, behind")
        print("\n".join(f"  {' '.join(prefix)}" for prefix in prefixes), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait(hold_s)
    finally:
        links.down()
