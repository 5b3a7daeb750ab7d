"""What goes wrong in a step that is run in stages is caught in the first step, by name."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_cyclic.registration import make_strategy
from tests.harness import processes
from tests.harness.trainers import make_trainer
from tests.verification import injected
from tests.verification.injected import FAULTS, NUM_MICRO, STAGES, Shown

ONE_PROCESS = {
    "1f1b": {"preset": "1f1b"},
    "cyclic_dp": {"preset": "cyclic_dp"},
    "remat": {"preset": "1f1b", "activation_checkpointing": "always"},
    "cyclic_pipeline remat": {"preset": "cyclic_pipeline", "activation_checkpointing": "always"},
}
TWO_RANKS = {
    "2 ranks": {"preset": "1f1b", "stages": ["c"]},
    "2 ranks, two batches": {"preset": "1f1b", "stages": ["c"]},
    "2 replicas": {"preset": "1f1b", "replicas": 2, "stages": 1, "num_microbatches": 2},
}


QUIET = dict.fromkeys(
    ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


def fit(run: str, steps: int = 1, verify: Any = None) -> Shown:
    options = {"stages": STAGES, "num_microbatches": NUM_MICRO} | (ONE_PROCESS | TWO_RANKS)[run]
    strategy = make_strategy(verify=steps if verify is None else verify, **options)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    is_alone = run in ONE_PROCESS
    shift = processes.here().rank if run == "2 ranks, two batches" else 0
    data = [
        (torch.randn(12, 6, generator=g), torch.randint(3, (12,), generator=g))
        for g in (torch.Generator().manual_seed(k + shift) for k in range(steps + 1))
    ]
    module = Shown()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = Trainer if is_alone else make_trainer
        flags = {"accelerator": "cpu", "devices": 1, "logger": False, **QUIET} if is_alone else {}
        trainer = make(strategy=strategy, max_steps=steps, **flags)
        trainer.fit(module, DataLoader(data, batch_size=None))
    return module


def fit_with(name: str, run: str, steps: int) -> str:
    """Return the error of a run with a fault, on this rank."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        injected._last.clear()
        FAULTS[name].patch(monkeypatch)
        try:
            fit(run, steps)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def error_of(name: str, run: str) -> str:
    steps = FAULTS[name].steps
    if run in ONE_PROCESS:
        return fit_with(name, run, steps)
    return processes.run(fit_with, 2, name, run, steps)[0]


@pytest.mark.parametrize("run", ONE_PROCESS)
def test_what_is_right_passes(run: str) -> None:
    assert fit(run, steps=1).count == NUM_MICRO


@pytest.mark.multi
@pytest.mark.parametrize("run", TWO_RANKS)
def test_what_is_right_passes_on_two_ranks(run: str) -> None:
    processes.run(fit, 2, run, 2)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        pytest.param(name, run, marks=[pytest.mark.multi] if run in TWO_RANKS else [])
        for name, fault in FAULTS.items()
        for run in fault.runs
    ],
)
def test_a_fault_is_caught_and_named(name: str, run: str) -> None:
    error = error_of(name, run)
    assert re.search(FAULTS[name].named, error), error or "nothing was said"
    assert "VerificationError: step" in error
