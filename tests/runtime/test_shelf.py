"""The shelf: tensors in a file that goes with them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from lightning_cyclic.runtime.mapped_files import MappedFiles
from lightning_cyclic.runtime.shelf import Shelf, in_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (40, 70), (0, 2)])
def test_tensors_of_any_form_keep_what_is_written(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    shelf = Shelf(tmp_path / "made")
    values = torch.rand(shape).mul_(9).to(dtype)
    made = [shelf.new(shape, dtype).copy_(values + k) for k in range(3)]
    for k, x in enumerate(made):
        assert x.dtype == (values + k).to(dtype).dtype
        assert torch.equal(x, (values + k).to(dtype))
    assert in_memory(shape, dtype).shape == shape


def test_the_file_has_no_name_and_goes_with_the_last_tensor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    shelf = Shelf(tmp_path)
    x = shelf.new((1000,), torch.float32).fill_(2)
    assert not list(tmp_path.iterdir())
    del shelf
    gc.collect()
    assert x.sum() == 2000
    del x
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_tensors_in_files_are_told_from_those_in_memory(tmp_path: Path) -> None:
    torch.save({"w": torch.rand(5000)}, tmp_path / "w.pt")
    mapped = torch.load(tmp_path / "w.pt", mmap=True, weights_only=True)["w"]
    files = MappedFiles()
    assert files.hold(mapped)
    assert files.hold(mapped[7:])
    assert not files.hold(torch.rand(5000))
    assert not files.hold(torch.empty(0))
    assert not files.hold(torch.empty(3, device="meta"))
