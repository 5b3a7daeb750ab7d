"""What is shown and what is loaded between steps is that of all updates, those in flight, too."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests.harness.runs import run
from tests.harness.trainers import assert_same, weights_of
from tests.modules.chains import Chain

pytestmark = pytest.mark.multi

SEEN = 2  # the batch behind which weights are looked at
STRATEGIES = [
    {"preset": "cyclic_dp", "stages": 4},
    {"preset": "cyclic_dp_v1", "stages": 4},
    {"preset": "cyclic_pipeline", "stages": ["layers.2"], "num_microbatches": 2},
]


def batches(first: int = 0) -> Any:
    g = torch.Generator().manual_seed(5)
    rows = [[torch.randn((4, 6), generator=g)] for _ in range(6)]
    return DataLoader(rows[first:], batch_size=None)  # type: ignore[arg-type]


class Looks(Callback):
    """Copies the whole module behind a batch, and ends with the copy in its place."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, k: int
    ) -> None:
        if k == SEEN:
            with trainer.strategy.whole():
                module.seen = weights_of(module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        seen = module.seen
        with torch.no_grad():
            for name, x in module.state_dict().items():
                x.copy_(seen[name])


class Loads(Callback):
    """Goes back to the first weights behind a batch."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, k: int
    ) -> None:
        if k == SEEN:
            trainer.strategy.load_model_state_dict({"state_dict": Chain().state_dict()})


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda x: x["preset"])
def test_the_whole_module_has_the_updates_that_were_in_flight(strategy: dict[str, Any]) -> None:
    shown = run(Chain, strategy, data=batches, callbacks=[Looks()])
    ended = run(Chain, strategy, data=batches, max_steps=SEEN + 1)
    for x, y in zip(shown, ended, strict=True):
        assert not x.error, x.text
        assert_same(x.weights, y.weights)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda x: x["preset"])
def test_what_is_loaded_gets_no_update_of_before(strategy: dict[str, Any]) -> None:
    back = run(Chain, strategy, data=batches, callbacks=[Loads()])
    anew = run(Chain, strategy, data=partial(batches, SEEN + 1))  # without what came before
    for x, y in zip(back, anew, strict=True):
        assert not x.error, x.text
        assert_same(x.weights, y.weights)
