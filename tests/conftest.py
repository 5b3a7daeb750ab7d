"""One thread per process: kernels choose their order of summation by the number of threads."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
