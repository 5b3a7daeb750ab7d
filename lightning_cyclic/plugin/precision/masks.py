"""Masks of pruned parameters: name -> bool tensor of the parameter's shape, True where kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.precision.compressed import Layout, check_size

Masks: TypeAlias = dict[str, Tensor]
Given: TypeAlias = Mapping[str, Tensor] | str | Path | None  # masks, or a file of torch.save
EXCLUDED = ("bias", "norm", "embedding")


def check_sparsity(sparsity: object, owner: str) -> None:
    is_number = isinstance(sparsity, int | float) and not isinstance(sparsity, bool)
    if not (is_number and 0 < sparsity < 1):  # type: ignore[operator]
        raise ConfigurationError(
            f"sparsity={sparsity!r}; allowed: the fraction of elements that are pruned, above 0 "
            f"and below 1; use {owner}(sparsity=0.9)"
        )


def layouts_of(
    module: nn.Module,
    mask: Given,
    sparsity: float | None,
    exclude: Sequence[str],
    saved: Mapping[str, Tensor],
) -> dict[str, Layout]:
    """Return the layouts of all pruned parameters of a module."""
    if prune.is_pruned(module):
        raise ConfigurationError(
            f"{type(module).__name__} is pruned by torch.nn.utils.prune; allowed: plain "
            "parameters; call torch.nn.utils.prune.remove(layer, 'weight') for each, and give "
            "what it had: SparseStatePrecision(mask={'net.0.weight': layer.weight_mask.bool()})"
        )
    if mask is None and saved:
        return {n: Layout(x, module.get_parameter(n).shape) for n, x in saved.items()}
    if mask is None and sparsity is None:
        raise ConfigurationError(
            "SparseStatePrecision() has no mask, nor has the checkpoint one; allowed: "
            "mask={name: bool tensor}, mask='ticket.pt', or sparsity=0.9; use "
            "SparseStatePrecision(sparsity=0.9)"
        )
    if mask is None:
        assert sparsity is not None
        given = without_full(magnitude_masks(prunable(module, exclude), sparsity))
    else:
        given = dict(mask) if isinstance(mask, Mapping) else _read(mask)
        if not given:
            raise ConfigurationError(
                "mask prunes no parameter; allowed: masks of at least one; use "
                "SparseStatePrecision(sparsity=0.9), or leave it out"
            )
    found = {n: Layout.of(mask) for n, mask in given_masks(given, module).items()}
    if saved:
        check_same(found, saved)
    return found


def _read(path: str | Path) -> Masks:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # none, or none of torch
        raise ConfigurationError(
            f"mask={str(path)!r} cannot be read ({error}); allowed: a file of bool tensors, one "
            "for each pruned parameter; write it with torch.save({name: mask}, path)"
        ) from error
    return found if isinstance(found, dict) else {}


def check_same(layouts: Mapping[str, Layout], saved: Mapping[str, Tensor]) -> None:
    for name in dict.fromkeys([*layouts, *saved]):
        pair = layouts.get(name), saved.get(name)
        if None in pair or not torch.equal(pair[0].kept.cpu(), pair[1].cpu()):  # type: ignore[union-attr]
            raise ConfigurationError(
                f"parameter {name!r} has another mask in the checkpoint; allowed: the masks that "
                "the run had; use SparseStatePrecision(sparsity=...), which takes them from the "
                "checkpoint, or load its weights alone into the module to prune it anew"
            )


# ---------------------------------------------------------------------- given


def given_masks(given: Mapping[str, Tensor], module: nn.Module) -> Masks:
    """Return masks by the first name of each parameter, checked."""
    named = dict(module.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in module.named_parameters()}
    masks: Masks = {}
    for name, mask in given.items():
        if name not in named:
            raise ConfigurationError(
                f"mask names {name!r}, which is no parameter of {type(module).__name__}; allowed: "
                f"names of module.named_parameters(), such as {next(iter(named), '')!r}; take it "
                "out of the mask, or rename it"
            )
        _check_fits(mask, named[name], name)
        known = masks.setdefault(first[id(named[name])], mask)
        if known is not mask and not torch.equal(known, mask):
            raise ConfigurationError(
                f"mask has two masks that differ for {first[id(named[name])]!r} and {name!r}, "
                "which are one parameter; allowed: one mask for it; take one of them out"
            )
    return masks


def _check_fits(mask: Tensor, p: nn.Parameter, name: str) -> None:
    check_size(p.shape, name)
    is_fitting = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == p.shape
    if not is_fitting or not p.is_floating_point():
        what = type(mask).__name__
        if isinstance(mask, Tensor):
            what = f"of {mask.dtype} and shape {tuple(mask.shape)}"
        raise ConfigurationError(
            f"mask of {name!r} is {what}, for a parameter of {p.dtype} and shape "
            f"{tuple(p.shape)}; allowed: tensors of torch.bool and the parameter's shape, True "
            "where an element is kept, of parameters of real numbers; draw the mask from this "
            "module, and use mask.bool()"
        )
    kept = 0 if mask.is_meta else int(mask.sum())
    if kept in (0, mask.numel()):
        raise ConfigurationError(
            f"mask of {name!r} keeps {'everything' if kept else 'nothing'}; allowed: masks that "
            "keep at least one element, and prune one; take it out of the mask"
        )


# ---------------------------------------------------------------------- by magnitude


def prunable(module: nn.Module, exclude: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return name -> parameter of what is pruned where no mask says it.

    Args:
        module: whose trained parameters of real numbers are looked at.
        exclude: words within the name of a parameter (its last part) or of its module's class, in
            lower case; or whole names, with wildcards: "bias", "norm", "head.*".
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    excluded: set[int] = set()
    for path, owner in module.named_modules():
        kind = type(owner).__name__.lower()
        for last, p in owner.named_parameters(recurse=False):
            name = f"{path}.{last}" if path else last
            found.setdefault(id(p), (name, p))
            if any(w in last.lower() or w in kind or fnmatchcase(name, w) for w in exclude):
                excluded.add(id(p))  # by any of the names of a tied one
    return {
        name: p
        for key, (name, p) in found.items()
        if key not in excluded and p.requires_grad and p.is_floating_point() and p.numel()
    }


def magnitude_masks(parameters: Mapping[str, Tensor], sparsity: float) -> Masks:
    """Return masks that prune the elements of smallest magnitude of all parameters together.

    Args:
        parameters: name -> what is pruned; of equal elements the first go.
        sparsity: fraction of all elements that are pruned; the number is rounded.

    Returns:
        Masks of all parameters; of some everything may be kept, or nothing.

    Raises:
        ConfigurationError: NaN, nothing to prune, or fewer elements than the fraction needs.
    """
    total = sum(p.numel() for p in parameters.values())
    num_pruned = round(sparsity * total)
    if not 0 < num_pruned < total:
        raise ConfigurationError(
            f"sparsity={sparsity} of {total} elements prunes {num_pruned}; allowed: at least one, "
            "and not all; exclude fewer parameters, or give masks: "
            "SparseStatePrecision(mask={name: mask})"
        )
    for name, p in parameters.items():
        check_size(p.shape, name)
        if bool(torch.isnan(p.detach()).any()):
            raise ConfigurationError(
                f"parameter {name!r} has NaN, so that nothing says which of its elements are "
                "small; allowed: numbers; look at how it is initialised or trained"
            )
    # magnitudes in float32, read as int32, have the same order
    scores = {
        n: p.detach().abs().float().contiguous().view(torch.int32) for n, p in parameters.items()
    }
    every = torch.cat([x.view(-1) for x in scores.values()])
    limit = every.kthvalue(num_pruned).values
    num_ties = num_pruned - int((every < limit).sum())
    masks: Masks = {}
    for name, x in scores.items():
        masks[name] = x > limit
        ties = (x == limit).view(-1).nonzero().view(-1)
        masks[name].view(-1)[ties[num_ties:]] = True
        num_ties = max(0, num_ties - len(ties))
    return masks


def without_full(masks: Mapping[str, Tensor]) -> Masks:
    return {name: mask for name, mask in masks.items() if not bool(mask.all())}
