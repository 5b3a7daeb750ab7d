"""Modules whose later steps call what the first did not, or whose hooks change layers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from tests.harness.pipelines import Job
from tests.modules.huggingface import generator
from tests.modules.plain import Images, Logging, accuracy

# ---------------------------------------------------------------------- branches


class UsedSometimes(Logging):
    """Has a branch that every third step takes, on every worker."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(accuracy())
        self.enter, self.branch = nn.Linear(192, 12), nn.Linear(12, 12)
        layers = [x for _ in range(4) for x in (nn.Linear(12, 12), nn.Tanh())]
        self.net = nn.Sequential(*layers)
        self.head = nn.Linear(12, 4)

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.enter(x.flatten(1))
        if self.takes_branch(batch[0], batch_idx):
            x = self.branch(x)
        logits = self.head(self.net(x))
        return self.note(F.cross_entropy(logits, y), logits, y)

    def takes_branch(self, x: Tensor, batch_idx: int) -> bool:
        return batch_idx % 3 == 0


class UsedLater(UsedSometimes):
    """Has a branch that the first step, which finds the stages, does not take."""

    def takes_branch(self, x: Tensor, batch_idx: int) -> bool:
        return batch_idx % 3 == 1


class UsedSomewhere(UsedSometimes):
    """Has a branch that depends on the data, so that workers differ; all take it at first."""

    def takes_branch(self, x: Tensor, batch_idx: int) -> bool:
        return batch_idx == 0 or bool(x.sum() > 0)


class UsedByOneWorker(UsedSometimes):
    """Has a branch that depends on the data from the first step on."""

    def takes_branch(self, x: Tensor, batch_idx: int) -> bool:
        return bool(x.sum() > 0)


# ---------------------------------------------------------------------- tasks


class Tasks(Job):
    """Give micro-batches of one task in steps 0, 2, ..., and of another in steps 1, 3, ..."""

    def make(self) -> Any:
        assert self.module is not None
        return self.module()

    def batch(self, k: int) -> Any:
        g, t = generator(k), k // self.num_microbatches
        x, y = torch.randn(3, 4, generator=g), torch.randint(9, (3,), generator=g)
        return {"x": x, "y": y, "task": t % 2}


class Tasked(LightningModule):
    """Learns the classes of a task."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def loss_of(self, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(self(batch["x"], batch["task"]), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Heads(Tasked):
    """Has a head for each task, of which the first batches use one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        norm = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 9))
        self.heads = nn.ModuleList([nn.Linear(4, 9), norm])
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(4, 9, [2, 5], div_value=1.0)

    def forward(self, x: Tensor, task: int) -> Tensor:
        x = self.net(x)
        return self.heads[task](x) + 0.1 * self.loss.log_prob(x)

    def loss_of(self, batch: dict[str, Any]) -> Tensor:
        if batch["task"]:
            return super().loss_of(batch)
        x = self.net(batch["x"])
        some = torch.zeros_like(batch["y"])  # the first cluster alone
        return F.cross_entropy(self.heads[0](x), batch["y"]) + self.loss(x, some).loss


class Aside(Tasked):
    """Calls in later steps what is defined beside the first module, behind the third."""

    order = ("a", "b", "aside", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        made = {name: nn.Linear(4, 4) for name in ("a", "b", "aside", "c")}
        made["d"] = nn.Linear(4, 9)
        for name in self.order:
            self.add_module(name, made[name])

    def forward(self, x: Tensor, task: int) -> Tensor:
        x = self.c(self.b(self.a(x)))
        return self.d(self.aside(x) if task else x)


class Behind(Aside):
    order = ("a", "b", "c", "aside", "d")


# ---------------------------------------------------------------------- hooks, moves


class Hooked(Tasked):
    """Has layers whose hooks make their weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(4, 4) for _ in range(4)]
        for layer in layers[1:3]:
            prune.l1_unstructured(layer, "weight", 0.5)  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.net = nn.Sequential(*layers, weight_norm(nn.Linear(4, 4)))
        self.net.append(spectral_norm(nn.Linear(4, 4)))  # changes buffers, too
        self.last = parametrizations.weight_norm(nn.Linear(4, 9))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.last(self.net(x).tanh())


class Noting(Tasked):
    """Has a layer whose hook notes its input for the first time in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 9))
        self.net[1].register_forward_pre_hook(self.note)

    def note(self, layer: nn.Module, given: tuple[Tensor]) -> None:
        layer.given = given[0].detach()

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.net(x)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.head = self.head.to(torch.float32)
        return x + self.head(x)


class Moving(Tasked):
    """Moves its modules to where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.second = nn.Linear(4, 4), Router(), Router()
        self.last = nn.Linear(4, 9)

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.last(self.second(self.router(self.first(x))))


# ---------------------------------------------------------------------- few places for stages


class Short(Tasked):
    """Has two places for stages."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 9)

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.head(self.cell(x[:, None])[0][:, 0])


class Shortest(Short):
    """Has one."""

    def __init__(self) -> None:
        super().__init__()
        del self.cell

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.head(x)
