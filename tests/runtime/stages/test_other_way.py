"""The way of another step through the stages: found where there is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.runtime.stages.cuts import Cuts, choose_cuts
from lightning_cyclic.runtime.stages.other_way import cuts_along
from lightning_cyclic.runtime.stages.survey import survey

X = torch.ones(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.head = nn.Linear(3, 1)
        self.judge = nn.Linear(1, 1)  # which training does not use

    def train_step(self) -> Tensor:
        return self.head(self.net.decoder(self.net.encoder(X))).sum()


def along(step: Callable[[Model], Tensor], starts: list[str]) -> tuple[Cuts, Cuts | None]:
    """Return the stages of training, and those of another step."""
    model = Model()
    cuts = choose_cuts(survey(model, model.train_step), starts)
    model.eval()
    return cuts, cuts_along(survey(model, lambda: step(model)), cuts)


def test_the_same_calls_go_the_same_way() -> None:
    cuts, other = along(lambda m: m.train_step(), ["net.decoder", "head"])
    assert other == cuts


def test_a_module_that_is_called_as_a_whole_is_split() -> None:
    cuts, other = along(lambda m: m.head(m.net(X)), ["net.decoder", "head"])
    assert other is not None
    assert (other.starts, other.split) == (cuts.starts, frozenset({"net"}))
    assert other.parameters == cuts.parameters


def test_a_start_that_is_not_called_is_replaced() -> None:
    _, other = along(lambda m: m.net.decoder[0](m.net.encoder[0](X)).sum(), ["net.decoder"])
    assert other is not None
    assert other.starts == ("net.decoder.0",)


@pytest.mark.parametrize(
    "step",
    [
        lambda m: m.net.encoder(m.net.decoder(X)),  # the other way round
        lambda m: m.net.encoder(m.net(X)),  # and back
        lambda m: m.net.encoder(X),  # not as far as the last stage
        lambda m: m.net(m.judge(X[:, :1]).expand(2, 3)),  # whose home is the head's
    ],
)
def test_there_is_no_way_against_the_order(step: Callable[[Model], Tensor]) -> None:
    assert along(step, ["net.decoder", "head"])[1] is None
