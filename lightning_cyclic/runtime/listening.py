"""Listening: the store in which ranks meet takes connections where they are to come from.

torch's store listens on every interface of rank 0's host, and believes whoever connects. A second
one of a process with the same port is the first one (``multi_tenant``), so that one that was made
before, and listens on one address, takes its place.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

_NAMES_OF_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_WAITING = 4096  # connections that nobody has accepted yet
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


@contextmanager
def listening_on_one_address(*, first: bool, host: str, port: int) -> Iterator[None]:
    """Let the store that rank 0 makes in the body listen on one address, where there is a reason.

    That is the loopback's, where ranks meet there, and that of the interface that the user names
    (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), where ``host`` is on it. Elsewhere, as with the store
    of torchrun's own agent, nothing is changed.

    Args:
        first: whether this process is rank 0, which makes the store.
        host: name or address at which ranks meet.
        port: number of the port there.
    """
    store = None
    if first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listener = _listener(host, port)
        if listener is not None:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, is_master=True, wait_for_workers=False, multi_tenant=True,
                master_listen_fd=listener.detach(), timeout=timedelta(seconds=60),
            )  # fmt: skip
    yield
    del store  # the process group has its own


def _listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on one address; None where none is named, or it is taken."""
    try:
        found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:  # torch says what is wrong with the name
        return None
    allowed = {"127.0.0.1", *_named_addresses()}
    address = next((x[4] for x in found if x[4][0] in allowed), None)
    if address is None:
        return None
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_WAITING)
    except OSError:  # torch says that the port is taken
        listener.close()
        return None
    return listener


def _named_addresses() -> set[str]:
    """Return the IPv4 addresses of the interfaces that the user names."""
    named = [x for name in _NAMES_OF_INTERFACES for x in os.environ.get(name, "").split(",")]
    found = set()
    for interface in filter(None, named):
        try:
            found.add(_address_of(interface))
        except (OSError, ImportError):  # none of this name, or not Linux
            continue
    return found


def _address_of(interface: str) -> str:
    import fcntl  # noqa: PLC0415  (not everywhere)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = interface.encode()[:15].ljust(40, b"\0")
        answer = fcntl.ioctl(any_socket, _GET_ADDRESS, asked)
    return socket.inet_ntoa(answer[20:24])
