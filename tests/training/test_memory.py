"""MemoryTimeline on ranks: no bit changes, steps repeat, and plans say what there will be."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_cyclic import MemoryTimeline
from tests.harness.rows import more
from tests.harness.runs import trained
from tests.harness.trainers import assert_same
from tests.modules.cases import CASES

STEPS = 5, 6, 7
SIZE = 16


def module_of(case: str) -> LightningModule:
    return CASES[case].make(0.0)


class Made:
    """Makes each batch when it is asked for, so that none is there before its step."""

    def __init__(self, case: str) -> None:
        self.case = case

    def __len__(self) -> int:
        return 1 + STEPS[-1]

    def __getitem__(self, k: int) -> Any:
        if k >= len(self):
            raise IndexError
        return CASES[self.case].batch(k, SIZE)


def batches(case: str) -> DataLoader[Any]:
    return DataLoader(Made(case), batch_size=None)  # type: ignore[arg-type]


def seen(trainer: Any, module: nn.Module) -> dict[str, Any]:
    """Return what a rank's timeline says, and what it has left behind."""
    (timeline,) = (c for c in trainer.callbacks if isinstance(c, MemoryTimeline))
    found = timeline.timeline
    assert found is not None
    return {
        "steady": found.steady,
        "diff": [
            sorted((found.pattern(found.spans[1]) - found.pattern(found.spans[n])).items())[:8]
            + ["|"]
            + sorted((found.pattern(found.spans[n]) - found.pattern(found.spans[1])).items())[:8]
            for n in (0, 2)
        ],
        "measured": timeline.measured(),
        "report": timeline.report(),
        "modes": len(_get_current_dispatch_mode_stack()),
        "hooks": sum(bool(p._backward_hooks) for p in module.parameters() if p.is_leaf),
    }


def fit(case: str, strategy: Any, num_ranks: int, *, watched: bool) -> Any:
    timeline = [MemoryTimeline(STEPS)] if watched else []
    return trained(
        partial(module_of, case), strategy, num_ranks, data=partial(batches, case),
        look=seen if watched else None, callbacks=timeline,
    )  # fmt: skip


def of(preset: str, case: str) -> dict[str, Any]:
    return {"preset": preset, "stages": CASES[case].cuts2, "num_microbatches": 2}


PLANS = [
    ("resnet", of("1f1b", "resnet"), 1),
    ("resnet", of("1f1b", "resnet"), 2),
    ("gpt2", of("1f1b", "gpt2"), 1),
    ("gpt2", of("1f1b", "gpt2"), 2),
    ("resnet", {"preset": "cyclic_dp", "stages": 2}, 2),
    more("resnet", of("pipedream_2bw", "resnet"), 2),
    more("gpt2", of("gpipe", "gpt2") | {"activation_checkpointing": "always"}, 2),
    ("resnet", "ddp", 2),
    ("resnet", "auto", 1),
]


@pytest.mark.multi
@pytest.mark.parametrize(("case", "strategy", "num_ranks"), PLANS)
def test_no_bit_changes_and_steps_repeat(case: str, strategy: Any, num_ranks: int) -> None:
    plain, watched = (fit(case, strategy, num_ranks, watched=on) for on in (False, True))
    for before, after in zip(plain, watched, strict=True):
        assert before.losses == after.losses
        assert_same(after.weights, before.weights)
        assert after.found["modes"] == after.found["hooks"] == 0
        print("DIFF", after.found["diff"])
        print(case, strategy, after.found["steady"], after.found["measured"])
        print(after.found["report"])
        assert after.found["steady"] == (STEPS[0], 1)
