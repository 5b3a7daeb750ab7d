"""Layouts: what is kept, in the order of an int32 index, and back in place."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_cyclic import ConfigurationError
from lightning_cyclic.plugin.precision import compressed
from lightning_cyclic.plugin.precision.compressed import Layout, check_size


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    bits = draw(st.lists(st.booleans(), min_size=prod(shape), max_size=prod(shape)))
    return torch.tensor(bits).view(shape)


@settings(deadline=None)
@given(masks())
def test_what_is_compressed_comes_back_where_it_was(mask: Tensor) -> None:
    layout = Layout.of(mask)
    dense = torch.randn(mask.shape)
    values = layout.compress(dense)
    assert layout.index.dtype == torch.int32
    assert torch.equal(values, dense[mask])
    assert torch.equal(layout.expand(values), dense * mask)
    assert torch.equal(layout.mask, mask)
    other = torch.full(mask.shape, 7.0)
    layout.expand_into(values, other)
    assert torch.equal(other, torch.where(mask, dense, 7.0))


def test_weight_is_written_in_place_and_in_its_own_dtype() -> None:
    layout = Layout.of(torch.tensor([[True, False], [False, True]]))
    weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    address, version = weight.data_ptr(), weight._version
    layout.expand_into(torch.tensor([1.0, 2.0]), weight)
    assert weight.tolist() == [[1, 0], [0, 2]]
    assert weight.data_ptr() == address
    assert weight._version > version  # a graph that has saved it notices


def test_channels_last() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    layout = Layout.of(weight > 0)
    values = layout.compress(weight)
    assert torch.equal(values, weight[weight > 0])
    layout.expand_into(-values, weight)
    assert bool((weight <= 0).all())
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_many_elements_are_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "_AT_ONCE", 3)
    mask = torch.arange(20) % 3 != 0
    layout, dense = Layout.of(mask), torch.zeros(20)
    layout.expand_into(torch.arange(1.0, 14.0), dense)
    assert dense[mask].tolist() == list(range(1, 14))


def test_positions_as_int64_are_never_there_at_once() -> None:
    """Only a profiler sees the copy that index_put_ makes within."""
    mask = torch.arange(3_000_000) % 2 == 0
    layout, weight = Layout.of(mask), torch.zeros(3_000_000, dtype=torch.bfloat16)
    values = torch.ones(1_500_000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        layout.expand_into(values, weight)
        layout.compress(weight)
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert max(sizes) == 2 * 1_500_000  # what compress returns
    assert sorted(set(sizes))[-2] == 8 << 18  # positions, in parts


def test_dense_layout_is_the_tensor_itself() -> None:
    layout, weight = Layout(None), torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))
    layout.expand_into(torch.ones(2, 2), weight)
    assert weight.tolist() == [[1, 1], [1, 1]]
    assert layout.compress(weight).data_ptr() == weight.data_ptr()


def test_equal_masks_have_equal_digests() -> None:
    mask = torch.tensor([[True, False], [False, True]])
    digest = Layout.of(mask).digest
    assert digest == Layout.of(mask.clone()).digest
    assert digest != Layout.of(~mask).digest
    assert digest != Layout.of(mask.view(4)).digest


def test_more_elements_than_int32_can_tell_apart() -> None:
    check_size((2**31 - 1,))
    with pytest.raises(ConfigurationError, match=r"'w' has 2147483648 elements.*up to 2147483647"):
        check_size((2**16, 2**15), "w")
    with pytest.raises(ConfigurationError, match="positions of kept elements are int32"):
        Layout.of(torch.empty(2**16, 2**15, dtype=torch.bool, device="meta"))
