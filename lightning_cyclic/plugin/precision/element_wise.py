"""A trial of an optimizer: does it train a compressed 1-D tensor as it would the pruned weight?

It does if it updates each element by itself, from no more than the element's own gradient and
state, and if a zero with a zero gradient stays zero. Small weights tell, which are stepped three
times: as they are, with zeros in them; compressed; and compressed, with other gradients for every
second element, which those between them must not notice.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cyclic.plugin.optimizer_trial import MOST_GROUPS, SCALES, step_for, twin_of
from lightning_cyclic.plugin.precision.compressed import SparseLayout
from lightning_cyclic.runtime.randomness import undisturbed

_ELEMENTS = 128  # of small weights: kernels that do several at a time do not all agree on a rest

_Layouts: TypeAlias = Sequence[Sequence[SparseLayout]]  # by group


def is_element_wise(optimizer: Optimizer, device: torch.device) -> bool | None:
    """Say whether an optimizer gives compressed tensors the bits that pruned weights would have.

    Neither the optimizer nor its parameters change.

    Args:
        optimizer: that is tried, before its first step.
        device: where it updates.

    Returns:
        None where a trial tells nothing: who steps only with a closure, say, or has other
        optimizers within.
    """
    groups = [group["params"] for group in optimizer.param_groups[:MOST_GROUPS]]
    layouts = [[_layout(ps[0].ndim, device), _layout(ps[-1].ndim, device)] for ps in groups if ps]
    with undisturbed(device), suppress(Exception):  # what an unknown optimizer may raise
        pruned = _trained(optimizer, layouts, compressed=False)
        if pruned is None:
            return None
        with suppress(Exception):  # what it says to a tensor of another shape
            compressed = _trained(optimizer, layouts, compressed=True)
            beside = _trained(optimizer, layouts, compressed=True, other=5.0)
            assert compressed is not None
            assert beside is not None
            each = [layout for pair in layouts for layout in pair]
            return all(map(_agree, each, pruned, compressed, beside))
        return False
    return None


def _trained(
    optimizer: Optimizer, layouts: _Layouts, *, compressed: bool, other: float = 1.0
) -> list[Tensor] | None:
    """Return what small weights are after some steps.

    Args:
        optimizer: of which a twin steps.
        layouts: of the weights.
        compressed: whether it has their kept elements alone.
        other: factor of the gradients of every second kept element.
    """
    generator = torch.Generator().manual_seed(0)
    groups: list[list[nn.Parameter]] = []
    slopes: list[Tensor] = []
    for pair in layouts:
        groups.append([])
        for layout in pair:
            weight, slope = (_drawn(layout, generator) for _ in range(2))
            slope[1::2] *= other
            shaped = (lambda x: x) if compressed else layout.expand
            groups[-1].append(nn.Parameter(shaped(weight)))
            slopes.append(shaped(slope))
    twin = twin_of(optimizer, groups)
    if twin is None:
        return None
    _prepare(twin, optimizer)
    each = [p for group in groups for p in group]
    for t, scale in enumerate(SCALES):
        torch.manual_seed(t)  # for updates that draw
        step_for(twin, [(p, slope * scale) for p, slope in zip(each, slopes, strict=True)])
    return [p.detach() for p in each]


def _prepare(twin: Optimizer, optimizer: Optimizer) -> None:
    """Give a twin the state that the optimizer has before its first step."""
    for group, own in zip(twin.param_groups, optimizer.param_groups, strict=False):
        for small, p in zip(group["params"], (own["params"][0], own["params"][-1]), strict=True):
            for key, value in optimizer.state.get(p, {}).items():  # Adagrad has sums at once
                is_like = isinstance(value, Tensor) and value.shape == p.shape
                begin = torch.full_like(small, value.flatten()[0]) if is_like else value
                twin.state[small][key] = copy.deepcopy(begin)


def _layout(ndim: int, device: torch.device) -> SparseLayout:
    """Return the layout of a small weight of which half is kept."""
    shape = (_ELEMENTS // 2, 2, *[1] * (ndim - 2)) if ndim > 1 else (_ELEMENTS,) * ndim
    kept = torch.arange(torch.Size(shape).numel(), device=device) % 4 < 2
    return SparseLayout.of(kept.view(shape))


def _drawn(layout: SparseLayout, generator: torch.Generator) -> Tensor:
    return torch.randn(len(layout.index), generator=generator).to(layout.index.device)


def _agree(layout: SparseLayout, pruned: Tensor, compressed: Tensor, beside: Tensor) -> bool:
    same = torch.equal(torch.nan_to_num(pruned), torch.nan_to_num(layout.expand(compressed)))
    return same and torch.equal(torch.nan_to_num(compressed[::2]), torch.nan_to_num(beside[::2]))
