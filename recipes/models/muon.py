"""Muon for the matrices of layers, and AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.optim import AdamW, Muon, Optimizer


@final
class MuonWithAdamW(Optimizer):
    """Update parameters of two dimensions by Muon, but for tables; tables and vectors by AdamW.

    Both are torch's; Muon's steps are scaled to have the size of AdamW's, so that one learning
    rate fits both (``adjust_lr_fn="match_rms_adamw"``).

    Args:
        params: Param groups; one with ``is_table=True`` has embeddings and output layers.
        lr: Learning rate of both.
        weight_decay: Of groups that do not say.
        momentum: Muon's.
        betas: AdamW's.
    """

    updates_apart = "parameter"  # says to lightning_cyclic that stages may be updated one by one

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        lr: float,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: Sequence[float] = (0.9, 0.95),
    ) -> None:
        alike: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._muon = Muon(
            [torch.zeros(1, 1)], momentum=momentum, adjust_lr_fn="match_rms_adamw", **alike
        )
        first, second = betas
        self._adamw = AdamW([torch.zeros(1)], betas=(first, second), **alike)
        super().__init__(params, alike)
        for group in self.param_groups:
            for key, value in self._for(group).defaults.items():
                group.setdefault(key, value)

    def _for(self, group: dict[str, Any]) -> Optimizer:
        is_matrices = all(p.ndim == 2 for p in group["params"])
        return self._muon if is_matrices and not group.get("is_table") else self._adamw

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update what has gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in (self._muon, self._adamw):
            inner.state = self.state  # a checkpoint has brought others
            inner.param_groups = [
                group for group in self.param_groups if self._for(group) is inner
            ]
            inner.step()
        return loss
