from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.optimizer_watch import OptimizerWatch
from tests import asynchronous, processes
from tests import optimizers as o
from tests.corpus import assert_same, make_trainer, weights_of

NUM_STEPS = 6


def parameters() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def test_what_a_call_counts_is_found() -> None:
    params = parameters()
    optimizer = o.Counting([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}])
    written = OptimizerWatch("1f1b").begin(optimizer, params)
    optimizer.step()
    assert written.find() == [{"step": 1}, {"step": 1}]


def test_what_is_counted_in_place_is_found_as_a_copy() -> None:
    params = parameters()
    optimizer = o.CountingByTensor(params)
    optimizer.step()
    written = OptimizerWatch("1f1b").begin(optimizer, params)
    optimizer.step()
    (found,) = written.find()
    optimizer.step()
    assert found["step"] == 2


def test_nothing_is_found_where_nothing_is_written() -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params)
    written = OptimizerWatch("1f1b").begin(optimizer, params)
    optimizer.step()
    assert written.find() == [{}]


@pytest.mark.parametrize("kind", [o.Estimating, o.Clipping, o.CountingCalls, o.CountingInState])
def test_who_looks_at_all_is_refused_for_a_part_and_may_have_the_whole(kind: Any) -> None:
    params = parameters()
    optimizer, watch = kind(params), OptimizerWatch("cyclic_dp")
    written = watch.begin(optimizer, params)
    optimizer.step()
    written.find()
    with pytest.raises(ConfigurationError, match=f"{kind.__name__}.step.. gives parameters other"):
        watch.begin(optimizer, params[:1])


def test_an_estimate_is_refused_where_no_trial_tells() -> None:
    params = parameters()
    optimizer, watch = o.Wrapping(params), OptimizerWatch("cyclic_dp")
    written = watch.begin(optimizer, params[:1])
    optimizer.step()
    with pytest.raises(ConfigurationError, match=r"has written 'd' into a parameter group"):
        written.find()


# ---------------------------------------------------------------------- several steps under way


class Net(LightningModule):
    """Four layers, trained by an optimizer that counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layers(batch), batch)

    def configure_optimizers(self) -> Any:
        return o.Counting(self.parameters(), 0.5)


def batches() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return list(torch.randn(NUM_STEPS, 3, 4, generator=g))


def fit() -> dict[str, Any]:
    module = Net()
    starts = [f"layers.{k}" for k in (1, 2, 3)]
    trainer = make_trainer({"preset": "pipedream", "num_micro": 1, "stages": starts}, max_epochs=1)
    trainer.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    (group,) = trainer.optimizers[0].param_groups
    return {"weights": weights_of(module), "step": group["step"]}


@pytest.mark.multi
def test_each_stage_counts_its_steps_where_several_are_under_way() -> None:
    (run,) = processes.run(fit, 1)
    module = Net()
    asynchronous.train(
        module, [list(layer.parameters()) for layer in module.layers],
        module.configure_optimizers(),
        lambda net, t, _: net.training_step(batches()[t], t),
        rule="stashed", num_micro=1, num_steps=NUM_STEPS,
    )  # fmt: skip
    assert run["step"] == NUM_STEPS
    assert_same(run["weights"], weights_of(module))
