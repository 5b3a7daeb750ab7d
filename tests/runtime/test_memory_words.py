"""Memory words: whoever ran out of memory is said to have, in whichever way it was told so."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_cyclic import PRESETS, make_plan
from lightning_cyclic.errors import PeerError, StepError
from lightning_cyclic.runtime.failure_words import lack_of_memory, reason_of, relief

MOST = 10**17  # bytes: more than any machine can address
CUDA = "CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has a total capacity of 15.77 GiB"


@pytest.mark.parametrize(
    ("ask", "asked"),
    [
        (lambda: torch.empty(MOST, dtype=torch.uint8), r" \(asked for 1e\+05 TB\)"),
        (lambda: np.empty(MOST, np.uint8), r" \(asked for 88\.8 PiB\)"),
        (lambda: bytearray(MOST), ""),
    ],
)
def test_what_really_runs_out_of_the_hosts_memory_is_said_to(
    ask: Callable[[], Any], asked: str
) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        ask()
    assert re.fullmatch(f"out of the host's memory{asked}", lack_of_memory(caught.value))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(CUDA), "out of the device's memory (asked for 20.50 MiB)"),
        (RuntimeError(CUDA), "out of the device's memory (asked for 20.50 MiB)"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel"), "out of the device's memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of the host's memory"),
        (OSError(errno.ENOSPC, "No space left on device"), ""),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ""),
        (PeerError(f"rank 1 failed in step 2: {CUDA}; this rank (0) stopped"), ""),
        (KeyboardInterrupt(), ""),
    ],
)
def test_which_memory_and_how_much(error: BaseException, said: str) -> None:
    assert lack_of_memory(error) == said


def test_what_fails_beside_the_compute_is_known_by_its_cause() -> None:
    error = StepError("cyclic-sums failed: OutOfMemoryError: ...")
    error.__cause__ = torch.OutOfMemoryError(CUDA)
    assert reason_of(error).startswith("out of the device's memory (asked for 20.50 MiB): StepErr")


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = ValueError("broken")
    error.__cause__ = error
    assert lack_of_memory(error) == ""


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_what_to_do_fits_the_preset(preset: str) -> None:
    plan = make_plan(preset, num_stages=2, num_workers=2)
    ways = relief(plan, "never")
    assert "smaller batches" in ways
    is_whole = plan.placement == "replicated" and not plan.axes.sharding.gathers
    is_cut = plan.placement in ("pipelined", "shared")
    assert ('activation_checkpointing="always"' in ways) is is_cut
    assert 'activation_checkpointing="always"' not in relief(plan, "always")
    assert ("memory_limit_bytes" in ways) is (plan.placement == "pipelined")
    assert ("cyclic_zero" in ways) is is_whole
    assert ("accumulate_grad_batches" in ways) is not is_cut
