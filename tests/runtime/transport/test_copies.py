from __future__ import annotations

import pytest
import torch

from lightning_cyclic.runtime.transport.host_staged import StreamCopies
from tests.runtime.transport.rings import room


@pytest.mark.gpu
def test_a_buffer_is_written_only_when_it_is_free() -> None:
    copies = StreamCopies(torch.device("cuda", 0))
    data = (room(1 << 20) + 3).cuda()
    host, copied = copies.to_host(data)
    copied.synchronize()
    assert host.is_pinned()
    torch.cuda._sleep(1)
    _ = data + 1  # what has not run before is loaded, for which the GPU must be idle
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1e9))
    read = data + 1  # enqueued, and still to run
    free = copies.now()
    with torch.cuda.stream(torch.cuda.Stream()):
        copies.to_device(host.zero_(), data, free)
        assert not free.query()
    torch.cuda.synchronize()
    assert bool((read == 4).all())
    assert bool((data == 0).all())
