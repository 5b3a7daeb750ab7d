from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Adafactor

from lightning_cyclic.plugin.optimizer_trial import may_be_parted
from tests import optimizers as o

CPU = torch.device("cpu")
T = torch.optim


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(4))]


@pytest.mark.parametrize(
    "make",
    [
        partial(T.SGD, lr=0.1, momentum=0.9),
        partial(T.SGD, lr=0.1, foreach=True),
        T.Adam,
        T.AdamW,
        partial(T.AdamW, fused=True),
        partial(T.AdamW, foreach=True),
        partial(T.Adam, lr=torch.tensor(0.1), capturable=False),
        T.NAdam,
        T.RAdam,
        T.Adamax,
        T.Adagrad,
        T.Adadelta,
        T.RMSprop,
        T.Rprop,
        T.ASGD,
        T.Adafactor,
        Adafactor,
        o.Counting,
        o.CountingByTensor,
        o.Weighing,
    ],
)
def test_who_updates_each_parameter_by_itself_may_be_parted(make: Callable[..., Any]) -> None:
    assert may_be_parted(make(parameters()), CPU) is True


def test_who_wants_matrices_may_be_parted() -> None:
    assert may_be_parted(T.Muon(parameters()[:1]), CPU) is True


@pytest.mark.parametrize("make", [o.CountingCalls, o.CountingInState, o.Clipping, o.Estimating])
def test_who_looks_at_all_or_counts_calls_may_not(make: Callable[..., Any]) -> None:
    assert may_be_parted(make(parameters()), CPU) is False


def test_a_schedule_that_begins_at_zero_hides_nothing() -> None:
    optimizer = o.Clipping(parameters())
    T.lr_scheduler.LambdaLR(optimizer, lambda t: t / 10)
    assert [group["lr"] for group in optimizer.param_groups] == [0]
    assert may_be_parted(optimizer, CPU) is False
    assert [group["lr"] for group in optimizer.param_groups] == [0]


@pytest.mark.parametrize("make", [T.LBFGS, o.Wrapping])
def test_a_trial_that_tells_nothing_says_so(make: Callable[..., Any]) -> None:
    assert may_be_parted(make(parameters()), CPU) is None


def test_a_list_in_a_group_is_not_shared_with_the_trial() -> None:
    params = parameters()
    optimizer = o.Chain([{"params": params, "history": [torch.zeros(2)]}])
    assert may_be_parted(optimizer, CPU) is None


def test_nothing_is_left_of_a_trial() -> None:
    params = parameters()
    optimizer = T.AdamW(params, lr=0.1)
    scheduler = T.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook of the user's ran"))
    before = copy.deepcopy((params, optimizer.state_dict(), scheduler.state_dict()))
    drawn = torch.get_rng_state(), random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert may_be_parted(optimizer, CPU) is True
    after = params, optimizer.state_dict(), scheduler.state_dict()
    assert all(map(torch.equal, before[0], after[0]))
    assert before[1:] == after[1:]
    assert all(p.grad is None for p in params)
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1] == random.getstate()
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()  # it has not been called


def test_groups_of_other_options_are_tried_too() -> None:
    a, b = parameters()
    assert may_be_parted(T.AdamW([{"params": [a], "lr": 0.5}, {"params": [b]}]), CPU) is True
