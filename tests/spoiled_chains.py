"""LightningModules that are hard or impossible to cut: used by test_pipeline_bad_input.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Chain(LightningModule):
    """Four layers; what is between them is for others to spoil."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.never = nn.Linear(6, 6)
        self.never.requires_grad_(requires_grad=False)
        self.tanh = nn.ModuleList(nn.Tanh() for _ in range(4))

    def between(self, j: int, x: Any) -> Any:
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for j, (layer, tanh) in enumerate(zip(self.layers, self.tanh, strict=True)):
            x = self.between(j, tanh(layer(x)))
        return x.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ---------------------------------------------------------------------- order of calls


class OtherOrder(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for j in (0, 2, 1, 3):
            x = torch.tanh(self.layers[j](x))
        return x.pow(2).mean()


class Nested(Chain):
    """Call everything inside of one module that has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*self.layers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).pow(2).mean()


class CalledTwice(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = (self.layers[1](torch.tanh(self.layers[0](x))) for x in batch[0].chunk(2))
        return torch.tanh(self.layers[3](torch.tanh(self.layers[2](first * second)))).mean()


class HasSparseGradients(Chain):
    """Looks rows up in its first stage, whose gradient is sparse."""

    options: ClassVar[dict[str, Any]] = {"sparse": True}

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 6, **self.options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.embedding(torch.arange(6, device=batch[0].device))
        return super().training_step([batch[0] @ rows, *batch[1:]], batch_idx)


class LimitsRows(HasSparseGradients):
    """Scales rows down as it looks them up in its first stage."""

    options: ClassVar[dict[str, Any]] = {"max_norm": 0.5}


# ---------------------------------------------------------------------- what crosses a cut


class Returns(nn.Module):
    """Returns something made of what a layer gives."""

    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(6, 6), made

    def forward(self, x: Tensor) -> Any:
        return self.made(self.linear(x))


class Crosses(Chain):
    """Has a second layer that returns no tensor, of which the next stage makes one again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Returns(self.made)
        self.tanh[1] = nn.Identity()

    def between(self, j: int, x: Any) -> Any:
        return self.taken(x) if j == 1 else x

    @staticmethod
    def made(y: Tensor) -> Any:
        raise NotImplementedError

    def taken(self, x: Any) -> Any:
        raise NotImplementedError


class Wrapped:
    """Hold a tensor where nobody looks for one."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class CrossesAsObject(Crosses):
    made = staticmethod(Wrapped)

    def taken(self, x: Any) -> Any:
        return torch.tanh(x.x)


class CrossesAsTree(Crosses):
    @staticmethod
    def made(y: Tensor) -> Any:
        return {"y": (y, None, "text"), "sizes": [y.shape, 2.5], 3: {y.shape[0]}}

    def taken(self, x: Any) -> Any:
        return x["y"][0] * x["sizes"][1]


class CrossesAsGenerator(Crosses):
    """The second half of the generator's body runs when the next stage asks for it."""

    @staticmethod
    def made(y: Tensor) -> Iterator[Tensor]:
        yield y
        yield y * y

    def taken(self, x: Any) -> Any:
        return sum(x)


class CrossesAsNumber(Crosses):
    """A plain number that depends on values, other in each micro-batch."""

    @staticmethod
    def made(y: Tensor) -> Any:
        return y, float(y.detach().abs().mean())

    def taken(self, x: Any) -> Any:
        self.number = x[1]
        return x[0]

    def between(self, j: int, x: Any) -> Any:
        return x * self.number if j == 3 else super().between(j, x)


# ---------------------------------------------------------------------- edits in place


class EditsReceived(Chain):
    """The residual of an earlier stage, changed by a later one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.layers[0](batch[0])
        y = self.layers[2](x * 2.0)
        x += y
        x[:, 0] = 0.5
        return self.layers[3](x).pow(2).mean()


class EditsInput(Chain):
    """The stage's own first module changes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))

    def between(self, j: int, x: Any) -> Any:
        return x + 0.1


class EditsView(Chain):
    """What crosses is a view of what is changed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.tanh[0](self.layers[0](batch[0])) * 1.0
        left = x[:, :3]
        y = self.layers[2](x * 2.0)
        left += y[:, 3:]  # this line
        return (self.layers[3](x) * left.sum()).mean()


class EditsViewLater(Chain):
    """What nobody saw in the first step, and a stage further on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.tanh[0](self.layers[0](batch[0])) * 1.0
        left = x[:, :3]
        y = self.layers[2](self.layers[1](x * 2.0))
        if self.trainer.global_step > 0:
            left += y[:, 3:]  # this line
        return (self.layers[3](x) * left.sum() * y.sum()).mean()


class EditsSaved(Chain):
    """Torch itself refuses: the backward of tanh needs what was there before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.tanh(self.layers[0](batch[0]))
        y = self.layers[2](x)
        x += y
        return self.layers[3](x).pow(2).mean()


class EditsBatch(Chain):
    """Each worker has a batch of its own, and so must each stage on one worker."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        x.mul_(0.5)
        return self.layers[2](torch.tanh(self.layers[0](x))).add(x).pow(2).mean()


# ---------------------------------------------------------------------- code that needs values


class Branches(Chain):
    def between(self, j: int, x: Any) -> Any:
        if j == 2 and x.sum() > 0:  # this line
            return x * 2.0
        return x


class Loops(Chain):
    def between(self, j: int, x: Any) -> Any:
        if j == 2:
            for _ in range(1 + int(x.detach().abs().sum()) % 3):  # this line
                x = x * 1.5
        return x


class SelectsRows(Chain):
    def between(self, j: int, x: Any) -> Any:
        if j == 2:
            x = x[x.sum(1) > -0.5]  # this line
        return x


class Finds(Chain):
    def between(self, j: int, x: Any) -> Any:
        if j == 2:
            places = (x > 0.1).nonzero()  # this line
            x = x[places[:, 0]]
        return x


class ReadsTwice(Chain):
    """Two causes, on either side of one line that is none."""

    def between(self, j: int, x: Any) -> Any:
        if j == 1:
            return x * float(x.detach().sum())
        return x * x.detach().max().item() if j == 2 else x


class CallsNumpy(Chain):
    def between(self, j: int, x: Any) -> Any:
        if j == 2:
            scale = x.detach().numpy().std()  # this line
            x = x * float(scale)
        return x


class CallsList(Chain):
    def between(self, j: int, x: Any) -> Any:
        if j == 2:
            x = x * (1.0 + max(x.detach()[0].tolist()))  # this line
        return x


NEEDS_VALUES = [Branches, Loops, SelectsRows, Finds, CallsNumpy, CallsList]


class BranchesOnBatch(Chain):
    """Values of the batch are real on every worker."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * 2.0 if batch[0].sum() > 0 else loss

    def between(self, j: int, x: Any) -> Any:
        return x * 2.0 if self.trainer.global_step % 2 else x


# ---------------------------------------------------------------------- what goes wrong in a step


class ReturnsNone(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class NoGraph(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).detach()


class NotFinite(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * float("nan")


class FailsInLastStage(Chain):
    def between(self, j: int, x: Any) -> Any:
        if j == 3:
            raise ZeroDivisionError("the batch is broken")
        return x


class FailsInFirstStage(Chain):
    def between(self, j: int, x: Any) -> Any:
        if j == 0 and torch.is_tensor(x):
            raise ZeroDivisionError("the batch is broken")
        return x
