"""What the micro-batches of a batch returned besides the loss, put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cyclic.plugin.records import further_outputs, weighted_mean

LOSS = torch.ones(())


def together(*values: Any, sizes: tuple[int, ...] = (2, 1)) -> Any:
    outputs = [{"loss": LOSS, "value": value} for value in values]
    return further_outputs(outputs, sizes[: len(values)])["value"]


def test_numbers_are_averaged_by_samples() -> None:
    assert float(together(torch.tensor(1.0), torch.tensor(4.0))) == 2.0


def test_rows_are_concatenated_in_any_container() -> None:
    found = together({"y": [torch.zeros(2, 3)]}, {"y": [torch.ones(1, 3)]})
    assert found["y"][0].tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]


def test_what_is_the_same_for_all_is_itself() -> None:
    assert together(("text", 3), ("text", 3)) == ("text", 3)


@pytest.mark.parametrize(
    "values",
    [
        ("a", "b"),
        (1, 1.0),
        (torch.tensor(1), torch.tensor(2)),
        (torch.zeros(5), torch.zeros(5)),
        (torch.zeros(2, 3), torch.zeros(1, 4)),
        ([1], [1, 2]),
        (None, torch.zeros(())),
    ],
    ids=str,
)
def test_anything_else_is_listed_by_micro_batch(values: tuple[Any, ...]) -> None:
    found = together(*values)
    assert type(found) is list
    assert all(x is y for x, y in zip(found, values, strict=True))


def test_one_micro_batch_gives_what_it_gave() -> None:
    value = object()
    assert together(value) is value


def test_outputs_that_are_no_mappings_have_nothing_further() -> None:
    assert further_outputs([LOSS, LOSS], [1, 1]) == {}
    assert further_outputs([{"loss": LOSS, "a": 1}, {"loss": LOSS}], [1, 1]) == {}


def test_one_loss_keeps_its_bits() -> None:
    loss = torch.tensor(0.1)
    assert weighted_mean([loss], [7]) is loss
