"""Where rank 0 listens for the others, as the kernel tells it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lightning_cyclic.runtime.listening import _named_addresses
from tests import processes
from tests.corpus import Classifier, make_trainer, train_data

pytestmark = pytest.mark.multi
_LISTENS = "0A"


def listens_on(port: int) -> list[str]:
    """Return the addresses on which somebody here listens with a port, as /proc has them."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, at = local.split(":")
            if state == _LISTENS and int(at, 16) == port:
                found.append(address)
    return found


def fit(host: str, interface: str) -> list[str]:
    port = int(os.environ["MASTER_PORT"]) + 1  # there is a store already at the one it is given
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    module = Classifier()
    found: list[str] = []
    module.on_train_start = lambda: found.extend(  # type: ignore[method-assign]
        listens_on(port)
    )
    make_trainer("cyclic_dp", max_epochs=1).fit(module, train_data(module, 2))
    return found


def test_ranks_of_one_host_meet_on_the_loopback_alone() -> None:
    for found in processes.run(fit, 2, "127.0.0.1", "lo"):
        assert found == ["0100007F"]  # 127.0.0.1, its bytes from behind


def own_interface() -> tuple[str, str]:
    """Return an interface other than the loopback, and its address."""
    for _, name in socket.if_nameindex():
        os.environ["GLOO_SOCKET_IFNAME"] = name
        try:
            (address,) = _named_addresses()
        except ValueError:
            continue
        finally:
            del os.environ["GLOO_SOCKET_IFNAME"]
        if not address.startswith("127."):
            return name, address
    pytest.skip("this host has the loopback alone")


def test_the_interface_that_is_named_is_the_one_that_listens() -> None:
    interface, address = own_interface()
    expected = socket.inet_aton(address)[::-1].hex().upper()
    for found in processes.run(fit, 2, address, interface):
        assert found == [expected]


def test_an_interface_that_is_not_there_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none_such,lo")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert _named_addresses() == {"127.0.0.1"}
