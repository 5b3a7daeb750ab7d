"""The sum of a tensor's bits is one number, however it is added up."""

from __future__ import annotations

import pytest
import torch

from lightning_cyclic.runtime import bits
from lightning_cyclic.runtime.bits import Mark, digest, kept, put, sum_of_bits, unseen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_large_tensors_are_added_in_parts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(37, 41, dtype=dtype)
    whole = sum_of_bits(x)
    monkeypatch.setattr(bits, "_AT_ONCE", 100)
    assert torch.equal(sum_of_bits(x), whole)
    assert torch.equal(sum_of_bits(x.t().contiguous().t()[::2, :]), sum_of_bits(x[::2].clone()))
    y = x.clone()
    y[5, 7] += 1
    assert not torch.equal(sum_of_bits(y), whole)


def test_a_backward_reads_what_was_written_unseen() -> None:
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


def test_tensors_have_their_values_again_and_graphs_do_not_notice() -> None:
    factor, x = torch.ones(3), torch.ones(3, requires_grad=True)
    made = x * factor
    with kept([factor]):
        put([factor], [torch.zeros(3)])
        assert not factor.any()
    made.sum().backward()
    assert factor.tolist() == [1, 1, 1]


def test_a_mark_is_of_one_value_that_nobody_changes_in_place() -> None:
    x = torch.zeros(2)
    mark = Mark.of(x)
    assert mark.is_of(x)
    assert not mark.is_of(x.clone())
    x.add_(1)
    assert not mark.is_of(x)
    assert Mark.of(x).is_of(x)
    assert Mark.of(None).is_of(None)
    with torch.inference_mode():
        y = torch.ones(1)
    assert Mark.of(y).is_of(y)


def test_a_digest_tells_elements_and_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 50)
    for at_once in (1 << 18, 7):  # in one part, and in many
        monkeypatch.setattr(bits, "_AT_ONCE", at_once)
        others = [x.flip(1), x.flip(0), x.roll(7), x.roll(1), x + 1, x[:2], x.sort().values]
        found = [int(digest(y)) for y in (x, *others)]
        assert len(set(found)) == len(found)
        assert found[0] == int(digest(x.clone())) == int(digest(x.t().contiguous().t()))
    assert torch.equal(digest(torch.tensor([0.0])), digest(torch.tensor([-0.0])))
