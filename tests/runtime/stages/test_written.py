"""Written weights: which changes of a forward are those of one device, and that none stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.stages.cuts import refuse_written
from lightning_cyclic.runtime.stages.survey import survey

Change = Callable[[nn.Parameter], object]


class Changed(nn.Module):
    """Scales its weight in each call."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.inner = nn.Identity()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self.weight)
        return self.inner(x @ self.weight)


def in_place(p: nn.Parameter) -> None:
    p.mul_(0.5)


def through_data(p: nn.Parameter) -> None:
    p.data.mul_(0.5)


def through_a_view(p: nn.Parameter) -> None:
    p[0].mul_(0.5)


def by_setting(p: nn.Parameter) -> None:
    p.data = p.data * 0.5


def refusal(net: nn.Module, step: Callable[[], object], *, keeps_order: bool = True) -> str:
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    seen = survey(net, step)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters()), "not put back"
    try:
        refuse_written(seen, keeps_order=keeps_order)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("change", [in_place, by_setting])
def test_a_module_may_change_its_own_weights_where_forwards_keep_their_order(
    change: Change,
) -> None:
    net = nn.Sequential(nn.Linear(2, 2), Changed(change))
    assert refusal(net, lambda: net(torch.ones(1, 2))) == ""
    text = refusal(net, lambda: net(torch.ones(1, 2)), keeps_order=False)
    assert "changes parameter '1.weight'" in text
    assert "test_written.py:" in text


@pytest.mark.parametrize("change", [through_data, through_a_view])
def test_changes_that_autograd_does_not_see_are_refused(change: Change) -> None:
    net = nn.Sequential(nn.Linear(2, 2), Changed(change))
    assert "changes parameter '1.weight'" in refusal(net, lambda: net(torch.ones(1, 2)))


def test_changes_by_code_that_every_rank_runs_are_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def step() -> Tensor:
        in_place(net[0].weight)
        return net(torch.ones(1, 2))

    assert "changes parameter '0.weight'" in refusal(net, step)


def test_weights_that_others_use_are_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), Changed(in_place))
    assert "changes parameter '1.weight'" in refusal(
        net, lambda: net(torch.ones(1, 2)) + net[1].weight.sum()
    )


def test_a_module_that_stages_may_divide_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), Changed(in_place))
    net[1].inner = nn.Linear(2, 2)
    assert "changes parameter '1.weight'" in refusal(net, lambda: net(torch.ones(1, 2)))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_of_limited_norm_are_put_back(kind: type[nn.Embedding]) -> None:
    net = nn.Sequential(kind(4, 3, max_norm=0.1), nn.Linear(3, 2))
    words = torch.tensor([[0, 1]])
    assert refusal(net, lambda: net(words)) == ""
    assert "changes parameter '0.weight'" in refusal(net, lambda: net(words), keeps_order=False)


def test_reading_data_is_no_change() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def step() -> Tensor:
        return net(torch.ones(1, 2)) + net[0].weight.data.norm() + net[0].weight.data.t().sum()

    assert refusal(net, step, keeps_order=False) == ""
