"""What a step is given: of a batch, or of an iterator from which it takes one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lightning_cyclic.errors import StepError
from lightning_cyclic.plugin.step_arguments import StepArguments


class Loader(Iterator[Any]):
    """Stand for Lightning's iterator over two loaders with two batches."""

    data_fetcher = "Lightning's"

    def __init__(self) -> None:
        self._items = iter([("a", 0, 0), ("b", 1, 1)])
        self.done = False

    def __next__(self) -> Any:
        return next(self._items)


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "given"),
    [
        (("a",), {}, "step", ("b",)),
        (("a", 3), {}, "step", ("b", 3)),
        ((), {"batch": "a", "batch_idx": 3, "dataloader_idx": 0}, "step", ("b", 3, 0)),
        (("a", 3, 2), {}, "step on dataloader 2", ("b", 3, 2)),
    ],
)
def test_a_batch_gives_way_to_a_part_of_it(args: Any, kwargs: Any, kind: str, given: Any) -> None:
    found = StepArguments(args, kwargs)
    assert found.batch == "a"
    assert found.kind("step") == kind
    assert found.around("b") == given


def test_each_run_takes_its_part_from_an_iterator_of_its_own() -> None:
    loader = Loader()
    first, second = StepArguments((loader,), {}), StepArguments((loader,), {})
    assert (first.batch, second.batch) == ("a", "b")
    assert second.kind("step") == "step on dataloader 1"
    for part in ("x", "y"):
        (iterator,) = second.around(part)
        assert iter(iterator) is iterator
        assert iterator.done is False
        assert next(iterator) == (part, 1, 1)
    with pytest.raises(StopIteration):
        StepArguments((loader,), {})


def test_a_second_batch_in_one_step_is_refused() -> None:
    (iterator,) = StepArguments((Loader(),), {}).around("x")
    next(iterator)
    with pytest.raises(StepError, match="takes a second batch from dataloader_iter; allowed: one"):
        next(iterator)
