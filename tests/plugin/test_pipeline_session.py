"""What the finder of a pipeline's stages tells of branches, from a survey with round numbers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cyclic import PipelineStrategy
from lightning_cyclic.plugin import pipeline_session
from lightning_cyclic.plugin.pipeline_session import CutFinder
from lightning_cyclic.registration import make_strategy
from tests.cli.test_branches import SEEN


@pytest.mark.parametrize(
    ("stages", "clock"),
    [("auto", "counted"), (3, "counted"), (["left2"], "counted"), ("measured", "measured")],
)
def test_times_are_counted_unless_measured_ones_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, stages: Any, clock: str
) -> None:
    given: list[str] = []

    def surveyed(*args: Any, **more: Any) -> Any:
        given.append(more["clock"])
        return SEEN

    monkeypatch.setattr(pipeline_session, "survey", surveyed)
    options = replace(PipelineStrategy("1f1b", stages=stages)._options, num_workers=3)
    CutFinder(options, state_per_param=2.0).find(nn.Module(), lambda: None)
    assert given == [clock]


class Sleepy(nn.Linear):
    """A layer of which one takes its time."""

    def __init__(self, sleeps: bool) -> None:
        super().__init__(16, 16)
        self._sleeps = sleeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._sleeps:
            time.sleep(0.02)
        return super().forward(x)


@pytest.mark.parametrize(("preset", "state"), [("1f1b", 2.0), ("1f1b", None), ("cyclic_mp", 2.0)])
def test_a_layer_that_sleeps_moves_the_measured_stages_alone(
    preset: str, state: float | None
) -> None:
    def starts(sleeper: int, stages: str) -> tuple[str, ...]:
        model, x = nn.Sequential(*(Sleepy(k == sleeper) for k in range(6))), torch.ones(4, 16)
        workers = 3 if preset == "cyclic_mp" else 2
        options = replace(make_strategy(preset, stages=stages)._options, num_workers=workers)
        return CutFinder(options, state).find(model, lambda: model(x)).starts

    assert starts(0, "auto") == starts(5, "auto") == ("3",)
    assert starts(0, "measured") == ("1",)
    assert starts(5, "measured") == ("5",)


class Widths(nn.Module):
    """Multiplies matrices of some sizes, in turn."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(n, n) for n in sizes)

    def forward(self) -> torch.Tensor:
        each = [part(torch.ones(8, part.in_features)).sum() for part in self.parts]
        return torch.stack(each).sum()


@pytest.mark.parametrize(
    ("workers", "widths", "said"),
    [(2, (4, 256), "Stage 0 of 2 has "), (2, (256, 256), ""), (1, (4, 256), "")],
)
def test_a_stage_with_hardly_anything_to_do_is_told_of(
    monkeypatch: pytest.MonkeyPatch, workers: int, widths: tuple[int, ...], said: str
) -> None:
    told: list[str] = []
    monkeypatch.setattr(pipeline_session, "rank_zero_info", told.append)
    options = replace(PipelineStrategy("1f1b", stages=["parts.1"])._options, num_workers=workers)
    module = Widths(*widths)
    CutFinder(options, state_per_param=2.0).find(module, module)
    assert len(told) == bool(said)
    assert said in "".join(told)
