"""A Trainer that has fitted goes on from a checkpoint with the same bits, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.harness import processes
from tests.harness.trainers import assert_same, make_trainer, outcome, train_data
from tests.modules.classifier import Classifier

pytestmark = pytest.mark.multi


def fit_twice(strategy: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    """Fit, saving step 4 of 6; fit again from there, with the same Trainer."""
    module = Classifier("mlp", "adamw")
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(strategy, max_epochs=1, enable_checkpointing=True, callbacks=[saver])
    found = []
    for path in (None, f"{folder}/step=4.ckpt"):
        trainer.fit(module, train_data(module, 6), ckpt_path=path)
        groups = len(dist.distributed_c10d._world.pg_map)
        found.append(outcome(trainer, module) | {"groups": groups})
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in module.modules())
    assert hooks == 0
    return found


@pytest.mark.parametrize(
    "strategy",
    [
        {"preset": "cyclic_dp"},
        {"preset": "cyclic_dp_v1"},
        {"preset": "1f1b", "stages": 2, "num_microbatches": 3},
        {"preset": "cyclic_pipeline", "stages": 2, "num_microbatches": 3},
    ],
    ids=lambda strategy: strategy["preset"],
)
def test_the_second_fit_takes_what_was_delayed(strategy: dict[str, Any], tmp_path: Any) -> None:
    for first, second in processes.run(fit_twice, 2, strategy, str(tmp_path)):
        assert_same(second["weights"], first["weights"])
        assert second["global_step"] == first["global_step"] == 6
        # beside the default group, the one over which a checkpoint behind a fit is gathered
        assert (first["groups"], second["groups"]) == (2, 3)
