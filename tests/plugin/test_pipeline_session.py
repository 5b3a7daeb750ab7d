"""What the finder of a pipeline's stages tells of branches, from a survey with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from lightning_cyclic.plugin import pipeline_session
from lightning_cyclic.plugin.pipeline_session import CutFinder
from lightning_cyclic.strategy import CyclicStrategy
from tests.runtime.stages.test_branches import SAID, SEEN

TOLD = SAID.replace("8 ms", "24 ms").replace("10 ms", "30 ms").partition("\n")[0]


def reported(monkeypatch: pytest.MonkeyPatch, preset: str, workers: int = 3, **given: Any) -> str:
    """Find the stages of the surveyed step, and report."""
    monkeypatch.setattr(pipeline_session, "survey", lambda *args, **more: SEEN)
    options = replace(CyclicStrategy(preset, **given)._options, num_workers=workers)
    finder = CutFinder(options, state_per_param=2.0)
    text = finder.report(finder.find(nn.Module(), lambda: None))
    assert text is not None
    return text


@pytest.mark.parametrize("stages", [3, "auto"])
def test_what_another_order_of_branches_would_gain(
    monkeypatch: pytest.MonkeyPatch, stages: Any
) -> None:
    text = reported(monkeypatch, "1f1b", stages=stages)
    assert 'CyclicStrategy(stages=["left2", "join"])' in text
    assert TOLD in text


def test_messages_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = reported(monkeypatch, "1f1b", stages=3, bandwidth=8 / 0.015)  # 15 ms for each tensor
    assert "another order" not in text


def test_stages_that_were_named_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    text = reported(monkeypatch, "1f1b", stages=["left2", "right2"])
    assert "another order" not in text


def test_one_device_balances_memory_and_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    text = reported(monkeypatch, "cyclic_dp", workers=1, stages=3, num_micro=3)
    assert "another order" not in text
