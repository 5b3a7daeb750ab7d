"""Masks of pruned parameters: name -> bool tensor of the parameter's shape, True where kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.precision.compressed import check_size

Masks: TypeAlias = dict[str, Tensor]
EXCLUDED = ("bias", "norm", "embedding")


# ---------------------------------------------------------------------- files


def save_mask(mask: Mapping[str, Tensor], path: str | Path) -> None:
    """Write masks to a safetensors file, a byte for each element.

    Args:
        mask: parameter's name -> bool tensor of its shape, True where an element is kept.
        path: of the file.

    Raises:
        ConfigurationError: safetensors is not installed.
    """
    _safetensors().save_file({n: m.cpu().contiguous() for n, m in mask.items()}, str(path))


def load_mask(path: str | Path) -> Masks:
    """Read masks from a safetensors file.

    Raises:
        ConfigurationError: no such file, or safetensors is not installed.
    """
    if not Path(path).is_file():
        raise ConfigurationError(
            f"mask={str(path)!r} is no file; allowed: a safetensors file of bool tensors, one for "
            "each pruned parameter; write it with lightning_cyclic.save_mask(mask, path)"
        )
    masks: Masks = _safetensors().load_file(str(path))
    return masks


def _safetensors() -> Any:
    try:
        from safetensors import torch as files  # noqa: PLC0415  (only who has mask files needs it)
    except ImportError as error:
        raise ConfigurationError(
            "safetensors is not installed, which reads and writes files of masks; allowed: masks "
            "as a dict of tensors; use pip install 'lightning-cyclic[pruning]'"
        ) from error
    return files


# ---------------------------------------------------------------------- what may be pruned


def check_sparsity(sparsity: object, owner: str) -> None:
    """Refuse what is no fraction between 0 and 1.

    Args:
        sparsity: fraction of elements that are pruned.
        owner: name of the class that was given it.

    Raises:
        ConfigurationError: with the value.
    """
    is_number = isinstance(sparsity, int | float) and not isinstance(sparsity, bool)
    if not (is_number and 0 < sparsity < 1):  # type: ignore[operator]
        raise ConfigurationError(
            f"sparsity={sparsity!r}; allowed: the fraction of elements that are pruned, above 0 "
            f"and below 1; use {owner}(sparsity=0.9)"
        )


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


# ---------------------------------------------------------------------- masks that are given


def given_masks(given: Mapping[str, Tensor], module: nn.Module) -> Masks:
    """Return masks by the first name of each parameter, checked.

    Raises:
        ConfigurationError: an unknown name, another shape or dtype, nothing or everything kept,
            two masks of one tied parameter, or a parameter of too many elements.
    """
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
        check_size(named[name].shape, name)
        _check_fits(mask, named[name], name)
        _check_kept(mask, name)
        known = masks.setdefault(first[id(named[name])], mask)
        if known is not mask and not torch.equal(known, mask):
            raise ConfigurationError(
                f"mask has two masks that differ for {first[id(named[name])]!r} and {name!r}, "
                "which are one parameter; allowed: one mask for it; take one of them out"
            )
    return masks


def _check_fits(mask: object, p: nn.Parameter, name: str) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigurationError(
            f"mask of {name!r} is {kind}; allowed: a tensor of torch.bool, True where an element "
            "is kept; use mask.bool()"
        )
    if mask.shape != p.shape:
        raise ConfigurationError(
            f"mask of {name!r} has shape {tuple(mask.shape)}; allowed: the parameter's, "
            f"{tuple(p.shape)}; draw the mask from this module"
        )
    if not p.is_floating_point():
        raise ConfigurationError(
            f"mask names {name!r}, which is {p.dtype}; allowed: parameters of real numbers; take "
            "it out of the mask"
        )


def _check_kept(mask: Tensor, name: str) -> None:
    kept = 0 if mask.is_meta else int(mask.sum())
    if kept == 0:
        raise ConfigurationError(
            f"mask of {name!r} keeps nothing, so that the layer would be cut off; allowed: at "
            "least one element; lower the sparsity, or exclude the parameter"
        )
    if kept == mask.numel():
        raise ConfigurationError(
            f"mask of {name!r} keeps everything, and its index would only take memory; allowed: "
            "masks that prune at least one element; take it out of the mask"
        )


# ---------------------------------------------------------------------- masks that are drawn


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
    limit, num_ties = _threshold(list(parameters.values()), num_pruned)
    masks: Masks = {}
    for name, p in parameters.items():
        scores = _as_integers(p)
        masks[name] = scores > limit
        ties = (scores == limit).view(-1).nonzero().view(-1)
        masks[name].view(-1)[ties[num_ties:]] = True
        num_ties = max(0, num_ties - len(ties))
    return masks


def _threshold(parameters: Sequence[Tensor], num_pruned: int) -> tuple[int, int]:
    """Return the largest pruned magnitude, as an integer, and how many of that size are pruned.

    By bisection, which takes no memory; to sort all magnitudes would take twelve bytes for each,
    more than training does.
    """
    low, high = 0, max(int(_as_integers(p).max()) for p in parameters)
    while low < high:
        middle = (low + high) // 2
        if sum(int((_as_integers(p) <= middle).sum()) for p in parameters) >= num_pruned:
            high = middle
        else:
            low = middle + 1
    smaller = sum(int((_as_integers(p) < low).sum()) for p in parameters)
    return low, num_pruned - smaller


def _as_integers(p: Tensor) -> Tensor:
    """Return magnitudes in float32, read as int32, which has the same order."""
    return p.detach().abs().float().contiguous().view(torch.int32)


def without_full(masks: Mapping[str, Tensor]) -> Masks:
    """Return the masks that prune anything; who keeps everything needs none."""
    return {name: mask for name, mask in masks.items() if not bool(mask.all())}


# ---------------------------------------------------------------------- torch.nn.utils.prune


def has_pruned(module: nn.Module) -> bool:
    """Say whether torch.nn.utils.prune, or a callback by its means, has pruned parameters."""
    return next(_pruned(module), None) is not None


def take_pruned(module: nn.Module) -> Masks:
    """Return the masks of torch.nn.utils.prune, and make what it has pruned plain parameters."""
    found: list[tuple[nn.Parameter, Tensor]] = []
    for owner, name in list(_pruned(module)):
        mask = getattr(owner, f"{name}_mask").detach() != 0
        prune.remove(owner, name)  # type: ignore[no-untyped-call]
        parameters = owner._parameters
        found.append((getattr(owner, name), mask))
        if name == "weight":  # in front of the bias again: optimizer state is saved by order
            parameters.update([(n, parameters.pop(n)) for n in list(parameters) if n != name])
    names = {id(p): name for name, p in module.named_parameters()}
    return {names[id(p)]: mask for p, mask in found}


def _pruned(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for owner in module.modules():
        for buffer, _ in owner.named_buffers(recurse=False):
            name = buffer.removesuffix("_mask")
            if name != buffer and f"{name}_orig" in owner._parameters:
                yield owner, name
