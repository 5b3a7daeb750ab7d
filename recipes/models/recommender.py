"""A recommender in the manner of DLRM: embeddings, two MLPs, and what pairs of them say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import BinaryAUROC

from recipes.models.decay import decay_groups

Batch = tuple[Tensor, Tensor, Tensor]  # numbers (N, M), ids (N, fields), clicks (N,)


@final
class RecommenderNet(nn.Module):
    """Map numbers and ids to the logit of a click.

        numbers -> MLP       -> a vector  | products of all pairs -> MLP -> logit
        ids     -> embedding -> vectors   |

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
        Recommendation Systems", arXiv 1906.00091, section 2.

    Args:
        num_numbers: Measured numbers of a row.
        cardinalities: How many ids each field has.
        width: Size of a vector.
        hidden: Width of the MLPs.
    """

    def __init__(
        self, *, num_numbers: int, cardinalities: Sequence[int], width: int, hidden: int
    ) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, width) for n in cardinalities)
        for table in self.embeddings:
            nn.init.normal_(table.weight, std=width**-0.5)
        self.bottom = nn.Sequential(
            nn.Linear(num_numbers, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU()
        )
        count = len(cardinalities) + 1
        above, right = torch.triu_indices(count, count, offset=1)
        self.register_buffer("above", above, persistent=False)
        self.register_buffer("right", right, persistent=False)
        self.top = nn.Sequential(
            nn.Linear(width + len(above), hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 1),
        )  # fmt: skip

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """Return logits (N,)."""
        own = self.bottom(numbers)
        tables = (table(ids[:, field]) for field, table in enumerate(self.embeddings))
        vectors = torch.stack([own, *tables], dim=1)
        products = (vectors @ vectors.mT)[:, self.above, self.right]
        return self.top(torch.cat([own, products], dim=1)).squeeze(1)


@final
class Recommender(L.LightningModule):
    """Predict clicks; logs ``train_loss``, ``val_loss`` and ``val_auc``.

    Args:
        net: Maps numbers (N, M) and ids (N, fields) to logits (N,).
        optimizer: Makes the optimizer from param groups.
        scheduler: Makes the learning-rate schedule from the optimizer; it steps every epoch.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
    ) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.val_auc = BinaryAUROC(thresholds=200)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        numbers, ids, clicks = batch
        loss = F.binary_cross_entropy_with_logits(self.net(numbers, ids), clicks)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the batch to the epoch's loss and to the area under the curve, over all workers."""
        numbers, ids, clicks = batch
        logits = self.net(numbers, ids)
        self.val_auc.update(logits, clicks.int())
        loss = F.binary_cross_entropy_with_logits(logits, clicks)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_auc", self.val_auc, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Make the optimizer, without decay on biases, and its schedule."""
        optimizer = self.make_optimizer(decay_groups(self))
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}
