"""Stages of whole steps: where they begin, and where frozen parameters would be trained."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

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


# ---------------------------------------------------------------------- activations


def test_what_forwards_leave_is_counted_by_stages_once_each() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 2))
    named = dict(net.named_parameters())
    recorder = Recorder(net, named, counts=True)
    with recorder.recording():
        net(torch.ones(10, 4))
    profile = recorder.profile()
    # the batch and what Tanh makes, which the next layer saves again; of Sigmoid alike
    assert profile.saved == (10 * 4 * 4 + 10 * 8 * 4, 10 * 8 * 4, 0)
    sizes = {n: p.numel() for n, p in named.items()}
    assert [s.activation_bytes for s in make_stages(profile, sizes, 2).stages] == [480, 320]


def test_a_step_that_is_run_again_counts_once() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 2))
    recorder, saved = Recorder(net, dict(net.named_parameters()), counts=True), []
    for _ in range(2):
        with recorder.recording():
            net(torch.ones(10, 4))
        saved.append(recorder.profile().saved)
    assert saved == [(480, 320, 0)] * 2


def test_a_stage_is_used_later_where_a_later_one_calls_its_module() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    named = dict(net.named_parameters())
    sizes = {n: p.numel() for n, p in named.items()}
    for again, used in ((0, [True, False, False, False]), (3, [False] * 4)):
        recorder = Recorder(net, named)
        with recorder.recording():
            net[again](net(torch.ones(10, 4)))
        stages = make_stages(recorder.profile(), sizes, 4).stages
        assert [stage.is_used_later for stage in stages] == used


def test_nobody_counts_where_there_is_no_graph_or_nobody_asks() -> None:
    profile, sizes = profiled()
    assert make_stages(profile, sizes, 2).stages[0].activation_bytes is None
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    recorder = Recorder(net, dict(net.named_parameters()), counts=True)
    with torch.no_grad(), recorder.recording():
        net(torch.ones(1, 4))
    assert recorder.profile().saved == ()


def test_counting_keeps_no_graph_alive_and_changes_no_gradient() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Softmax(1))
    recorder = Recorder(net, dict(net.named_parameters()), counts=True)
    gc.disable()  # a cycle would be found late, or, beside C++, never
    try:
        with recorder.recording():
            y = net(torch.ones(3, 4)).log()
        (counted,) = torch.autograd.grad(y.sum(), [net[0].weight], retain_graph=True)
        recorder.profile()
        made = StorageWeakRef(y.untyped_storage())
        inner = StorageWeakRef(y.grad_fn._saved_self.untyped_storage())
        del y
        assert made.expired()
        assert inner.expired()
    finally:
        gc.enable()
    (plain,) = torch.autograd.grad(net(torch.ones(3, 4)).log().sum(), [net[0].weight])
    assert torch.equal(counted, plain)
