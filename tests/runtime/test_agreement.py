"""What all workers must see alike, and how a difference is told."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_cyclic.errors import ConfigurationError, StepError
from lightning_cyclic.runtime.agreement import (
    describe_batch,
    require_same_lines,
    require_same_module,
    require_same_number,
)
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.transport.crew import Crew
from tests.harness import processes


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(2, 3), "Tensor of 1: float32 with 2 dims"),
        ([torch.zeros(2), torch.tensor(1)], "list of 2: float32 with 1 dim, int64 with 0 dims"),
        ({"x": torch.zeros(1).half(), "n": 3}, "dict (n, x) of 2: int, float16 with 1 dim"),
        (["a", None], "list of 2: str, NoneType"),
    ],
)
def test_a_batch_is_described_by_structure_dtypes_and_dims(batch: Any, text: str) -> None:
    assert describe_batch(batch) == text


def test_the_order_of_a_dictionary_is_no_difference() -> None:
    x, y = torch.zeros(2), torch.ones(2, 2)
    assert describe_batch({"x": x, "y": y}) == describe_batch({"y": y, "x": x})
    assert describe_batch({"x": x, "y": x}) != describe_batch({"x": x, "z": x})


def test_sizes_are_no_difference() -> None:
    assert describe_batch(torch.zeros(2, 3)) == describe_batch(torch.zeros(5, 7))


def test_the_first_difference_is_told() -> None:
    require_same_lines("orders", ["a\nb", "a\nb"], "the same")
    with pytest.raises(StepError) as caught:
        require_same_lines("orders", ["a\nb", "a\nb", "a\nc\nd"], "the same")
    text = str(caught.value)
    assert text == "ranks differ in orders: rank 0 has 'b', rank 2 has 'c'; allowed: the same"
    with pytest.raises(StepError, match="rank 0 has 'b', rank 1 has 'nothing'"):
        require_same_lines("orders", ["a\nb", "a"], "the same")


def one_of_two(is_first: bool) -> type[nn.Module]:
    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu() if x.dim() in {2, 3} else x

    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

    if is_first:
        Other.forward = One.forward  # type: ignore[method-assign, assignment]
    return Other


def decorated(number: int) -> type[nn.Module]:
    """Return a class of which a property has another constant."""
    source = "@property\n@torch.no_grad()\ndef scale(self):\n    return {}"
    space: dict[str, Any] = {"torch": torch}
    exec(source.format(number), space)

    class One(nn.Module):
        scale = space["scale"]

    return One


def with_another_method(rank: int) -> type[nn.Module]:
    """Return a class that has a method on some ranks alone."""

    class One(nn.Module):
        pass

    if rank:
        One.on_fit_start = lambda self: None  # type: ignore[attr-defined]
    return One


def agree() -> list[str]:
    rank, world_size = int(os.environ["NODE_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    assembly, what = Assembly(Crew(20.0)), "to begin"

    def same(module: nn.Module) -> None:
        require_same_module(module, assembly, what)

    same(nn.Linear(2, 2))
    require_same_number("things", 3, assembly, what)
    said = []
    for differ in (
        lambda: same(nn.Linear(2, 2 + rank // 2)),
        lambda: same(nn.Linear(2, 2, bias=rank != 1)),
        lambda: same(nn.Linear(2, 2).to(torch.float64 if rank else None)),
        lambda: require_same_number("things", rank, assembly, what),
        lambda: same(nn.Sequential(nn.Tanh() if rank == 2 else nn.ReLU())),
        lambda: same(one_of_two(rank == 1)()),
        lambda: same(nn.Tanh() if rank == 2 else nn.ReLU()),
        lambda: same(decorated(3 + rank)()),
        lambda: same(with_another_method(rank)()),
    ):
        with pytest.raises(ConfigurationError) as caught:
            differ()
        said.append(str(caught.value))
    dist.barrier()  # rank 0 has the store
    return said


@pytest.mark.multi
def test_workers_tell_each_other_where_they_differ() -> None:
    everyone = processes.run(agree, 3)
    assert everyone[0] == everyone[1] == everyone[2]
    shape, presence, dtype, number, kind, code, root, *more = everyone[0]
    assert "rank 0 has 'weight (2, 2) float32 trained'" in shape
    assert "rank 2 has 'weight (3, 2) float32 trained'" in shape
    assert "rank 0 has 'bias (2,) float32 trained', rank 1 has 'nothing'" in presence
    assert "rank 1 has 'weight (2, 2) float64 trained'" in dtype
    assert "different things (rank 0: 0, rank 1: 1, rank 2: 2); allowed: the same" in number
    assert "code: the class of '0' differs between ranks 0 and 2; allowed: the same" in kind
    assert "code: one_of_two.<locals>.Other.forward differs between ranks 0 and 1; al" in code
    assert "code: the class of the module differs between ranks 0 and 2; allowed: the" in root
    inner, added = more
    assert "code: decorated.<locals>.One.scale differs between ranks 0 and 1; allowed" in inner
    assert "with_another_method.<locals>.One.on_fit_start differs between ranks 0 and 1" in added
