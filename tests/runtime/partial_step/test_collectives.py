"""What workers of several replicas do together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.partial_step.collectives import Collectives
from lightning_cyclic.runtime.transport.crew import Crew
from tests.harness import processes
from tests.harness.processes import here
from tests.runtime.transport.rings import join


def reduced(replicas: int, size: int) -> float:
    """Return the sum of what replicas have, where the default group is bound to a GPU."""
    join()
    # as Lightning's DDPStrategy leaves it, with accelerator="gpu" over gloo, too
    group = dist.distributed_c10d._get_default_group()
    group.bound_device_id = torch.device("cuda:0")
    assembly = Assembly(Crew(20.0))
    made = Collectives(nn.Linear(1, 1), replicas, size, assembly)
    found = float(made.reduce(torch.tensor(10.0 ** here().rank), "sum"))
    assembly.close()
    assert float(made.reduce(torch.tensor(2.0), "sum")) == 2.0 * replicas  # behind the end, too
    group.bound_device_id = None
    dist.barrier()  # rank 0 has the store by which the others may still be meeting
    return found


@pytest.mark.multi
def test_replicas_that_share_a_gpu_reduce() -> None:
    assert processes.run(reduced, 4, 2, 2) == [101.0, 1010.0, 101.0, 1010.0]
