"""Masks: given, read, drawn by magnitude, and those of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from lightning_cyclic import ConfigurationError, SparseStatePrecision
from lightning_cyclic.plugin.precision import masks as m
from tests.references import pruned as t

# ---------------------------------------------------------------------- what may be pruned


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.positions_embedding = nn.Parameter(torch.zeros(3, 4))
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.normal = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tokens.weight


def test_what_may_be_pruned() -> None:
    model = Model()
    assert list(m.prunable(model, m.EXCLUDED)) == ["layer.weight", "normal.weight"]
    assert list(m.prunable(model, (*m.EXCLUDED, "normal.*"))) == ["layer.weight"]
    assert "tokens.weight" in m.prunable(model, ("bias",))
    assert "tokens.weight" not in m.prunable(model, ("head.weight",))  # another name of it


# ---------------------------------------------------------------------- by magnitude

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@settings(deadline=None)
@given(SIZES, st.floats(0.05, 0.95), st.integers(0, 99), st.sampled_from([1, 5]))
def test_the_smallest_of_all_are_pruned(
    sizes: list[int], sparsity: float, seed: int, grain: int
) -> None:
    torch.manual_seed(seed)
    tensors = {str(k): (grain * torch.randn(n)).round() / grain for k, n in enumerate(sizes)}
    total = sum(sizes)
    if not 0 < round(sparsity * total) < total:
        return
    masks = m.magnitude_masks(tensors, sparsity)
    flat = torch.cat(list(tensors.values())).abs()
    kept = torch.cat(list(masks.values()))
    order = torch.sort(flat, stable=True).indices  # of equal ones the first go
    wanted = torch.ones(total, dtype=torch.bool)
    wanted[order[: round(sparsity * total)]] = False
    assert torch.equal(kept, wanted)


def test_masks_are_those_of_torch() -> None:
    model = t.mlp()
    layers = [(model[k], "weight") for k in (0, 2, 4)]
    masks = m.magnitude_masks(m.prunable(model, m.EXCLUDED), 0.8)
    prune.global_unstructured(layers, prune.L1Unstructured, amount=0.8)  # type: ignore[no-untyped-call]
    for layer, mask in zip(layers, masks.values(), strict=True):
        assert torch.equal(mask, layer[0].weight_mask.bool())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([[-3.0, 1.0], [0.0, float("inf")]], dtype=dtype)
    assert m.magnitude_masks({"x": x}, 0.5)["x"].tolist() == [[True, False], [False, True]]


def test_nan_is_no_score() -> None:
    with pytest.raises(ConfigurationError, match=r"parameter 'x' has NaN"):
        m.magnitude_masks({"x": torch.tensor([1.0, float("nan"), 2.0])}, 0.5)


def test_nothing_to_prune() -> None:
    with pytest.raises(ConfigurationError, match=r"sparsity=0.1 of 2 elements prunes 0"):
        m.magnitude_masks({"x": torch.ones(2)}, 0.1)


@pytest.mark.parametrize("sparsity", [0, 1, 1.5, -0.1, True, "0.9", float("nan")])
def test_what_is_no_sparsity(sparsity: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"above 0 and below 1; use Owner\(sparsity=0.9\)"
    ):
        m.check_sparsity(sparsity, "Owner")


# ---------------------------------------------------------------------- given masks

ONES = torch.ones(32, 24, dtype=torch.bool)
BAD = {
    "unknown": ({"0.scale": ONES}, r"names '0.scale', which is no parameter of Sequential"),
    "shape": ({"0.weight": ONES.t()}, r"'0.weight' is of .*shape \(24, 32\), for .*\(32, 24\)"),
    "dtype": ({"0.weight": ONES.float()}, r"'0.weight' is of torch.float32 .*torch.bool"),
    "kind": ({"0.weight": [1]}, r"'0.weight' is list, for .*allowed"),
    "empty": ({"0.weight": ~ONES}, r"'0.weight' keeps nothing"),
    "full": ({"0.weight": ONES}, r"'0.weight' keeps everything"),
}


@pytest.mark.parametrize(("masks", "message"), BAD.values(), ids=list(BAD))
def test_masks_that_do_not_fit(masks: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        m.given_masks(masks, t.mlp())


def test_tied_parameters_have_one_mask() -> None:
    module = t.tied()
    mask = torch.rand(t.WIDTH, t.WIDTH) < 0.5
    assert list(m.given_masks({"4.weight": mask}, module)) == ["0.weight"]
    assert len(m.given_masks({"4.weight": mask, "0.weight": mask.clone()}, module)) == 1
    with pytest.raises(ConfigurationError, match=r"differ for '0.weight' and '4.weight'"):
        m.given_masks({"0.weight": mask, "4.weight": ~mask}, module)


def test_a_tensor_too_large_is_refused_by_name() -> None:
    with torch.device("meta"):
        module = nn.Linear(2**16, 2**15)
        mask = torch.empty(2**15, 2**16, dtype=torch.bool)
    with pytest.raises(ConfigurationError, match=r"'weight' has 2147483648 elements"):
        m.given_masks({"weight": mask}, module)


def test_integers_are_not_pruned() -> None:
    module = nn.Module()
    module.count = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)
    with pytest.raises(ConfigurationError, match=r"'count' is .*, for a parameter of torch.int32"):
        m.given_masks({"count": torch.tensor([True, False, True, True])}, module)


# ---------------------------------------------------------------------- those of a fit


def layouts(
    mask: Any = None, sparsity: float | None = None, *, module: Any = None, saved: Any = None
) -> dict[str, Any]:
    found: dict[str, Any] = m.layouts_of(module or t.mlp(), mask, sparsity, ("bias",), saved or {})
    return found


def test_masks_are_drawn_when_the_fit_begins() -> None:
    found = layouts(sparsity=0.5)
    assert list(found) == ["0.weight", "2.weight", "4.weight"]
    total = sum(layout.shape.numel() for layout in found.values())
    assert sum(len(layout.index) for layout in found.values()) == total // 2


def test_layers_that_keep_everything_stay_dense() -> None:
    module = t.mlp()
    with torch.no_grad():
        module[0].weight.add_(100)
    assert list(layouts(sparsity=0.5, module=module)) == ["2.weight", "4.weight"]


def test_a_layer_that_would_be_cut_off_is_refused() -> None:
    module = t.mlp()
    with torch.no_grad():
        module[2].weight.mul_(1e-3)
    with pytest.raises(ConfigurationError, match=r"mask of '2.weight' keeps nothing"):
        layouts(sparsity=0.9, module=module)


def test_files(tmp_path: Path) -> None:
    masks = t.random_masks(t.mlp())
    torch.save(masks, tmp_path / "a.pt")
    found = layouts(str(tmp_path / "a.pt"))
    assert found.keys() == masks.keys()
    assert all(torch.equal(found[n].mask, mask) for n, mask in masks.items())
    with pytest.raises(ConfigurationError, match=r"b.pt' cannot be read .*torch.save\(\{name"):
        layouts(tmp_path / "b.pt")


def test_both_are_refused_and_so_is_neither() -> None:
    with pytest.raises(ConfigurationError, match=r"mask and sparsity=0.9 were both given"):
        SparseStatePrecision({}, 0.9)
    with pytest.raises(ConfigurationError, match=r"has no mask, nor has the checkpoint one"):
        layouts()
    with pytest.raises(ConfigurationError, match=r"mask prunes no parameter"):
        layouts({})


def test_a_module_that_torch_has_pruned_is_refused() -> None:
    module = t.mlp()
    prune.l1_unstructured(module[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigurationError, match=r"Sequential is pruned by torch.nn.utils.prune"):
        layouts(sparsity=0.5, module=module)
    mask = module[0].weight_mask.bool()
    prune.remove(module[0], "weight")  # type: ignore[no-untyped-call]
    assert torch.equal(layouts({"0.weight": mask}, module=module)["0.weight"].mask, mask)


def test_a_checkpoint_has_its_own() -> None:
    index = {"0.weight": torch.tensor([1, 5], dtype=torch.int32)}
    for sparsity in (None, 0.9):
        (layout,) = layouts(sparsity=sparsity, saved=index).values()
        assert layout.index.tolist() == [1, 5]
        assert layout.shape == (32, 24)


def test_a_checkpoint_with_other_masks_is_refused() -> None:
    found = layouts(sparsity=0.5)
    same = {name: layout.index for name, layout in found.items()}
    m.check_same(found, same)
    for saved in ({"0.weight": same["0.weight"][1:]}, {**same, "2.weight": same["0.weight"]}, {}):
        with pytest.raises(ConfigurationError, match="has another mask in the checkpoint"):
            m.check_same(found, saved)
