"""EarlyBirdPruning: draw the mask of a network early in training, when it no longer changes.

end of epoch 0 1 2 3 4 5 ...     a mask of the weights as they are, drawn at the sparsity
window           * * * * *       the last masks; the newest is compared with each before it
drawn            all distances at most the tolerance: the ticket, and training may stop
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from lightning_cyclic.compat import Callback, rank_zero_warn
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.precision.masks import (
    EXCLUDED,
    Masks,
    check_sparsity,
    given_masks,
    magnitude_masks,
    prunable,
    without_full,
)


@final
class EarlyBirdPruning(Callback):
    """Draw an Early-Bird ticket: the mask that training would prune by, found after few epochs.

    Args:
        sparsity: fraction that is pruned, the smallest weights of all layers together.
        window: number of epochs whose masks are compared.
        tolerance: largest fraction of places in which the newest mask may differ from each of the
            others.
        exclude: what is not pruned, as in ``SparseStatePrecision``.
        stop: whether training stops when the ticket is drawn.
        path: of a file to which rank 0 writes the mask then, by ``torch.save``. [none]
        unknown: refused, as ``score`` is: tickets are drawn by magnitude.

    Attributes:
        mask: name -> bool tensor, True where kept, for ``SparseStatePrecision(mask=...)``; None
            until it is drawn.
        epoch: in which it was drawn, counted from 0; None before.
        distances: of each epoch, the largest distance of its mask from those before it in the
            window; 1 where there is none.

    Raises:
        ConfigurationError: a number out of range, NaN, or a ticket that cuts a layer off.

    Source: You et al., "Drawing Early-Bird Tickets: Towards More Efficient Training of Deep
        Networks", ICLR 2020, arXiv 1909.11957, algorithm 1; there of channels, by the scale of
        their BatchNorm.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> ticket = EarlyBirdPruning(sparsity=0.9)
        >>> trainer = Trainer(callbacks=[ticket], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        sparsity: float,
        window: int = 5,
        tolerance: float = 0.1,
        *,
        exclude: Sequence[str] = EXCLUDED,
        stop: bool = True,
        path: str | Path | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise ConfigurationError(
                f"EarlyBirdPruning does not know {', '.join(unknown)}; allowed: sparsity, window, "
                "tolerance, exclude, stop and path; tickets are drawn by magnitude: give masks of "
                "another score to SparseStatePrecision(mask={name: mask})"
            )
        check_sparsity(sparsity, "EarlyBirdPruning")
        if type(window) is not int or window < 2 or not 0 <= tolerance < 1:
            raise ConfigurationError(
                f"window={window!r} and tolerance={tolerance!r}; allowed: a whole number of "
                "epochs from 2 on, whose masks are compared, and a fraction below 1; use "
                "EarlyBirdPruning(sparsity=0.9, window=5, tolerance=0.1)"
            )
        self.mask: Masks | None = None
        self.epoch: int | None = None
        self.distances: list[float] = []
        self._sparsity = sparsity
        self._tolerance = tolerance
        self._exclude = tuple(exclude)
        self._stop = stop
        self._path = path
        self._window: deque[Masks] = deque(maxlen=window)

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Compare the mask of this epoch with those before; draw it if none differs much."""
        if self.mask is not None:
            return
        found = magnitude_masks(prunable(pl_module, self._exclude), self._sparsity)
        newest = {name: mask.cpu() for name, mask in found.items()}
        self._window.append(newest)  # the oldest goes
        distances = [_distance(newest, mask) for mask in list(self._window)[:-1]]
        self.distances.append(max(distances, default=1.0))
        if len(self._window) == self._window.maxlen and self.distances[-1] <= self._tolerance:
            self._draw(trainer, pl_module, newest)

    def _draw(self, trainer: Any, module: nn.Module, newest: Masks) -> None:
        self.mask = given_masks(without_full(newest), module)
        self.epoch = trainer.current_epoch
        self._window.clear()
        if self._path is not None and trainer.is_global_zero:
            torch.save(self.mask, self._path)
        if self._stop:
            trainer.should_stop = True

    @override
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.mask is None:
            last = f"{self.distances[-1]:.3f}" if self.distances else "unknown"
            rank_zero_warn(
                f"EarlyBirdPruning has drawn no ticket: the last distance is {last}, and "
                f"tolerance={self._tolerance}; train more epochs, or raise the tolerance."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"mask": self.mask, "epoch": self.epoch, "distances": self.distances,
                "window": list(self._window)}  # fmt: skip

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mask, self.epoch = state_dict["mask"], state_dict["epoch"]
        self.distances = list(state_dict["distances"])
        self._window.extend(state_dict["window"])


def _distance(one: Masks, other: Masks) -> float:
    """Return the fraction of places in which two masks differ."""
    differing = sum(int((mask != other[name]).sum()) for name, mask in one.items())
    return differing / sum(mask.numel() for mask in one.values())
