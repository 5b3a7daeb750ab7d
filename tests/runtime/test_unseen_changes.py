"""Unseen changes: the graph goes on with the new values, and does not refuse its backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_cyclic.runtime import unseen_changes
from lightning_cyclic.runtime.unseen_changes import unseen

_of_torch = unseen_changes._unsafe_preserve_version_counter


def one_at_a_time(tensor: Tensor) -> object:
    """Keep the count of one tensor, as torch 2.6 does, which takes no tuple."""
    assert isinstance(tensor._version, int)
    return _of_torch(tensor)


@pytest.mark.parametrize("keep", [_of_torch, one_at_a_time])
def test_a_backward_reads_what_was_written_unseen(
    keep: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unseen_changes, "_unsafe_preserve_version_counter", keep)
    factors = [torch.ones(3), torch.ones(3)]
    x = torch.ones(3, requires_grad=True)
    made = x * factors[0] + x * factors[1]
    before = [f._version for f in factors]
    with torch.no_grad(), unseen(factors):
        for f in factors:
            f.fill_(5)
    made.sum().backward()
    assert [f._version for f in factors] == before
    assert x.grad is not None
    assert x.grad.tolist() == [10, 10, 10]


def test_no_tensors_are_no_matter() -> None:
    with unseen([]):
        pass
