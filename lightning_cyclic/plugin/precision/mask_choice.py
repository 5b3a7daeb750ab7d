"""Which masks a fit has: those of a checkpoint, given ones, those of a pruned module, or drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.precision import masks as m
from lightning_cyclic.plugin.precision.compressed import SparseLayout

Layouts: TypeAlias = dict[str, SparseLayout]  # by the parameter's name


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MaskChoice:
    """Hold what a user says of masks.

    Args:
        mask: name -> mask, or the path of a file of them.
        sparsity: fraction of elements that are pruned by magnitude.
        exclude: what is not pruned by magnitude.

    Raises:
        ConfigurationError: both mask and sparsity, or a sparsity that is none.
    """

    mask: Mapping[str, Tensor] | str | Path | None
    sparsity: float | None
    exclude: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.sparsity is None:
            return
        m.check_sparsity(self.sparsity, "SparseStatePrecision")
        if self.mask is not None:
            raise ConfigurationError(
                f"mask and sparsity={self.sparsity} were both given; allowed: one of them; leave "
                "out sparsity, which the mask has already"
            )

    def layouts(self, module: nn.Module, saved: Mapping[str, Tensor]) -> Layouts:
        """Return the layouts of all pruned parameters of a module.

        Args:
            module: that is trained; torch.nn.utils.prune leaves it.
            saved: name -> index of the checkpoint from which training goes on.

        Raises:
            ConfigurationError: masks that do not fit the module, or the checkpoint, or are none.
        """
        given = self._given(module)
        kept = {n: SparseLayout(x, module.get_parameter(n).shape) for n, x in saved.items()}
        if given is None:
            return kept or self._drawn(module)
        if not given:
            raise ConfigurationError(
                "mask prunes no parameter; allowed: masks of at least one; use "
                "SparseStatePrecision(sparsity=0.9), or leave it out"
            )
        found = {n: SparseLayout.of(mask) for n, mask in given.items()}
        if saved:
            check_same(found, saved)
        return found

    def _given(self, module: nn.Module) -> m.Masks | None:
        if not m.has_pruned(module):
            read = self.mask if isinstance(self.mask, Mapping | None) else m.load_mask(self.mask)
            return None if read is None else m.given_masks(read, module)
        if self.mask is not None or self.sparsity is not None:
            what = "mask" if self.sparsity is None else f"sparsity={self.sparsity}"
            raise ConfigurationError(
                f"{what} was given, but {type(module).__name__} has masks of torch.nn.utils.prune "
                "itself; allowed: one of them; use SparseStatePrecision() without it, or "
                "torch.nn.utils.prune.remove before fit"
            )
        return m.given_masks(m.without_full(m.take_pruned(module)), module)

    def _drawn(self, module: nn.Module) -> Layouts:
        if self.sparsity is None:
            raise ConfigurationError(
                f"SparseStatePrecision() has no mask, and {type(module).__name__} was not pruned; "
                "allowed: mask={name: bool tensor}, mask='ticket.safetensors', sparsity=0.9, or a "
                "module that torch.nn.utils.prune has pruned; use "
                "SparseStatePrecision(sparsity=0.9)"
            )
        parameters = m.prunable(module, self.exclude)
        masks = m.without_full(m.magnitude_masks(parameters, self.sparsity))
        return {n: SparseLayout.of(mask) for n, mask in m.given_masks(masks, module).items()}


def check_same(layouts: Mapping[str, SparseLayout], saved: Mapping[str, Tensor]) -> None:
    """Refuse to go on from a checkpoint that has other masks.

    Raises:
        ConfigurationError: with the first parameter whose mask differs.
    """
    for name in dict.fromkeys([*layouts, *saved]):
        pair = layouts.get(name), saved.get(name)
        if None in pair or not torch.equal(pair[0].index.cpu(), pair[1].cpu()):  # type: ignore[union-attr]
            raise ConfigurationError(
                f"parameter {name!r} has another mask in the checkpoint; allowed: the masks that "
                "the run had; use SparseStatePrecision(sparsity=...), which takes them from the "
                "checkpoint, or load its weights alone into the module to prune it anew"
            )
