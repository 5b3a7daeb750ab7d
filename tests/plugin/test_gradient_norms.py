"""Norms of gradients: those of a plain run, whatever trains, for the steps that were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_cyclic import ConfigurationError, GradientNorms
from tests.conformance import modules as m
from tests.conformance.cases import CASES
from tests.conformance.harness import NUM_STEPS, loader
from tests.harness import processes
from tests.harness.trainers import make_trainer


class ByHand(Callback):
    """Does what Lightning's documentation does, where all gradients are there."""

    def __init__(self) -> None:
        self.totals: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.totals.append(float(torch.nn.utils.get_total_norm(grads)))


def norms(strategy: Any, folder: Path, every: int, preset: str | None) -> Any:
    """Return what the callback, one by hand, and a logger have of a fit."""
    seen, by_hand = GradientNorms(every, per_parameter=True), ByHand()
    logger = CSVLogger(folder / str(processes.here().rank), name="", version="")
    callbacks: list[Callback] = [seen] + ([by_hand] if strategy == "auto" else [])
    flags: dict[str, Any] = {} if preset else {"accumulate_grad_batches": 2}
    trainer = make_trainer(strategy, max_epochs=2, callbacks=callbacks, logger=logger, **flags)
    trainer.fit(m.Unused(), loader(CASES["plain"], preset, range(2 * NUM_STEPS)))
    file = Path(logger.log_dir, "metrics.csv")  # of rank 0 alone
    rows = file.read_text().split("\n") if file.exists() else []
    return seen.totals, seen.each, by_hand.totals, rows


@pytest.mark.multi
def test_norms_are_those_of_a_single_device(tmp_path: Path) -> None:
    (alone,) = processes.run(norms, 1, "auto", tmp_path / "alone", 1, None)
    assert list(alone[0].values()) == alone[2]
    assert list(alone[0]) == list(range(2 * NUM_STEPS))
    assert "unused.weight" not in alone[1][0]
    assert len(alone[1][0]) == 6
    strategy = {"preset": "1f1b", "stages": ["net.2"], "num_microbatches": 2}
    for ranks in (
        processes.run(norms, 2, strategy, tmp_path / "1f1b", 3, "1f1b"),
        processes.run(norms, 2, {"preset": "lockstep_dp"}, tmp_path / "dp", 3, "lockstep_dp"),
    ):
        for totals, each, *_ in ranks:
            assert totals == {t: alone[0][t] for t in (0, 3, 6)}
            assert each == {t: alone[1][t] for t in (0, 3, 6)}
        rows = ranks[0][3]
        column = rows[0].split(",").index("grad_norm")
        logged = [row.split(",")[column] for row in rows[1:] if row]
        assert [float(x) for x in logged if x] == list(totals.values())


def test_a_number_of_steps_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"every_n_steps=0; allowed: 1, 2"):
        GradientNorms(0)
