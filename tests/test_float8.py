"""FP8 layers of torchao compute their scales from what they are given, and run unchanged.

They are a package of their own, which CI does not install: pip install torchao.
"""

from __future__ import annotations

import logging
import warnings

import pytest
from lightning.pytorch.plugins.precision import TransformerEnginePrecision

from tests.harness import processes
from tests.harness.trainers import fit, make_trainer, train_data
from tests.modules.classifier import Classifier
from tests.references.replicated import Reference

pytestmark = pytest.mark.multi

RULES = {"cyclic_dp": "freshest", "cyclic_zero": "freshest", "lockstep_dp": "sync"}


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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "rule"), RULES.items())
def test_layers_of_torchao_have_the_bits_of_one_process(preset: str, rule: str) -> None:
    pytest.importorskip("torchao", reason="pip install torchao")
    ranks = processes.run(fit, 2, Float8, {"preset": preset, "stages": 2}, 4, {})
    module = Float8()
    assert "Float8Linear" in {type(m).__name__ for m in module.net.modules()}
    Reference(rule=rule, n=2, num_batches=4).run(module, ranks[0]["stage_of"]).compare(ranks)


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
