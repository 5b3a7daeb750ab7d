"""Reductions that are held back: run later, in order, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_cyclic.plugin.reductions import HeldReductions


def test_what_is_held_takes_its_value_later_and_in_order() -> None:
    reductions, seen = HeldReductions(), []

    def reduce(tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
        seen.append((group, reduce_op))
        return tensor.mul_(2) if reduce_op == "in place" else tensor + 1

    a, b = torch.ones(2), torch.ones(())
    assert not reductions.holding
    with reductions.held():
        assert reductions.holding
        assert reductions.hold(a, None, "in place") is a
        assert reductions.hold(b, "group", "mean") is b
    assert (float(a[0]), float(b)) == (1.0, 1.0)
    reductions.run(reduce)
    assert (float(a[0]), float(b)) == (2.0, 2.0)
    reductions.run(reduce)  # nothing is held twice
    assert seen == [(None, "in place"), ("group", "mean")]
