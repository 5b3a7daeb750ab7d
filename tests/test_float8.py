"""FP8 layers of torchao compute their scales from what they are given, and run unchanged.

They are a package of their own, which CI does not install: pip install torchao.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import TransformerEnginePrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests import asynchronous, processes, sequential
from tests.corpus import Classifier, MicroBatches, assert_same, by_stage, make_trainer, train_data
from tests.corpus import weights_of as weights

pytestmark = pytest.mark.multi

NUM_STEPS = 4
WHOLE = {"cyclic_dp": "freshest", "cyclic_zero": "freshest", "lockstep_dp": "sync"}
STAGED = {
    "gpipe": "sync", "1f1b": "sync", "pipedream_2bw": "delayed", "cyclic_pipeline": "freshest",
}  # fmt: skip
NUM_MICRO = 2


class Float8(Classifier):
    """Compute in emulated FP8."""

    def __init__(self) -> None:
        super().__init__("mlp", "adamw")
        logging.disable(logging.WARNING)  # of kernels that are for GPUs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig(emulate=True)
            self.net = convert_to_float8_training(self.net, config=config)
        logging.disable(logging.NOTSET)


def fit(strategy: dict[str, Any]) -> dict[str, Any]:
    module = Float8()
    run = make_trainer(strategy, max_epochs=1)
    if strategy["preset"] in STAGED:
        batches = [batch_of(t) for t in range(NUM_STEPS)]
        run.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    else:
        run.fit(module, train_data(module, NUM_STEPS))
    kinds = {type(m).__name__ for m in module.net.modules()}
    return {"weights": weights(module), "stage_of": dict(run.strategy.stage_of), "kinds": kinds}


def batch_of(t: int) -> Any:
    data = MicroBatches("vectors", NUM_STEPS * NUM_MICRO)
    parts = [data[t * NUM_MICRO + i] for i in range(NUM_MICRO)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def by_rule(rule: str, stage_of: dict[str, int], *, is_staged: bool) -> dict[str, Tensor]:
    module = Float8()
    made = module.configure_optimizers()
    data, step = MicroBatches(module.kind, NUM_STEPS * 2), made["lr_scheduler"]["scheduler"].step

    def loss(module: nn.Module, t: int, i: int) -> Tensor:
        return module.loss(data[t * 2 + i], t)

    stages = by_stage(module, stage_of)
    if is_staged and rule != "sync":
        asynchronous.train(
            module, stages, made["optimizer"], loss, rule=rule, num_microbatches=NUM_MICRO,
            num_steps=NUM_STEPS, after_update=lambda t: step(),
        )  # fmt: skip
    else:
        sequential.train(
            module, stages, made["optimizer"], loss, rule=rule, num_workers=2,
            num_steps=NUM_STEPS, after_update=lambda t: step(),
        )  # fmt: skip
    return weights(module)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "rule"), [*WHOLE.items(), *STAGED.items()])
def test_layers_of_torchao_have_the_bits_of_one_process(preset: str, rule: str) -> None:
    pytest.importorskip("torchao", reason="pip install torchao")
    strategy = {"preset": preset, "stages": 2}
    strategy |= {"num_microbatches": NUM_MICRO} if preset in STAGED else {}
    ranks = processes.run(fit, 2, strategy)
    assert "Float8Linear" in ranks[0]["kinds"]
    (expected,) = processes.run(by_staged_rule if preset in STAGED else by_whole_rule, 1, rule,
                                ranks[0]["stage_of"])  # fmt: skip
    for rank in ranks:
        assert_same(rank["weights"], expected)


def by_staged_rule(rule: str, stage_of: dict[str, int]) -> dict[str, Tensor]:
    return by_rule(rule, stage_of, is_staged=True)


def by_whole_rule(rule: str, stage_of: dict[str, int]) -> dict[str, Tensor]:
    return by_rule(rule, stage_of, is_staged=False)


def fit_with_transformer_engine(preset: str) -> None:
    module = Classifier()
    run = make_trainer(preset, max_epochs=1)
    # its constructor wants the package, which needs a GPU to be built
    plugin = TransformerEnginePrecision.__new__(TransformerEnginePrecision)
    run.strategy._precision_plugin = plugin
    run.fit(module, train_data(module, 2))


@pytest.mark.parametrize("preset", ["cyclic_dp", "1f1b"])
def test_transformer_engine_is_refused_by_name(preset: str) -> None:
    with pytest.raises(processes.RanksFailedError, match="keeps the scales of FP8 numbers"):
        processes.run(fit_with_transformer_engine, 2, preset)
