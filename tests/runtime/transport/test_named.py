from __future__ import annotations

import time
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan.actions import Lane, Payload
from lightning_cyclic.plan.passes.messages import Channel
from lightning_cyclic.runtime.transport.base import Part, Work
from lightning_cyclic.runtime.transport.crew import Crew
from lightning_cyclic.runtime.transport.named import NamedTransport, tag_of
from tests.harness import processes
from tests.runtime.transport.rings import BACK, THERE, backwards, join, reason_of, ring, room, some

LANES = (Lane.MAIN, Lane.SUMS)


def exchange() -> tuple[int, list[list[int]]]:
    """Send five messages on every channel, and receive them in another order."""
    rank, num = join()
    transport = NamedTransport(reversed(LANES), Crew(20.0), partial(backwards, num))
    worker = transport.worker
    got, sent = [], []
    for source, target in permutations(range(num), 2):
        for lane in LANES:
            far = ring(Channel(source, target, lane), Payload.P, 5_000)
            near = ring(Channel(source, target, lane), Payload.P, 1)
            if worker == source:
                sent += [transport.isend(far, some(source, 1)), transport.isend(far, some(2, 2))]
                sent += [transport.isend(near, some(target), part) for part in Part if part < 2]
                sent += [transport.isend(near, some(), Part.DESCRIBED)]
            elif worker == target:
                buffers = [room(0), room(), room(), room(2), room(2)]
                posted = [
                    transport.irecv(near, buffers[0], Part.DESCRIBED),
                    transport.irecv(near, buffers[1], Part.HEAD),
                    transport.irecv(near, buffers[2]),
                    transport.irecv(far, buffers[3]),
                    transport.irecv(far, buffers[4]),
                ]
                for pending in reversed(posted):
                    pending.wait()
                    pending.wait()  # which ends as the first did
                assert all(pending.is_done() for pending in posted)
                got.append([v for buffer in buffers for v in buffer.tolist()])
    for pending in sent:
        pending.wait()
    transport.close()
    return worker, got


def refuse_a_gpu() -> None:
    join()
    transport = NamedTransport(LANES, Crew(20.0))
    transport.isend(ring(), torch.zeros(1, dtype=torch.uint8, device="meta"))


def wait_in_vain() -> None:
    """Wait for what never comes, in turns: each time-out breaks the connections of its group."""
    rank, _ = join()
    for turn, channel in enumerate((BACK, THERE)):
        transport = NamedTransport(LANES, Crew(0.3))
        if rank == 0:
            post = transport.irecv if turn == 0 else transport.isend
            pending = post(
                ring(channel, Payload.G, 3), room(), Part.HEAD if turn else Part.CONTENT
            )
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    pending.wait()
            assert pending.is_done()
        transport.close()
        torch.distributed.barrier()


def fail_on_the_last() -> tuple[float, str | None]:
    rank, num = join()
    transport = NamedTransport(LANES, Crew(30.0))
    if rank == num - 1:
        time.sleep(0.2)
        transport.crew.tell("worker 3: boom")
        time.sleep(1)  # the others read the note, and their connections stay as they are
        return 0.0, None
    start = time.monotonic()
    with pytest.raises(ConnectionError):
        transport.irecv(ring(Channel(num - 1, rank, Lane.SUMS), Payload.S), room()).wait()
    waited = time.monotonic() - start
    with pytest.raises(ConnectionError):  # posted on a broken connection
        transport.isend(ring(Channel(rank, num - 1, Lane.SUMS), Payload.S), room()).wait()
    reason = reason_of(transport.crew)
    time.sleep(1)  # the store that the others read ends with rank 0
    return waited, reason


def lines_of_both_ways() -> int:
    """Count the process groups that carry what goes there and back on one lane."""
    rank, _ = join()
    transport = NamedTransport(LANES, Crew(20.0))
    there, back = ring(THERE), ring(BACK)
    begin = (transport.isend, transport.irecv)[:: 1 if rank == 0 else -1]
    for pending in [begin[0](there, room()), begin[1](back, room())]:
        pending.wait()
    lines = {address.line for address in transport._addresses.values()}
    torch.distributed.barrier()
    transport.close()
    return len(lines)


@pytest.mark.multi
def test_no_connection_carries_messages_both_ways() -> None:
    assert processes.run(lines_of_both_ways, 2) == [2, 2]


@pytest.mark.multi
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_messages_are_matched_by_name(num_ranks: int) -> None:
    for rank, (worker, got) in enumerate(processes.run(exchange, num_ranks)):
        assert worker == backwards(num_ranks, rank)
        others = [w for w in range(num_ranks) if w != worker for _ in LANES]
        assert got == [[worker, worker, other, 1, 2, 2] for other in others]


@pytest.mark.multi
def test_tensors_elsewhere_than_on_the_host_are_refused() -> None:
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(refuse_a_gpu, 2)
    assert ConfigurationError.__name__ in caught.value.errors[0]
    assert "A of stage 0 on meta" in caught.value.errors[0]
    assert "use HostStagedTransport(NamedTransport(...))" in caught.value.errors[0]


@pytest.mark.multi
def test_waits_for_what_never_comes_end_at_the_limit() -> None:
    processes.run(wait_in_vain, 2)


@pytest.mark.multi
def test_a_failure_wakes_all_who_wait() -> None:
    for waited, reason in processes.run(fail_on_the_last, 4)[:3]:
        assert waited < 5
        assert reason == "worker 3: boom"


def test_tags_are_unique_and_fit_into_32_bits() -> None:
    rings = [ring(payload=p, j=j) for p in Payload for j in (*range(50), 9_999)]
    tags = [tag_of(r, part) for r in rings for part in Part]
    assert len(set(tags)) == len(tags)
    assert min(tags) >= 0
    assert max(tags) < (1 << 31) - 1


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


def work(error: str = "") -> tuple[Any, Work]:
    fake: Any = FakeWork(error)
    return fake, Work(fake)


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


def test_a_worker_of_a_loader_that_dies_meanwhile_is_no_peers_fault() -> None:
    fake, pending = work("DataLoader worker (pid 7) is killed by signal: Killed. ")
    with pytest.raises(RuntimeError, match="^DataLoader worker"):
        pending.wait()
    fake.error = ""
    pending.wait()  # which is not over by that
    assert fake.waits == 2
