"""The weight watch: which changes within a step it notices, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.absent import come_back, leave
from lightning_cyclic.runtime.weight_watch import WeightWatch

Change: TypeAlias = Callable[[nn.Parameter], None]
BITS = (0, 1, 2, 4, 8)  # steps, from the first on, in which they are compared


def watched() -> tuple[nn.Module, WeightWatch, list[dict[str, nn.Parameter]]]:
    """Return a module of two groups and a third that is never changed."""
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16), nn.Linear(2, 2)]
    module = nn.ModuleList(layers)
    groups = [
        {f"{k}.{n}": p for n, p in layer.named_parameters()} for k, layer in enumerate(layers)
    ]
    return module, WeightWatch(3), groups


@torch.no_grad()
def scale(p: nn.Parameter) -> None:
    p.mul_(2)


def scale_unseen(p: nn.Parameter) -> None:
    p.data.mul_(2)


def replace_data(p: nn.Parameter) -> None:
    p.data = p.data * 2


@pytest.mark.parametrize("change", [scale, scale_unseen, replace_data])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_change_is_refused_by_name(change: Change, k: int) -> None:
    module, watch, groups = watched()
    watch.begin(7, groups)
    change(module[k].weight)
    with pytest.raises(StepError, match=rf"'{k}.weight' was changed on rank 3 while step 7"):
        watch.end()


def test_a_change_that_is_counted_is_seen_in_every_step_and_others_in_some() -> None:
    module, watch, groups = watched()
    seen = []
    for since in range(10):
        watch.begin(5 + since, groups)
        scale_unseen(module[1].bias)
        try:
            watch.end()
        except StepError:
            seen.append(since)
        watch.begin(5 + since, groups)
        scale(module[1].bias)
        with pytest.raises(StepError, match="'1.bias'"):
            watch.end()
    assert tuple(seen) == BITS


@pytest.mark.parametrize("change", [scale, scale_unseen, replace_data])
def test_what_the_package_changes_is_no_change(change: Change) -> None:
    module, watch, groups = watched()
    watch.begin(0, groups)
    with watch.changing([0, 1]), watch.changing([1]):
        change(module[0].weight)
        change(module[1].weight)
    watch.end()
    change(module[2].weight)  # nobody watches
    watch.end()


@pytest.mark.parametrize("change", [scale, scale_unseen])
def test_a_change_before_one_of_the_package_is_not_hidden_by_it(change: Change) -> None:
    module, watch, groups = watched()
    watch.begin(0, groups)
    change(module[0].weight)
    with pytest.raises(StepError, match=r"'0\.weight'"):
        _go_on(watch, module[0].weight)


def _go_on(watch: WeightWatch, p: nn.Parameter) -> None:
    with watch.changing([0]):
        scale(p)
    watch.end()


def test_what_is_changed_within_one_group_is_not_taken_for_another() -> None:
    module, watch, groups = watched()
    watch.begin(0, groups)
    with watch.changing([0]):
        scale(module[1].weight)
    with pytest.raises(StepError, match=r"'1\.weight'"):
        watch.end()


def test_absent_weights_have_no_bits_until_they_come() -> None:
    module, watch, groups = watched()
    p = module[0].weight
    leave(p, "0.weight", None)  # type: ignore[arg-type]
    watch.begin(0, groups)
    with watch.changing([0]):
        come_back(p)
        replace_data(p)
    scale_unseen(p)
    with pytest.raises(StepError, match=r"'0\.weight'"):
        watch.end()
    watch.begin(1, groups)
    with watch.changing([0]):
        leave(p, "0.weight", None)  # type: ignore[arg-type]
    watch.end()


def test_an_error_of_autograd_that_comes_of_a_change_names_what_has_changed() -> None:
    module, watch, groups = watched()
    loss = module[2](module[0](torch.ones(1, 2))).sum()
    with pytest.raises(StepError, match=r"'2\.weight'") as caught:
        _change_and_go_back(watch, groups, module[2].weight, loss)
    assert "inplace operation" in str(caught.value.__context__)


def _change_and_go_back(watch: WeightWatch, groups: Any, p: nn.Parameter, loss: Any) -> None:
    with watch.watching(0, groups):
        scale(p)
        loss.backward()


def test_an_error_of_another_kind_stays_as_it_is() -> None:
    _, watch, groups = watched()
    with pytest.raises(RuntimeError, match="another"), watch.watching(0, groups):
        raise RuntimeError("another")


@pytest.mark.parametrize("may_freeze", [True, False])
def test_what_is_frozen_within_a_step_is_refused_where_stages_run_at_different_times(
    may_freeze: bool,
) -> None:
    module, _, groups = watched()
    watch = WeightWatch(2, may_freeze=may_freeze)
    watch.begin(4, groups)
    module[1].bias.requires_grad_(False)
    if may_freeze:
        watch.end()
        return
    with pytest.raises(StepError, match=r"'1.bias' was frozen or unfrozen on rank 2 while step 4"):
        watch.end()
