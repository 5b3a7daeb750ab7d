"""Chains of four layers, each with a fault, or with something that is hard to cut."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness.processes import here


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

    def order(self, batch_idx: int) -> Sequence[int]:
        return range(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for j in self.order(batch_idx):
            x = self.between(j, self.tanh[j](self.layers[j](x)))
        return x.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TakesAny(Chain):
    """Takes rows of whatever dtype and shape."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch[0].float().reshape(-1, 6)], batch_idx)


# ---------------------------------------------------------------------- order of calls


class OtherOrder(Chain):
    def order(self, batch_idx: int) -> Sequence[int]:
        return (0, 2, 1, 3)


class OtherOrderLater(Chain):
    def order(self, batch_idx: int) -> Sequence[int]:
        return range(4) if batch_idx < 3 else (3, 2, 1, 0)


class OtherOrderOnOne(Chain):
    def order(self, batch_idx: int) -> Sequence[int]:
        return range(4) if here().rank == 0 else (3, 2, 1, 0)


class StatisticsLater(Chain):
    """From step 3 on, the first stage's BatchNorm runs behind the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.BatchNorm1d(6)

    def order(self, batch_idx: int) -> Sequence[int]:
        return range(4) if batch_idx < 3 else (0, 2, 3, 1)


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


NEEDS_VALUES = [Branches, Loops, CallsNumpy, CallsList]
CHOOSES_ROWS = [SelectsRows, Finds]


class BranchesOnBatch(Chain):
    """Values of the batch are real on every worker."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * 2.0 if batch[0].sum() > 0 else loss

    def between(self, j: int, x: Any) -> Any:
        return x * 2.0 if self.trainer.global_step % 2 else x


# ---------------------------------------------------------------------- what goes wrong in a step


class Fails(Chain):
    """Goes wrong in one step.

    Args:
        how: "returns None", "has no graph", "is not finite" or "raises".
        at: in which step.
        ranks: on which.
    """

    def __init__(self, how: str, at: int = 0, ranks: Sequence[int] = (0, 1)) -> None:
        super().__init__()
        self.how, self.at, self.ranks = how, at, ranks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx != self.at or here().rank not in self.ranks:
            return loss
        if self.how == "raises":
            raise ZeroDivisionError("the batch is broken")
        return {"returns None": None, "has no graph": loss.detach()}.get(self.how, loss * math.nan)


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


class FailsOnSevens(Chain):
    """Fails on rows that begin with a seven, in its forward or in its backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.has_seven = 7.0 in batch[0]
        return super().training_step(batch, batch_idx)

    def between(self, j: int, x: Any) -> Any:
        if j == 3 and self.has_seven:
            if self.where == "forward":
                raise KeyError("a seven")
            x.register_hook(self.fail)
        return x

    def fail(self, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("in a hook")


class Normed(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.BatchNorm1d(6)


class ReducesInUpdate(Chain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.ones(()), on_step=True, sync_dist=True)


class ReentrantCheckpoint(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].requires_grad_()
        for layer in (*self.layers, self.layers[3]):  # the last layer twice: two gradients
            x = checkpoint(layer, x, use_reentrant=True)
        return x.pow(2).mean()


class TwoBackwards(Chain):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class ChangesWithin(Chain):
    """Changes weights in a hook that is called while a step is under way, behind the first one.

    Args:
        hook: its name.
        whose: "teacher", a frozen copy that follows, or "own", through ``.data``.
    """

    def __init__(self, hook: str, whose: str) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.whose = whose
        setattr(self, hook, self.change)

    def change(self, *_: Any) -> None:
        if self.trainer.global_step == 0:
            return
        if self.whose == "own":
            for p in self.layers.parameters():
                p.data.clamp_(-0.2, 0.2)
            return
        with torch.no_grad():
            for mine, its in zip(self.layers.parameters(), self.teacher.parameters(), strict=True):
                its.lerp_(mine, 0.1)


class ChangesOnce(Chain):
    """Changes a weight through ``.data`` in step 3, in which no run compares the bits of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_forward_pre_hook(self.change)

    def change(self, layer: nn.Module, _: Any) -> None:
        if self.trainer.fit_loop.batch_idx == 3 and self.training:
            layer.weight.data.mul_(0.5)


class LaysElsewhere(Chain):
    """Lays a weight elsewhere in the middle of a step, with the values that it has."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.layers[2].register_forward_pre_hook(self.move)

    def move(self, layer: nn.Module, _: Any) -> None:
        if self.trainer.fit_loop.batch_idx == self.at and self.training:
            layer.weight.data = layer.weight.data.clone()


class TiedEnds(Chain):
    """Uses the weight of its first layer in its last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.layers[0].weight


class ReturnsOther(Chain):
    """Returns what no step may.

    Args:
        returned: that.
    """

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.returned


class Steep(Chain):
    """Has gradients that float16 cannot hold."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 1e9 * super().training_step(batch, batch_idx)


class HalvesGradients(Chain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.trainer.strategy.updated_parameters:  # type: ignore[attr-defined]
            if p.grad is not None:
                p.grad.mul_(0.5)


class SumsParameters(Chain):
    """Reads all parameters between its layers' last call and its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(p.square().sum() for p in self.parameters())


class UpdatesInBackward(Chain):
    """Updates each parameter as soon as its gradient is there, in a hook."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.layers.parameters():
            p.register_post_accumulate_grad_hook(self.update)

    def update(self, p: Tensor) -> None:
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None


# ---------------------------------------------------------------------- what no strategy can train


class OtherModule(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4 + here().rank)


class OtherFrozen(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(here().rank == 0)


class CompiledInPlace(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


class NothingTrained(Chain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.requires_grad_(False).parameters(), lr=0.1)


class Outside(Chain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)


class SharedStorage(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = nn.Parameter(self.layers[0].weight.data)
