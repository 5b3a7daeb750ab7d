"""Optimizers: who is known, who says it itself, what step() writes, and closures."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.optimizers import Written, check_parted, updates_each, without_closure
from tests.harness.runs import run, trained
from tests.harness.trainers import assert_same, weights_of
from tests.modules import optimizers as o
from tests.references import asynchronous

NUM_STEPS = 6


def parameters() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


BY_ELEMENT = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta",
              "RMSprop", "Rprop", "ASGD")  # fmt: skip


class Renamed(torch.optim.AdamW):
    """Has the step of its parent, around which a scheduler lays one that counts."""


class Saying(o.Chain):
    updates_apart = "parameter"


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_most_of_torch_update_each_element_by_itself(name: str) -> None:
    """See it, too: of a vector, and of parts of it, each gets the bits that the whole has."""
    torch.manual_seed(0)
    make, start = getattr(torch.optim, name), torch.randn(64)
    grads = [torch.randn(64) for _ in range(4)]
    start[::3] = 0.0
    for grad in grads:
        grad[::3] = 0.0  # pruned: they stay zero
    whole, part = nn.Parameter(start.clone()), nn.Parameter(start[1::3].clone())
    optimizers = [make([p], lr=0.1) for p in (whole, part)]
    for optimizer in optimizers:
        assert updates_each("element", optimizer)
        assert updates_each("parameter", optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizers[0], 1.0)
    for grad in grads:
        whole.grad, part.grad = grad, grad[1::3].clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(part, whole[1::3], rtol=1e-6, atol=1e-7)
    assert not whole[::3].any()


def test_a_subclass_is_as_its_parent_unless_it_steps_itself() -> None:
    assert updates_each("element", Renamed(parameters()))
    assert not updates_each("element", Asks(parameters(), 0.1))


def test_some_update_each_parameter_as_a_whole() -> None:
    matrix = [nn.Parameter(torch.ones(3, 3))]
    kinds = [torch.optim.Adafactor, transformers.Adafactor]
    kinds += [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []
    for kind in kinds:
        assert updates_each("parameter", kind(matrix))
        assert not updates_each("element", kind(matrix))


def test_others_say_it_themselves() -> None:
    optimizer: Any = o.Chain(parameters())
    assert not updates_each("parameter", optimizer)
    assert updates_each("parameter", Saying(parameters()))
    assert not updates_each("element", Saying(parameters()))
    optimizer.updates_apart = "element"
    assert updates_each("element", optimizer)
    assert updates_each("parameter", optimizer)
    optimizer.updates_apart = True
    with pytest.raises(ConfigurationError, match=r"Chain.updates_apart is True; allowed: 'para"):
        updates_each("element", optimizer)


def test_who_says_nothing_may_have_all_parameters_and_no_part_of_them() -> None:
    params = parameters()
    optimizer = o.Clipping(params)
    check_parted(optimizer, params, "cyclic_dp")
    check_parted(optimizer, [], "cyclic_dp")
    with pytest.raises(ConfigurationError, match=r"Clipping.step\(\) is called for some"):
        check_parted(optimizer, params[:1], "cyclic_dp")
    check_parted(Saying(params), params[:1], "cyclic_dp")


def test_what_a_call_counts_is_found() -> None:
    params = parameters()
    optimizer = o.Counting([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}])
    written = Written(optimizer)
    optimizer.step()
    assert written.find() == [{"step": 1}, {"step": 1}]


def test_what_is_counted_in_place_is_found_as_a_copy() -> None:
    optimizer = o.CountingByTensor(parameters())
    optimizer.step()
    written = Written(optimizer)
    optimizer.step()
    (found,) = written.find()
    optimizer.step()
    assert found["step"] == 2


# ---------------------------------------------------------------------- closures


class Calls(torch.optim.SGD):
    """Computes gradients again at other weights, as SAM does."""

    updates_apart = "parameter"

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
            return closure()


class Asks(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None


class Requires(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class Breaks(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError("no weights")


@pytest.mark.parametrize("kind", [Calls, Asks, Requires])
def test_an_optimizer_that_needs_its_closure_is_refused_by_name(kind: Any) -> None:
    optimizer = kind(parameters(), 0.1)
    said = f"{kind.__name__}.step.. calls its closure, .*'cyclic_dp'.*; use .*strategy='1f1b'"
    with pytest.raises(ConfigurationError, match=said), without_closure(optimizer, "cyclic_dp"):
        optimizer.step()


def test_any_other_error_of_an_optimizer_stays_what_it_is() -> None:
    optimizer = Breaks(parameters(), 0.1)
    with pytest.raises(ZeroDivisionError, match="no w"), without_closure(optimizer, "cyclic_dp"):
        optimizer.step()


# ---------------------------------------------------------------------- several steps under way


class Net(LightningModule):
    """Four layers, trained by an optimizer that counts its steps.

    Args:
        optimizer: or by another one.
    """

    def __init__(self, optimizer: Any = o.Counting) -> None:
        super().__init__()
        self.kind = optimizer
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layers(batch), batch)

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), 0.5)


def batches() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return list(torch.randn(NUM_STEPS, 3, 4, generator=g))


def loader() -> DataLoader[Any]:
    return DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]


def counted(trainer: Any, module: Net) -> int:
    (group,) = trainer.optimizers[0].param_groups
    return int(group["step"])


@pytest.mark.multi
@pytest.mark.parametrize(
    ("preset", "num_microbatches", "num_ranks"),
    [("cyclic_dp", 3, 1), ("cyclic_dp", None, 2), ("cyclic_pipeline", 3, 2), ("1f1b", 3, 2)],
)
def test_a_closure_is_for_presets_that_update_within_a_step(
    preset: str, num_microbatches: int | None, num_ranks: int
) -> None:
    strategy = {"preset": preset, "num_microbatches": num_microbatches}
    for end in run(partial(Net, Calls), strategy, num_ranks, data=loader):
        if preset == "1f1b":
            assert not end.error, end
        else:
            assert "Calls.step() calls its closure" in end.text


@pytest.mark.multi
def test_each_stage_counts_its_steps_where_several_are_under_way() -> None:
    starts = [f"layers.{k}" for k in (1, 2, 3)]
    strategy = {"preset": "pipedream", "num_microbatches": 1, "stages": starts}
    (one,) = trained(Net, strategy, 1, data=loader, look=counted)
    module = Net()
    asynchronous.train(
        module, [list(layer.parameters()) for layer in module.layers],
        module.configure_optimizers(),
        lambda net, t, _: net.training_step(batches()[t], t),
        rule="stashed", num_microbatches=1, num_steps=NUM_STEPS,
    )  # fmt: skip
    assert one.found == NUM_STEPS
    assert_same(one.weights, weights_of(module))
