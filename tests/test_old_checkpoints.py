"""Checkpoints of before the redesign: training goes on from them, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import processes
from tests.corpus import assert_same
from tests.golden_checkpoints import CASES, FOLDER, NUM_STEPS, SAVED_AT, train
from tests.rows import more

pytestmark = pytest.mark.multi


@pytest.mark.parametrize("name", list(CASES))
def test_training_goes_on_from_a_checkpoint_of_before(name: str, tmp_path: Path) -> None:
    num_processes, _ = CASES[name]
    old, new = FOLDER / f"{name}.ckpt", tmp_path / "new.ckpt"
    whole = processes.run(train, num_processes, name, str(new))
    rest = processes.run(train, num_processes, name, "", str(old))
    assert rest[0]["global_step"] == NUM_STEPS
    assert rest[0]["stage_of"] == whole[0]["stage_of"]
    if not _same_arithmetic(old, new):
        pytest.skip("this processor rounds otherwise than the one that wrote the checkpoint")
    for one, other in zip(rest, whole, strict=True):
        assert_same(one["weights"], other["weights"], name)


@pytest.mark.parametrize("name", ["cyclic_dp", more("cyclic_dp_v1"), more("lockstep_dp")])
def test_the_stages_of_a_checkpoint_are_kept_where_auto_would_make_others(name: str) -> None:
    old = str(FOLDER / f"{name}.ckpt")
    named = processes.run(train, 2, name, "", old)
    auto = processes.run(train, 2, name, "", old, {"stages": "auto"})
    assert max(auto[0]["stage_of"].values()) == 3  # of four; auto makes two of a module this small
    for one, other in zip(auto, named, strict=True):
        assert one["stage_of"] == other["stage_of"]
        assert_same(one["weights"], other["weights"], name)


def _same_arithmetic(old: Path, new: Path) -> bool:
    a, b = (torch.load(path, weights_only=False)["state_dict"] for path in (old, new))
    return all(torch.equal(a[key], b[key]) for key in a)


def test_a_checkpoint_of_before_has_what_one_of_today_has(tmp_path: Path) -> None:
    def keys(path: Path) -> Any:
        saved = torch.load(path, weights_only=False)
        assert saved["global_step"] == SAVED_AT
        return saved.keys(), saved["lightning_cyclic"].keys(), saved["lightning_cyclic"]["plan"]

    for name, (num_processes, _) in CASES.items():
        new = tmp_path / f"{name}.ckpt"
        processes.run(train, num_processes, name, str(new))
        (whole, ours, plan), now = keys(FOLDER / new.name), keys(new)
        added = {"starts", "loaders", "generators", "format"}
        assert plan.pop("warmup_steps") == 0  # an option that has left, as these have
        assert now == (whole, (ours | added) - {"lrs_ahead"}, plan), name
