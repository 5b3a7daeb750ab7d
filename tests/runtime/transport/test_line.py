from __future__ import annotations

from typing import Any

import pytest

from lightning_cyclic.runtime.transport.line import Gone, Line, Work
from tests.runtime.transport.rings import room


class FakeWork:
    """Be done when waited for, as gloo's works are; or fail."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return False


class FakeGroup:
    def send(self, data: Any, rank: int, tag: int) -> None:
        raise RuntimeError("Connection closed by peer")


def work(error: str = "") -> tuple[Any, Work]:
    fake: Any = FakeWork(error)
    return fake, Work(fake)


def test_a_second_wait_does_not_ask_again() -> None:
    fake, pending = work()
    assert not pending.is_done()
    pending.wait()
    pending.wait()
    assert pending.is_done()
    assert fake.waits == 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Timed out waiting 2000ms for recv operation", TimeoutError),
        ("Application timeout caused pair closure", TimeoutError),
        ("Connection closed by peer", ConnectionError),
    ],
)
def test_errors_are_named(text: str, kind: type[OSError]) -> None:
    fake, pending = work(text)
    for _ in range(2):
        with pytest.raises(kind, match=f"^{text}$"):
            pending.wait()
    assert pending.is_done()
    assert fake.waits == 1


def test_a_peer_that_has_gone_is_noticed_by_who_waits() -> None:
    pending = Line(FakeGroup()).post("send", room(), 1, 0)
    assert isinstance(pending, Gone)
    assert pending.is_done()
    with pytest.raises(ConnectionError, match="^Connection closed by peer$"):
        pending.wait()


def test_a_worker_of_a_loader_that_dies_meanwhile_is_no_peers_fault() -> None:
    fake, pending = work("DataLoader worker (pid 7) is killed by signal: Killed. ")
    with pytest.raises(RuntimeError, match="^DataLoader worker"):
        pending.wait()
    fake.error = ""
    pending.wait()  # which is not over by that
    assert fake.waits == 2
