"""Stages of whole steps: where they begin, and where frozen parameters would be trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.stages.stage_map import Profile, Recorder, StageMap, make_stages


def profiled(*frozen: int) -> tuple[Profile, dict[str, int]]:
    """Run a chain of five layers and an unused one, some of them frozen."""
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    for k in frozen:
        net[k].requires_grad_(False)
    trained = {n: p for n, p in net.named_parameters() if p.requires_grad}
    recorder = Recorder(net, trained)
    with recorder.recording():
        net[:5](torch.ones(1, 4))
    return recorder.profile(), {n: p.numel() for n, p in trained.items()}


def layers(names: tuple[str, ...]) -> str:
    return "".join(dict.fromkeys(n[0] for n in names))


def stages(profile: Profile, sizes: dict[str, int], chosen: int | list[str]) -> list[str]:
    """Return "trained layers/frozen layers" of each stage."""
    found = make_stages(profile, sizes, chosen).stages
    return [f"{layers(s.parameters)}/{layers(s.frozen)}" for s in found]


@pytest.mark.parametrize(
    ("frozen", "chosen", "found"),
    [
        ((), 2, ["0125/", "34/"]),
        ((0, 1), 2, ["235/01", "4/"]),
        ((1, 2, 3), 2, ["05/", "4/123"]),
        ((0, 1, 2, 3), 1, ["45/0123"]),
        ((3, 4, 5), 3, ["0/5", "1/", "2/34"]),
        ((0, 1, 2), ["1", "3"], ["5/0", "/12", "34/"]),
        ((0, 1, 2, 3, 4), ["2"], ["5/01", "/234"]),
    ],
)
def test_frozen_layers_go_with_what_is_trained_behind_them(
    frozen: tuple[int, ...], chosen: int | list[str], found: list[str]
) -> None:
    assert stages(*profiled(*frozen), chosen) == found


def test_more_stages_than_places_with_trained_parameters_are_refused() -> None:
    with pytest.raises(PlanError, match="only 2 places where a stage with trained parameters can"):
        stages(*profiled(0, 1, 2), 3)


def test_what_is_unfrozen_is_trained_in_the_stage_that_uses_it() -> None:
    profile, sizes = profiled(0, 3)
    made = make_stages(profile, sizes, ["2"])
    thawed = made.training(["0.weight", "3.bias", "4.weight"])
    assert thawed.stage_of == made.stage_of | {"0.weight": 0, "3.bias": 1}
    assert [s.frozen for s in thawed.stages] == [("0.bias",), ("3.weight",)]
    assert StageMap.from_data(thawed.as_data()) == thawed
    with pytest.raises(PlanError, match="parameter '7.weight' is trained now, but it was no part"):
        made.training(["0.weight", "7.weight"])


def test_checkpoints_that_do_not_know_of_frozen_parameters_are_read() -> None:
    made = make_stages(*profiled(), 2)
    data = [{k: v for k, v in stage.items() if k != "frozen"} for stage in made.as_data()]
    assert StageMap.from_data(data) == made
