"""Which masks a fit has, where several are at hand or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_cyclic import ConfigurationError
from lightning_cyclic.plugin.precision.mask_choice import MaskChoice, check_same
from tests import pruned as t


def choice(mask: Any = None, sparsity: float | None = None) -> MaskChoice:
    return MaskChoice(mask=mask, sparsity=sparsity, exclude=("bias",))


def pruned() -> nn.Module:
    module = t.mlp()
    prune.l1_unstructured(module[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    return module


def test_masks_are_drawn_when_the_fit_begins() -> None:
    layouts = choice(sparsity=0.5).layouts(t.mlp(), {})
    assert list(layouts) == ["0.weight", "2.weight", "4.weight"]
    total = sum(layout.shape.numel() for layout in layouts.values())
    assert sum(len(layout.index) for layout in layouts.values()) == total // 2


def test_layers_that_keep_everything_stay_dense() -> None:
    module = t.mlp()
    with torch.no_grad():
        module[0].weight.add_(100)
    assert list(choice(sparsity=0.5).layouts(module, {})) == ["2.weight", "4.weight"]


def test_a_layer_that_would_be_cut_off_is_refused() -> None:
    module = t.mlp()
    with torch.no_grad():
        module[2].weight.mul_(1e-3)
    with pytest.raises(ConfigurationError, match=r"mask of '2.weight' keeps nothing"):
        choice(sparsity=0.9).layouts(module, {})


def test_both_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"mask and sparsity=0.9 were both given"):
        choice({}, 0.9)


def test_no_mask_at_all() -> None:
    with pytest.raises(ConfigurationError, match=r"has no mask, and Sequential was not pruned"):
        choice().layouts(t.mlp(), {})
    with pytest.raises(ConfigurationError, match=r"mask prunes no parameter"):
        choice({}).layouts(t.mlp(), {})


@pytest.mark.parametrize("given", [{"sparsity": 0.9}, {"mask": {}}])
def test_a_pruned_module_has_its_own(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"has masks of torch.nn.utils.prune itself"):
        choice(**given).layouts(pruned(), {})


def test_a_checkpoint_has_its_own() -> None:
    index = {"0.weight": torch.tensor([1, 5], dtype=torch.int32)}
    for given in (choice(), choice(sparsity=0.9)):
        (layout,) = given.layouts(t.mlp(), index).values()
        assert layout.index.tolist() == [1, 5]
        assert layout.shape == (32, 24)


def test_a_checkpoint_with_other_masks_is_refused() -> None:
    module = pruned()
    layouts = choice().layouts(module, {})
    same = {name: layout.index for name, layout in layouts.items()}
    check_same(layouts, same)
    for saved in ({"0.weight": same["0.weight"][1:]}, {**same, "2.weight": same["0.weight"]}, {}):
        with pytest.raises(ConfigurationError, match="has another mask in the checkpoint"):
            check_same(layouts, saved)
