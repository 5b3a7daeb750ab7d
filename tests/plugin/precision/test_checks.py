"""What SparseStatePrecision refuses, by name and with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_cyclic import ConfigurationError, SparseStatePrecision
from lightning_cyclic.plugin.precision.sparse_state import check_optimizer
from tests.harness import processes
from tests.references import pruned as t

pytestmark = t.PLAIN_LIGHTNING


def fit(module: Any = None, **options: Any) -> None:
    flags = options.pop("flags", {})
    plugin = SparseStatePrecision(**{"sparsity": 0.5, **options})
    t.trainer(plugin, **flags).fit(module or t.Regression(t.mlp()), t.loader(t.batches(4)))


def refused_by(strategy: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        fit(flags={"strategy": strategy})
    return str(error.value)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("strategy", "name"),
    [("ddp", "DDPStrategy"), ("pipeoptim", "preset='pipeoptim', which predicts weights")],
)
def test_strategies_of_several_devices(strategy: Any, name: str) -> None:
    (message,) = processes.run(refused_by, 1, strategy)
    assert f"SparseStatePrecision was given with {name}" in message
    assert "use Trainer(strategy='cyclic_dp')" in message


def test_fsdp_refuses_it_by_itself() -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    with pytest.raises(TypeError, match=r"FSDPPrecision.*SparseStatePrecision"):
        FSDPStrategy(precision_plugin=SparseStatePrecision(sparsity=0.5))


def test_two_precision_plugins() -> None:
    both = [SparseStatePrecision(sparsity=0.5), SparseStatePrecision(sparsity=0.5)]
    with pytest.raises(MisconfigurationException, match="multiple values for Precision flags"):
        t.trainer(None, plugins=both)
    with pytest.raises(ValueError, match=r"Received both `precision=32-true` and `plugins="):
        t.trainer(both[0], precision="32-true")


def test_arguments() -> None:
    with pytest.raises(
        ConfigurationError, match=r"compute 'bf16-mixed' is unknown; allowed: bf16"
    ):
        SparseStatePrecision(sparsity=0.5, compute="bf16-mixed")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"exclude='bias' is one string"):
        SparseStatePrecision(sparsity=0.5, exclude="bias")


def test_manual_optimization() -> None:
    module = t.Regression(t.mlp())
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match=r"Regression.automatic_optimization is False"):
        fit(module)


def test_pruning_within_the_fit() -> None:
    callback = ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(ConfigurationError, match="ModelPruning prunes while SparseStatePrecision"):
        fit(flags={"callbacks": [callback]})


def test_float32_wants_float32() -> None:
    with pytest.raises(ConfigurationError, match=r"'net.0.weight' is torch.float64, but Sparse"):
        fit(t.Regression(t.mlp().double()), compute="32-true")


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS"])
def test_optimizers_that_look_at_several_elements(name: str) -> None:
    def make(parameters: Any) -> Any:
        return getattr(torch.optim, name)([p for p in parameters if p.ndim == 2])

    with pytest.raises(ConfigurationError, match=rf"nothing says that {name} updates"):
        fit(t.Regression(t.mlp(), make))


def test_several_optimizers() -> None:
    optimizers = [torch.optim.SGD(t.mlp().parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ConfigurationError, match=r"returned 2 optimizers; allowed: 1 under Spar"):
        check_optimizer(optimizers)


class Unfreeze(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            pl_module.net[2].requires_grad_()


def test_unfreezing_within_the_fit() -> None:
    module = t.Regression(t.mlp())
    module.net[2].requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"'net.2.weight' was unfrozen, or given to"):
        fit(module, flags={"callbacks": [Unfreeze()]})
    module = t.Regression(t.mlp())
    module.net[2].requires_grad_(False)
    fit(module, flags={"callbacks": [Unfreeze()]}, compute="32-true")
