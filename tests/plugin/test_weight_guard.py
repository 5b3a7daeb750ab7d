"""The weight guard: which changes between steps it notices."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.weight_guard import WeightGuard


def guarded() -> tuple[nn.Module, WeightGuard]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(torch.bfloat16))
    return module, WeightGuard(lambda: dict(module.named_parameters()), "cyclic_dp")


def scale(module: nn.Module, by: float) -> None:
    with torch.no_grad():
        module[1].weight.mul_(by)


def test_nothing_is_known_before_the_first_note_and_behind_a_load() -> None:
    module, guard = guarded()
    scale(module, 2)
    guard.check()
    guard.note()
    scale(module, 2)
    guard.forget()
    module[0].weight.requires_grad_(False)
    guard.check()


def end(guard: WeightGuard) -> None:
    with guard.ending():
        pass


@pytest.mark.parametrize("note", [WeightGuard.note, end])
def test_changes_are_refused_by_name(note: Callable[[WeightGuard], None]) -> None:
    module, guard = guarded()
    note(guard)
    guard.check()
    guard.note()  # behind a step
    note(guard)
    scale(module, 2)
    with pytest.raises(ConfigurationError, match=r"'1.weight' was changed .* 'cyclic_dp' workers"):
        guard.check()
    guard.note()
    guard.check()


def test_what_was_taken_back_where_steps_were_at_an_end_is_no_change() -> None:
    module, guard = guarded()
    end(guard)
    kept = module[1].weight.detach().clone()
    scale(module, 3)
    end(guard)  # a checkpoint, say, of what is there meanwhile
    with torch.no_grad():
        module[1].weight.copy_(kept)
    guard.check()
    guard.note()  # in the middle of steps nobody may look, and no bits are kept
    scale(module, 1)
    with pytest.raises(ConfigurationError, match="was changed between two steps"):
        guard.check()


def test_other_parameters_are_refused() -> None:
    module, guard = guarded()
    end(guard)
    prune.l1_unstructured(module[0], "weight", amount=0.5)
    with pytest.raises(ConfigurationError, match="'0.weight(_orig)?' was replaced, added or rem"):
        guard.check()


def test_a_change_before_an_end_is_refused_at_it() -> None:
    module, guard = guarded()
    guard.note()
    scale(module, 2)
    with pytest.raises(ConfigurationError, match="was changed between two steps"):
        end(guard)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
)
def test_parameters_of_any_type_are_compared(dtype: torch.dtype) -> None:
    x = nn.Parameter(torch.tensor([[1, 2], [3, 4]]).to(dtype).t())
    scalar = nn.Parameter(torch.ones((), dtype=dtype))
    guard = WeightGuard(lambda: {"x": x, "scalar": scalar}, "cyclic_dp")
    end(guard)
    with torch.no_grad():
        x.mul_(2).div_(2)
    guard.check()
    guard.note()
    end(guard)
    with torch.no_grad():
        scalar.add_(1)
    with pytest.raises(ConfigurationError, match="'scalar' was changed between two steps"):
        guard.check()


@pytest.mark.parametrize("note", [WeightGuard.note, end])
@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.data.mul_(2),
        lambda p: setattr(p, "data", p.data * 2),
        lambda p: setattr(p, "data", p.data.clone()),  # elsewhere: views of it stay behind
        lambda p: [setattr(p, "data", p.data.clone()) for _ in range(2)],  # and where it was
        lambda p: nn.utils.vector_to_parameters(torch.ones(p.numel()), [p]),
    ],
)
def test_changes_through_data_are_refused(
    note: Callable[[WeightGuard], None], change: Callable[[nn.Parameter], None]
) -> None:
    module, guard = guarded()
    note(guard)
    change(module[0].weight)
    with pytest.raises(ConfigurationError, match=r"'0.weight' was changed"):
        guard.check()


def test_reading_data_and_changing_back_is_no_change() -> None:
    module, guard = guarded()
    guard.note()
    float(module[0].weight.data.norm())
    module[1].weight.data.neg_()
    module[1].weight.data.neg_()
    guard.check()
    assert all(type(p) is nn.Parameter for p in module.parameters())


def test_copies_are_plain_and_nothing_stays_behind() -> None:
    module, guard = guarded()
    guard.note()
    copied = copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for made in (copied, loaded):
        assert all(type(p) is nn.Parameter for p in made.parameters())
    guard.forget()
    assert all(type(p) is nn.Parameter for p in module.parameters())


def forget_momentum(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()


def replace_momentum(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].clone()


def forget_all(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


@pytest.mark.parametrize("change", [forget_momentum, replace_momentum, forget_all])
def test_a_changed_state_of_the_optimizer_is_refused_while_updates_are_on_their_way(
    change: Callable[[torch.optim.Optimizer], None],
) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    guard = WeightGuard(lambda: dict(module.named_parameters()), "cyclic_dp", lambda: optimizer)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    guard.note()
    guard.check()
    guard.note()
    change(optimizer)
    with pytest.raises(ConfigurationError, match="state of the optimizer was changed between"):
        guard.check()
    guard.note()
    with guard.ending():
        optimizer.step()
    change(optimizer)
    guard.check()


def test_parameters_keep_their_class_and_have_torchs_data_again() -> None:
    module, guard = guarded()
    guard.note()
    assert all(type(p) is nn.Parameter for p in module.parameters())
    guard.check()
    assert "data" not in vars(nn.Parameter)
