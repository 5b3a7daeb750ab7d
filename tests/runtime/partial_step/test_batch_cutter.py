"""How batches are cut is said where it is not plain; what a user's hook returns is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.partial_step.micro_batches import BatchCutter

x, y, mask = torch.ones(8, 5), torch.ones(8), torch.ones(5, 5)


def test_what_is_copied_whole_is_said_once() -> None:
    said: list[str] = []
    cutter = BatchCutter(4, say=said.append)
    for batch in ({"x": x, "mask": mask, "y": y}, {"x": x[:6], "mask": mask, "y": y[:6]}):
        cutter.cut(batch)
    assert said == ["lightning_cyclic cuts batches into 4 micro-batches: cut: x, y; whole: mask"]
    assert cutter.report() == "\n".join(said)


def test_what_was_whole_stays_whole_with_as_many_rows_as_samples() -> None:
    cutter = BatchCutter(4)
    cutter.cut({"x": x, "mask": mask})
    for part in cutter.cut({"x": x[:5], "mask": mask}):
        assert part.batch["mask"] is mask


def test_plain_batches_are_not_spoken_of() -> None:
    said: list[str] = []
    cutter = BatchCutter(4, say=said.append)
    assert cutter.report() is None
    cutter.cut([x, y])
    assert said == []
    assert cutter.report() == (
        "lightning_cyclic cuts batches into 4 micro-batches: cut: batch[0], batch[1]"
    )


def test_the_hook_cuts_in_the_place_of_the_tensors() -> None:
    cutter = BatchCutter(2, lambda batch, num: [(batch[:3], 3), (batch[3:], 5)])
    assert [part.size for part in cutter.cut(x)] == [3, 5]
    plain = BatchCutter(2, lambda batch, num: list(batch.split(5)))
    assert [part.size for part in plain.cut(x)] == [5, 3]
    assert BatchCutter(1, lambda batch, num: 1 / 0).cut(x)[0].batch is x


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (None, "split_batch returned NoneType for 2 micro-batches; allowed: a list of 2"),
        ([], "split_batch returned 0 parts for 2"),
        ([x, x, x], "split_batch returned 3 parts for 2"),
        ([x, x], r"not clear: they have \[8, 8\] samples by their tensors, and the batch 8"),
        (["a", "b"], "not clear: .*return .*part, size"),
        ([(x, 3), (x, 0)], r"not clear: .*\[8, 8\]"),
        ([{"x": x, "z": torch.ones(3)}, x], r"not clear: .*z float32\[3\]; allowed: parts whose"),
    ],
    ids=str,
)
def test_what_a_hook_may_not_return_is_refused(parts: Any, said: str) -> None:
    with pytest.raises(StepError, match=said):
        BatchCutter(2, lambda batch, num: parts).cut(x)
