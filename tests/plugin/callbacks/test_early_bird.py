"""EarlyBirdPruning: the ticket is drawn where masks no longer change, and handed over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cyclic import ConfigurationError, EarlyBirdPruning, SparseStatePrecision
from lightning_cyclic.plugin.precision.masks import magnitude_masks, prunable
from tests.references import pruned as t

pytestmark = [*t.PLAIN_LIGHTNING, pytest.mark.filterwarnings("ignore:Checkpoint directory")]


def search(ticket: EarlyBirdPruning, net: Any = t.mlp, **flags: Any) -> Any:
    module = t.Regression(net())
    trainer = t.trainer(None, callbacks=[ticket], **{"max_epochs": 20, **flags})
    trainer.fit(module, t.loader(t.batches(4)))
    return module, trainer


def steady(**more: Any) -> EarlyBirdPruning:
    return EarlyBirdPruning(**{"sparsity": 0.5, "window": 3, "tolerance": 0.2, **more})


def test_ticket_is_the_mask_of_the_epoch_in_which_it_is_drawn() -> None:
    ticket = steady()
    module, trainer = search(ticket)
    assert ticket.mask is not None
    assert ticket.epoch == len(ticket.distances) - 1 == trainer.current_epoch - 1
    assert ticket.distances[0] == 1.0
    assert ticket.distances[-1] <= 0.2
    wanted = magnitude_masks(prunable(module, ("bias",)), 0.5)
    assert all(torch.equal(ticket.mask[n], mask) for n, mask in wanted.items())


def test_newest_mask_is_compared_with_each_other_of_the_window() -> None:
    """Ten weights, half of them pruned: a shift by one place changes the mask in two places."""
    ticket = EarlyBirdPruning(0.5, window=3, tolerance=0.2)
    module = nn.Linear(10, 1, bias=False)
    for epoch, shift in enumerate([0, 1, 2, 3, 3, 4, 4]):
        assert ticket.mask is None
        with torch.no_grad():
            module.weight.copy_((torch.arange(10) + shift) % 10)
        trainer = SimpleNamespace(current_epoch=epoch, should_stop=False, is_global_zero=True)
        ticket.on_train_epoch_end(trainer, module)
        assert trainer.should_stop == (epoch == 4)
        if trainer.should_stop:
            break
    assert ticket.distances == [1, 0.2, 0.4, 0.4, 0.2]
    assert ticket.epoch == 4


def test_training_goes_on_where_it_is_not_to_stop(tmp_path: Path) -> None:
    ticket = steady(stop=False, path=tmp_path / "ticket.pt")
    _, trainer = search(ticket)
    assert trainer.current_epoch == 20
    assert ticket.mask is not None
    assert ticket.epoch is not None
    assert ticket.epoch < 19
    written = torch.load(tmp_path / "ticket.pt")
    assert written.keys() == ticket.mask.keys()
    assert all(torch.equal(written[n], mask) for n, mask in ticket.mask.items())


def test_ticket_is_handed_over() -> None:
    ticket = steady()
    module, _ = search(ticket)
    plugin = SparseStatePrecision(mask=ticket.mask)
    t.trainer(plugin).fit(module, t.loader(t.batches(4)))
    assert ticket.mask is not None
    assert all(torch.equal(plugin.masks[n], mask) for n, mask in ticket.mask.items())
    for name, mask in ticket.mask.items():
        assert bool((module.get_parameter(name)[~mask] == 0).all())


def test_no_ticket() -> None:
    ticket = EarlyBirdPruning(0.5, window=5)
    with pytest.warns(UserWarning, match=r"drawn no ticket: the last distance is 0\.\d+, and tol"):
        search(ticket, max_epochs=3)
    assert ticket.mask is None


def test_search_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole = steady()
    search(whole)
    first, again = steady(), steady()
    with pytest.warns(UserWarning, match="drawn no ticket"):
        _, trainer = search(first, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = t.trainer(None, callbacks=[again], max_epochs=20)
    other.fit(t.Regression(t.mlp()), t.loader(t.batches(4)), ckpt_path=tmp_path / "a.ckpt")
    assert again.distances == whole.distances
    assert again.epoch == whole.epoch
    assert again.mask is not None
    assert whole.mask is not None
    assert all(torch.equal(again.mask[n], mask) for n, mask in whole.mask.items())


# ---------------------------------------------------------------------- bad input

BAD: list[tuple[dict[str, Any], str]] = [
    ({"sparsity": 1.0}, r"sparsity=1.0; allowed: .*EarlyBirdPruning\(sparsity=0.9\)"),
    ({"window": 1}, r"window=1 .*allowed: a whole number of epochs from 2 on"),
    ({"score": "bn"}, r"does not know score; allowed: .* drawn by magnitude"),
    ({"window": 2.5}, r"window=2.5"),
    ({"tolerance": 1.0}, r"tolerance=1.0; allowed"),
    ({"tolerance": -0.1}, r"tolerance=-0.1"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        steady(**options)


def test_nan() -> None:
    def spoiled() -> nn.Module:
        net = t.mlp()
        with torch.no_grad():
            net[0].weight[0, 0] = float("nan")
        return net

    with pytest.raises(ConfigurationError, match=r"'net.0.weight' has NaN"):
        search(steady(), spoiled)
