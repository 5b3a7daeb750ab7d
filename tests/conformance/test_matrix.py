"""Every cell of the matrix; a part of it by default, all of it with -m exhaustive."""

from __future__ import annotations

import pytest

from tests.conformance import table
from tests.conformance.cases import CASES
from tests.conformance.harness import PRESETS, check
from tests.harness.rows import more

pytestmark = pytest.mark.multi


ALIKE = {  # rows of which others show the same by default, here or elsewhere
    # tests/training trains these networks and precisions, clips and stops so, and refuses these
    "cls_token", "bert", "vit",
    "bf16-mixed", "bf16-true", "64-true", "accumulated", "clipped by value", "max_steps",
    "early stopping", "skipping", "clipped by the norm of all", "limited embedding",
    "sparse embedding", "moving teacher, later", "in place", "gathers", "counted steps",
    # "unet" has glue between stages and returns a dict, "many flags" trains on the shared step,
    # "moving loss" counts, too, and "thawing" does by hand what "fine-tuning" does in a callback
    "skips", "gives more", "shared step", "counter", "fine-tuning", "statistics",
    # "t5", "low rank", "audio classifier", "Muon" and "validated in mid epoch" have more in them
    "whisper", "gpt2 with LoRA", "word classifier", "Lion", "read in hooks",
    "validated every other epoch", "without a sanity check",
    # "many flags" has these at once; benchmark=True says nothing to a CPU
    "deterministic", "benchmark", "simple profiler", "lambda callback", "timer", "rate monitor",
    "model summary", "progress bar", "throughput", "device statistics", "limited batches",
    "without inference mode", "logged every step",
}  # fmt: skip


ALSO = {  # workers of whole steps have another code for it
    ("updates left out", "cyclic_dp"), ("compiled block", "cyclic_dp"),
    # and so have those that shard weights, and pipelines that update within optimizer_step
    ("frozen in the step", "cyclic_zero"), ("group in a hook", "1f1b"),
    ("group behind the backward", "cyclic_dp"), ("group behind the backward", "1f1b"),
}  # fmt: skip


def by_default(number: int, name: str, preset: int) -> bool:
    """Say whether a cell always runs: each row that is like no other under one preset in turn."""
    in_turn = name not in ALIKE and number % len(PRESETS) == preset
    return in_turn or (name, list(PRESETS)[preset]) in ALSO


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        (name, preset) if by_default(n, name, k) else more(name, preset)
        for n, name in enumerate(CASES)
        for k, preset in enumerate(PRESETS)
    ],
)
def test_cell(name: str, preset: str) -> None:
    check(name, preset)


@pytest.mark.skipif("averaged weights" not in CASES, reason="made with a newer Lightning")
def test_the_page_says_what_is_shown_here() -> None:
    assert table.PAGE.read_text() == table.page(), "run python -m tests.conformance.table"


def test_the_matrix_is_large() -> None:
    assert CASES.keys() >= ALIKE
    assert len(CASES) >= 80
    assert len(PRESETS) == 10
