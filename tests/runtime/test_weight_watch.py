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
    return module, WeightWatch(3, now=lambda: 0.0), groups  # no step takes any time


@torch.no_grad()
def scale(p: nn.Parameter) -> None:
    p.mul_(2)


def scale_unseen(p: nn.Parameter) -> None:
    p.data.mul_(2)


def replace_data(p: nn.Parameter) -> None:
    p.data = p.detach() * 2  # which reads no data of the parameter


def write_memory(p: nn.Parameter) -> None:
    """Change what nobody tells of."""
    p.detach().view(torch.int16).numpy()[...] ^= 0x4000


CHANGES = [scale, scale_unseen, replace_data]


@pytest.mark.parametrize("change", [scale, scale_unseen, replace_data])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_change_is_refused_by_name(change: Change, k: int) -> None:
    module, watch, groups = watched()
    watch.begin(7, groups)
    change(module[k].weight)
    with pytest.raises(StepError, match=rf"'{k}.weight' was changed on rank 3 while step 7"):
        watch.end()


def test_a_change_is_seen_in_every_step_and_of_what_nobody_tells_in_some() -> None:
    module, watch, groups = watched()
    seen = []
    for since in range(10):
        watch.begin(5 + since, groups)
        write_memory(module[1].bias)
        try:
            watch.end()
        except StepError:
            seen.append(since)
        for change in CHANGES:
            watch.begin(5 + since, groups)
            change(module[1].bias)
            with pytest.raises(StepError, match="'1.bias'"):
                watch.end()
    assert tuple(seen) == BITS


@pytest.mark.parametrize(("share", "is_seen"), [(0.011, False), (0.009, True)])
def test_where_it_is_cheap_bits_are_compared_in_every_step(share: float, is_seen: bool) -> None:
    module, _, groups = watched()
    seconds = [0.0]

    def now() -> float:
        seconds[0] += share / 6  # the bits of three groups are read twice in a step
        return seconds[0]

    watch = WeightWatch(3, now=now)
    for t in range(3):
        watch.begin(t, groups)
        seconds[0] = float(t + 1)  # a step takes a second, or a little more
        watch.end()
    watch.begin(3, groups)
    write_memory(module[0].bias)
    if not is_seen:
        watch.end()
        return
    with pytest.raises(StepError, match="'0.bias' was changed on rank 3 while step 3"):
        watch.end()


@pytest.mark.parametrize("t", range(5))
def test_who_reads_data_or_puts_back_what_it_was_changes_nothing(t: int) -> None:
    module, watch, groups = watched()
    for step in range(t + 1):
        watch.begin(step, groups)
        assert module[0].weight.data.norm() > 0
        module[1].to(torch.bfloat16)
        kept = module[2].weight.data.clone()
        module[2].weight.data.zero_()
        module[2].weight.data.copy_(kept)
        watch.end()


def test_parameters_tell_nobody_when_nobody_watches() -> None:
    module, watch, groups = watched()
    for t in range(4):
        watch.begin(t, groups)
        assert "data" in vars(nn.Parameter)
        watch.stop()
        assert "data" not in vars(nn.Parameter)
    with pytest.raises(KeyboardInterrupt), watch.watching(4, groups):
        raise KeyboardInterrupt
    assert "data" not in vars(nn.Parameter)
    assert module[0].weight.data.equal(module[0].weight)


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
