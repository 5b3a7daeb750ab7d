"""One thread per process: kernels choose their order of summation by the number of threads."""

from __future__ import annotations

import os

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # before every test: Trainers and recipes set other numbers
