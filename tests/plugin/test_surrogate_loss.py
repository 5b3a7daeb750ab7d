"""Gradients that are deposited by a factor that only a GPU knows have the bits of plain ones."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule

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


def fake(batches: int, batch_idx: int, *callbacks: Callback) -> Any:
    """Return what of a Trainer is asked for."""
    return SimpleNamespace(
        accumulate_grad_batches=batches, callbacks=callbacks, lightning_module=LightningModule(),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=batch_idx)),
    )  # fmt: skip


@pytest.mark.parametrize("batches", [1, 2, 3, 41, 49])
def test_a_loss_that_is_divided_as_lightning_does_changes_no_bit(batches: int) -> None:
    trainer = fake(batches, batches - 1)
    p = torch.nn.Parameter(torch.zeros(50))
    p.grad = BEFORE.clone()
    surrogates = Surrogates(trainer)
    with surrogates.collecting([p]):
        p.grad = TOTAL.clone()
    (surrogates.stand_for(torch.tensor(2.0)) / batches).backward()
    assert torch.equal(p.grad, TOTAL)


class Looks(Callback):
    def on_before_zero_grad(self, *args: Any) -> None: ...


@pytest.mark.parametrize(
    ("batch_idx", "callbacks", "is_kept"),
    [(2, [], False), (3, [], True), (2, [Callback()], False), (2, [Looks()], True)],
)
def test_gradients_of_the_last_step_are_there_twice_only_where_they_may_be_seen(
    batch_idx: int, callbacks: list[Callback], is_kept: bool
) -> None:
    p = torch.nn.Parameter(torch.zeros(50))
    p.grad = BEFORE.clone()
    ref = weakref.ref(p.grad)
    with Surrogates(fake(2, batch_idx, *callbacks)).collecting([p]):
        gc.collect()
        assert (ref() is not None) == is_kept
        p.grad = TOTAL.clone()
    assert (p.grad is not None) == is_kept
    assert not is_kept or batch_idx % 2 or torch.equal(p.grad, BEFORE)
