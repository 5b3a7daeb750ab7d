"""Absent parameters and buffers: what may be asked of them, and what brings them back."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from lightning_cyclic.runtime.absent import (
    AbsentBuffer,
    AbsentParameter,
    come_back,
    leave,
)


class Home:
    """Bring everything back when anything is read."""

    def __init__(self, module: nn.Module) -> None:
        self.away = dict(module.named_parameters()) | dict(module.named_buffers())
        self.values = {n: x.detach().clone() for n, x in self.away.items()}
        self.read_names, self.gradients = [], []
        for n, x in self.away.items():
            x.data = torch.zeros((), dtype=x.dtype).expand(x.shape)
            leave(x, n, self)

    def read(self, names) -> None:
        self.read_names.append(tuple(names))
        for n, x in self.away.items():
            come_back(x)
            x.data = self.values[n]

    def read_gradient(self, name: str) -> None:
        self.gradients.append(name)


@pytest.mark.parametrize("how", [{"memory_format": torch.channels_last}, {"dtype": torch.float32}])
def test_a_module_may_be_moved_to_where_it_is(how) -> None:
    conv = nn.Conv2d(3, 4, 2)
    home, weight = Home(conv), conv.weight
    conv.to(**how)
    assert conv.weight is weight
    assert type(weight) is AbsentParameter
    assert not home.read_names


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()


def test_what_is_known_without_values_asks_nothing(module: nn.Module) -> None:
    home = Home(module)
    weight, mean = module[0].weight, module[1].running_mean
    assert type(weight) is AbsentParameter
    assert type(mean) is AbsentBuffer
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (3, 3)
    assert (weight.numel(), weight.dtype, weight.is_leaf) == (9, torch.float32, True)
    weight.requires_grad_(False)
    weight.requires_grad = True
    assert weight.requires_grad
    weight.grad = None
    assert {weight: 1}[weight] == 1
    assert sum(p.numel() for p in module.parameters()) == 18
    module.zero_grad()
    torch.optim.AdamW(module.parameters()).step()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    assert (home.read_names, home.gradients) == ([], [])


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda m: m(torch.ones(2, 3)), "0.weight"),
        (lambda m: m.state_dict()["0.bias"], "0.weight"),
        (lambda m: m[0].bias.norm(), "0.bias"),
        (lambda m: m[0].bias.data, "0.bias"),
        (lambda m: torch.stack([m[1].weight, m[1].bias]), "1.weight"),
        (lambda m: m[1].running_var + 1, "1.running_var"),
        (lambda m: m[1].running_var.tolist(), "1.running_var"),
        (lambda m: m[0].bias.detach().numpy(), "0.bias"),
        (lambda m: m[0].bias == 0, "0.bias"),
        (lambda m: nn.utils.parameters_to_vector(m.parameters()), "0.weight"),
        (lambda m: copy.deepcopy(m)[1].running_mean, "0.weight"),
        (lambda m: copy.copy(m[1].running_mean), "1.running_mean"),
        (lambda m: torch.save(m[1].bias, io.BytesIO()), "1.bias"),
    ],
)
def test_values_are_fetched_once_for_whoever_reads_them(module, ask, name) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1)
        expected = ask(copy.deepcopy(module))
        home = Home(module)
        got = ask(module)
    ((first, *_),) = home.read_names
    assert first == name
    assert {type(x) for x in home.away.values()} == {nn.Parameter, torch.Tensor}
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
        assert type(got) in (torch.Tensor, nn.Parameter)


def test_what_one_operation_reads_is_fetched_together(module: nn.Module) -> None:
    home = Home(module)
    torch._foreach_norm(list(module.parameters()))
    assert home.read_names == [("0.weight", "0.bias", "1.weight", "1.bias")]


def test_modules_are_saved_and_copied_as_what_they_were(module: nn.Module) -> None:
    plain = copy.deepcopy(module)
    Home(module)
    for made in (copy.deepcopy(module), module):
        assert {type(p) for p in made.parameters()} == {nn.Parameter}
        assert all(map(torch.equal, made.state_dict().values(), plain.state_dict().values()))


class Descent(torch.optim.Optimizer):
    """An optimizer that nobody has heard of."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            assert not with_grad
            assert all(p.grad is None for p in group["params"])


def test_optimizers_may_ask_whether_there_is_a_gradient(module: nn.Module) -> None:
    home = Home(module)
    Descent(module.parameters()).step()
    assert home.gradients == []


def test_others_may_not(module: nn.Module) -> None:
    home = Home(module)
    assert [p.grad for p in module.parameters()] == [None] * 4
    assert all(p.grad is None for p in module[0].parameters())
    assert home.gradients == ["0.weight", "0.bias", "1.weight", "1.bias", "0.weight", "0.bias"]


def test_a_kind_of_parameter_of_the_users_is_one_again(module: nn.Module) -> None:
    class Mine(nn.Parameter):
        pass

    module[0].weight = Mine(torch.ones(3, 3))
    Home(module)
    assert type(module[0].weight) is AbsentParameter
    assert float(module[0].weight.detach().sum()) == 9
    assert type(module[0].weight) is Mine


def test_hooks_may_be_registered(module: nn.Module) -> None:
    home = Home(module)
    module[0].weight.register_hook(lambda grad: grad)
    module[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    assert home.read_names == []
