"""Hidden gradients: which reads are refused in which hook."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.updates import HiddenGradients
from lightning_cyclic.runtime.absent import AbsentParameter, home_of, leave


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.b.bias.requires_grad_(False)


class Looking(Callback):
    def on_before_optimizer_step(self, *args: object) -> None: ...


class Elsewhere:
    def __init__(self) -> None:
        self.read_names: list[str] = []

    def read(self, names) -> None:
        self.read_names += names

    def read_gradient(self, name: str) -> None: ...


def hidden(*callbacks: Callback) -> tuple[Model, HiddenGradients]:
    model = Model()
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    trainer = SimpleNamespace(lightning_module=model, callbacks=list(callbacks))
    return model, HiddenGradients(trainer, "cyclic_dp")


def test_gradients_that_are_not_whole_are_refused_and_all_else_may_be_read() -> None:
    model, gradients = hidden(Looking())
    with gradients.in_hook("on_before_optimizer_step", model.a.parameters()):
        assert model.a.weight.grad is not None
        assert model.b.bias.grad is None  # frozen
        assert torch.equal(model.b.weight * 1, model.b.weight.detach())
        assert torch.nn.utils.get_total_norm([model.b.weight.detach()]) > 0
        words = r"test_hidden_gradients.py:\d+ reads the gradient of 'b.weight' in on_before_opt"
        with pytest.raises(ConfigurationError, match=words):
            model.b.weight.grad  # noqa: B018
    assert model.b.weight.grad is not None
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_modules_may_be_copied_and_saved_in_the_hook() -> None:
    model, gradients = hidden(Looking())
    with gradients.in_hook("on_before_optimizer_step"):
        made = copy.deepcopy(model.b)
        file = io.BytesIO()
        torch.save(model.b, file)
        with pytest.raises(ConfigurationError):
            model.b.weight.grad  # noqa: B018
    file.seek(0)
    for other in (made, torch.load(file, weights_only=False)):
        assert type(other.weight) is nn.Parameter
        assert vars(other.weight) == {}
        assert torch.equal(other.weight, model.b.weight)


def test_a_hook_that_nobody_has_costs_nothing() -> None:
    model, gradients = hidden(Looking())
    with gradients.in_hook("on_after_backward"):
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_what_another_worker_has_stays_there() -> None:
    model, gradients = hidden(Looking())
    elsewhere = Elsewhere()
    leave(model.b.weight, "b.weight", elsewhere)
    with gradients.in_hook("on_before_optimizer_step", model.a.parameters()):
        with pytest.raises(ConfigurationError, match="'b.weight'"):
            model.b.weight.grad  # noqa: B018
        model.b.weight.sum()
        assert elsewhere.read_names == ["b.weight"]
    assert type(model.b.weight) is AbsentParameter
    assert home_of(model.b.weight) is elsewhere


def test_a_hook_that_fails_leaves_parameters_as_they_were() -> None:
    model, gradients = hidden(Looking())
    with pytest.raises(KeyError), gradients.in_hook("on_before_optimizer_step"):
        raise KeyError
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
