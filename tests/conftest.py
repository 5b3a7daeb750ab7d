"""One thread per process: kernels choose their order of summation by the number of threads.

Properties of large plans are checked on a fifth of the examples of the profile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.harness.commands import NOT_INHERITED
from tests.harness.processes import free_port

os.environ["OMP_NUM_THREADS"] = "1"
settings.register_profile("thorough", max_examples=500)  # --hypothesis-profile=thorough


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # before every test: Trainers and recipes set other numbers


@pytest.fixture(autouse=True)
def _own_address() -> Iterator[None]:
    """Let runs of this process meet where no connection comes first, and leave no address behind.

    The port that Lightning chooses may be taken before anybody listens, and the next run that is
    launched would meet at what one has left.
    """
    before = {name: os.environ.get(name) for name in NOT_INHERITED}
    os.environ["MASTER_PORT"] = str(free_port())
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
