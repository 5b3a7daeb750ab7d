"""Gradients that are deposited by a factor that only a GPU knows have the bits of plain ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_cyclic.plugin.surrogate_loss import Surrogates, _scaled_since

BEFORE, TOTAL = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).unbind()


def test_a_factor_of_one_that_nobody_reads_changes_no_bit() -> None:
    assert not torch.equal(BEFORE + (TOTAL - BEFORE), TOTAL)  # as rounding would
    assert torch.equal(_scaled_since(BEFORE, TOTAL, torch.tensor(1.0)), TOTAL)


@pytest.mark.parametrize("factor", [0.5, 3.0, 0.1])
def test_another_factor_scales_what_was_added(factor: float) -> None:
    of_host = _scaled_since(BEFORE, TOTAL, factor)
    assert torch.equal(_scaled_since(BEFORE, TOTAL, torch.tensor(factor)), of_host)
    torch.testing.assert_close(of_host, BEFORE + factor * (TOTAL - BEFORE))


@pytest.mark.parametrize("batches", [1, 2, 3, 41, 49])
def test_a_loss_that_is_divided_as_lightning_does_changes_no_bit(batches: int) -> None:
    loop = SimpleNamespace(batch_idx=batches - 1)
    trainer: Any = SimpleNamespace(
        accumulate_grad_batches=batches, fit_loop=SimpleNamespace(epoch_loop=loop)
    )
    p = torch.nn.Parameter(torch.zeros(50))
    p.grad = BEFORE.clone()
    surrogates = Surrogates(trainer)
    with surrogates.collecting([p]):
        p.grad = TOTAL.clone()
    (surrogates.stand_for(torch.tensor(2.0)) / batches).backward()
    assert torch.equal(p.grad, TOTAL)
