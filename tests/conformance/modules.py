"""LightningModules as people write them; no line of them knows of a strategy.

Each says in its docstring what is unlike a plain chain of layers. Micro-batch k is made of k.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

from tests.modules import optimizers

SIZE, CLASSES, ROWS, WORDS = 8, 3, 4, 32


def vectors(k: int) -> tuple[Tensor, Tensor]:
    """Return vectors and their classes."""
    g = torch.Generator().manual_seed(k)
    return torch.randn(ROWS, SIZE, generator=g), torch.randint(0, CLASSES, (ROWS,), generator=g)


def words(k: int) -> dict[str, Tensor]:
    """Return texts, whose words are to be predicted."""
    x = torch.randint(0, WORDS, (2, 6), generator=torch.Generator().manual_seed(k))
    return {"input_ids": x, "labels": x}


class Plain(LightningModule):
    """A chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen: list[Any] = []  # what tests compare
        self.net = self.make_net()

    def make_net(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Tanh(),
            nn.Linear(SIZE, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class TakesBatches(Plain):
    """Takes its batches from the loader itself, through ``dataloader_iter``."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(dataloader_iter, "train_loss")

    def validation_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        self.loss(dataloader_iter, "val_loss")

    def loss(self, dataloader_iter: Any, name: str) -> Tensor:
        (x, y), _, _ = next(dataloader_iter)
        loss = F.cross_entropy(self(x), y)
        self.log(name, loss, batch_size=len(x))
        return loss


# ---------------------------------------------------------------------- state on the module


class Outputs(Plain):
    """Keeps the outputs of its steps in lists until the epoch ends, as Lightning 2 wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Tensor] = []
        self.val_outs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.outs.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.val_outs.append({"logits": logits, "y": batch[1]})
        return logits

    def on_train_epoch_end(self) -> None:
        self.seen.append(len(self.outs))
        self.outs.clear()

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            right = [(o["logits"].argmax(1) == o["y"]).float().mean() for o in self.val_outs]
            self.log("val_acc", torch.stack(right).mean())
        self.val_outs.clear()


class TrainingOutputs(Outputs):
    """Keeps the losses of its training steps in a list and logs their mean."""

    def on_train_epoch_end(self) -> None:
        self.log("train_mean", torch.stack(self.outs).mean())
        self.seen.append(float(torch.stack(self.outs).sum()))
        self.outs.clear()


class Counter(Plain):
    """Counts its steps on itself."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx)


class MovingLoss(Plain):
    """Keeps a moving mean of its loss as an attribute, and weighs the loss by it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


class HandMadeStatistics(Plain):
    """Keeps statistics of its features in a buffer, written in place in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.net(x - self.mean)


class GivesMore(Plain):
    """Returns the loss in a dictionary, with more in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach()}


class Metrics(Plain):
    """Has torchmetrics for training and validation, and logs the objects."""

    def __init__(self) -> None:
        super().__init__()
        self.train_acc = MulticlassAccuracy(CLASSES)
        self.val_acc = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.train_acc(logits.detach(), batch[1])
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.val_acc.update(self(batch[0]), batch[1])
        self.log("val_acc", self.val_acc, sync_dist=False)


class Annealed(Plain):
    """Weighs a part of its loss by the number of the step and the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        weight = 0.1 * (1 + self.global_step) + self.current_epoch
        return F.cross_entropy(logits, batch[1]) + weight * logits.square().mean()


# ---------------------------------------------------------------------- ways to call


class Parts(nn.Module):
    """An encoder and a decoder, called together or one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class OtherWay(Plain):
    """Calls the parts of its network in training, and the whole in validation."""

    def make_net(self) -> nn.Module:
        return Parts()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net.decoder(self.net.encoder(batch[0])), batch[1])


class WholeInTraining(OtherWay):
    """Calls its network as a whole in training, and its parts in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Plain.training_step(self, batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net.decoder(self.net.encoder(batch[0]))
        self.log("val_loss", F.cross_entropy(logits, batch[1]))


class ValidationOnly(Plain):
    """Has a module that validation alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Sequential(nn.Linear(CLASSES, SIZE), nn.Tanh(), nn.Linear(SIZE, 1))
        self.judge.requires_grad_(False)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_judged", self.judge(self(batch[0])).mean())


class Teacher(Plain):
    """Learns from a frozen teacher, which is called in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).eval().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            goal = self.teacher(batch[0]).softmax(1)
        return F.cross_entropy(self(batch[0]), goal) + super().training_step(batch, batch_idx)


class MovingTeacher(Teacher):
    """Has a teacher that follows it, a little in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for mine, its in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                its.lerp_(mine, 0.1)
        return super().training_step(batch, batch_idx)


class LateTeacher(MovingTeacher):
    """Has a teacher that follows it, but not in its first step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        begins = self.trainer.global_step > 0
        step = MovingTeacher if begins else Teacher
        return step.training_step(self, batch, batch_idx)


class ChangesWeights(Plain):
    """Scales a layer's weights down when it is called, where no count of changes shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4].register_forward_pre_hook(self._shrink)

    def _shrink(self, layer: nn.Module, _: Any) -> None:
        layer.weight.data.mul_(0.9)


class LateChanges(ChangesWeights):
    """Scales a layer's weights down when it is called, but not in its first step."""

    def _shrink(self, layer: nn.Module, given: Any) -> None:
        if self.trainer.global_step > 0:
            super()._shrink(layer, given)


class ReversedValidation(Plain):
    """Calls its layers in another order in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.net[2](batch[0])
        self.log("val_loss", F.cross_entropy(self.net[4](self.net[0](x)), batch[1]))


class DirectForward(Plain):
    """Calls ``forward`` of itself and of its modules, not the modules."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for layer in self.net:
            x = layer.forward(x)
        return F.cross_entropy(x, batch[1])


class SelfForward(Plain):
    """Calls its own ``forward``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.forward(batch[0]), batch[1])


class Twice(Plain):
    """Calls one module twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[1](self.net[0](x))
        x = self.net[1](self.net[0](x))
        return self.net[4](self.net[3](self.net[2](x)))


class Skips(Plain):
    """Adds what went in to what comes out, over several stages."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net[4](x + self.net[3](self.net[2](x + self.net[1](self.net[0](x)))))


class Auxiliary(Plain):
    """Has a second loss on features from the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(SIZE, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        middle = self.net[1](self.net[0](batch[0]))
        end = self.net[4](self.net[3](self.net[2](middle)))
        return F.cross_entropy(end, batch[1]) + F.cross_entropy(self.side(middle), batch[1])


class SharedStep(Plain):
    """Has one step for everything."""

    def step(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        values = {f"{name}_loss": loss, f"{name}_acc": (logits.argmax(1) == y).float().mean()}
        self.log_dict(values, prog_bar=True, on_epoch=True, batch_size=len(x))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "val")


class InPlace(Plain):
    """Changes activations in place, also its input."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True), nn.Linear(SIZE, SIZE),
            nn.ReLU(inplace=True), nn.Linear(SIZE, CLASSES),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].add_(1.0)
        return super().training_step(batch, batch_idx)


# ---------------------------------------------------------------------- parameters


class Frozen(Plain):
    """Has a frozen beginning, which runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.net[1](self.net[0](x))
        return self.net[4](self.net[3](self.net[2](x)))


class FrozenEnd(Plain):
    """Has a frozen end."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].requires_grad_(False)
        self.net[4].requires_grad_(False)


class Tied(Plain):
    """Uses one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight = self.net[0].weight


class OwnParameter(Plain):
    """Uses parameters of its own in the code between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(SIZE))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.shift) * self.scale


class Parametrized(Plain):
    """Has weight norm on its layers."""

    def make_net(self) -> nn.Module:
        net = super().make_net()
        for k in (0, 2, 4):
            nn.utils.parametrizations.weight_norm(net[k])
        return net


class SpectralNorm(Plain):
    """Has spectral norm on its layers, whose power iteration writes buffers."""

    def make_net(self) -> nn.Module:
        net = super().make_net()
        for k in (0, 2):
            nn.utils.parametrizations.spectral_norm(net[k])
        return net


class Normalised(Plain):
    """Has BatchNorm."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE),
            nn.BatchNorm1d(SIZE), nn.Linear(SIZE, CLASSES),
        )  # fmt: skip


class Weighted(Plain):
    """Has the weights of classes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("not_saved", torch.ones(1), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]) * self.not_saved, batch[1], self.weights)


class Unused(Plain):
    """Has a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(SIZE, SIZE)


class LowRank(nn.Module):
    """A frozen layer with a trained low-rank part, as LoRA has it."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class LowRankLayers(Plain):
    """Trains low-rank parts of frozen layers alone, and gives the optimizer these alone."""

    def make_net(self) -> nn.Module:
        net = super().make_net()
        for k in (0, 2, 4):
            net[k] = LowRank(net[k])
        return net

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Sparse(LightningModule):
    """Has an embedding, whose gradient would be sparse."""

    sparse = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, SIZE, sparse=self.sparse)
        self.rnn = nn.GRU(SIZE, SIZE, batch_first=True)
        self.head = nn.Linear(SIZE, WORDS)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, _ = self.rnn(self.embedding(batch["input_ids"]))
        return F.cross_entropy(self.head(features).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LimitedNorm(Sparse):
    """Has an embedding whose rows are scaled down when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.max_norm = 0.5


class ReallySparse(Sparse):
    """Has an embedding with sparse gradients."""

    sparse = True


class Complex(Plain):
    """Has complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(SIZE, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((torch.fft.fft(x) * self.phase).real)


# ---------------------------------------------------------------------- checkpointing, compile


class Checkpointed(Plain):
    """Runs blocks again in their backward."""

    def make_net(self) -> nn.Module:
        blocks = [
            nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Tanh())
            for _ in range(3)
        ]
        return nn.ModuleList([*blocks, nn.Linear(SIZE, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        *blocks, head = self.net
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return head(x)


class Reentrant(Checkpointed):
    """Runs blocks again in their backward, in torch's old way."""

    def forward(self, x: Tensor) -> Tensor:
        first, *blocks, head = self.net
        x = first(x)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return head(x)


class CompiledBlock(Plain):
    """Has a block that is compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].compile(backend="eager")


class CompiledModule(Plain):
    """Has a block that torch.compile has wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.compile(self.net[2], backend="eager")


# ---------------------------------------------------------------------- hooks


class Unfreezing(Plain):
    """Gives the optimizer what is not frozen, for a callback that unfreezes the rest later."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Thawing(Plain):
    """Freezes and unfreezes layers between steps; one comes to the optimizer late."""

    def configure_optimizers(self) -> Any:
        self.net[0].requires_grad_(False)
        held = [*self.net[:4].parameters(), self.net[4].weight]
        return torch.optim.AdamW(held, 0.05, weight_decay=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        t, optimizer = self.trainer.global_step, self.trainer.optimizers[0]
        if t == 2 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [self.net[4].bias], "lr": 0.02})
        self.net[0].requires_grad_(t in (1, 2, 5, 6))
        self.net[4].requires_grad_(t not in (3, 4))


class HandMadeAverage(Plain):
    """Keeps a moving average of its weights by hand, in a copy that is no part of it."""

    def on_train_start(self) -> None:
        self.average = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for a, p in zip(self.average, self.parameters(), strict=True):
            a.mul_(0.9).add_(p.detach(), alpha=0.1)


class ClippedWeights(Plain):
    """Clips its weights behind each batch through ``.data``, as WGANs do."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            for p in self.parameters():
                p.data.clamp_(-0.05, 0.05)


class OwnClipping(Plain):
    """Clips gradients in its own hook."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")


class OwnScheduling(Plain):
    """Steps its scheduler in its own hook, and reads the learning rate in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


class Plateau(Plain):
    """Has a scheduler that looks at the validation loss."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


class OwnOptimizerStep(Plain):
    """Warms its learning rate up in its own optimizer_step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)
        optimizer.step(closure=closure)


class RateInStep(Plain):
    """Sets its learning rate in training_step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)
        return super().training_step(batch, batch_idx)


class RateInHook(Plain):
    """Sets its learning rate before each update, in a hook."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)


class ScaledByStep(Plain):
    """Makes gradients smaller from step to step, in a hook, and clips them by smaller values."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        updated = getattr(self.trainer.strategy, "updated_parameters", self.parameters())
        for p in updated:
            p.grad /= 1 + self.trainer.global_step

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        bound = 0.01 / (1 + self.trainer.global_step)
        self.clip_gradients(optimizer, gradient_clip_val=bound, gradient_clip_algorithm="value")


class ForgetsMomentum(Plain):
    """Sets its momentum to zero between two steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            for state in self.trainer.optimizers[0].state.values():
                state["momentum_buffer"].zero_()


class FreezesInStep(Plain):
    """Freezes its first layer in training_step, and unfreezes it behind some steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[0].requires_grad_(self.trainer.global_step > 1)
        return super().training_step(batch, batch_idx)


class AddsGroup(Plain):
    """Gives its optimizer another parameter group before its second update, in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.factor

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 1 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [self.factor]})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class AddsGroupBehindBackward(AddsGroup):
    """Gives its optimizer another parameter group behind the backward of its second step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Leave it as it is."""

    def on_after_backward(self) -> None:
        super().on_before_optimizer_step(self.trainer.optimizers[0])


class LeavesUpdatesOut(Plain):
    """Leaves its second update out, and calls the closure alone."""

    def __init__(self) -> None:
        super().__init__()
        self.has_left_one_out = False

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if self.trainer.global_step == 1 and not self.has_left_one_out:
            self.has_left_one_out = True
            closure()
        else:
            optimizer.step(closure=closure)


class OwnZeroGrad(Plain):
    """Zeroes its gradients in its own hook."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class FunctionCheckpointed(Plain):
    """Runs a function on its own parameters again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.end = Squared()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.net(x))


class Squared(nn.Module):
    """Has a checkpointed function that calls no module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(y @ self.weight).square(), x, use_reentrant=False)


class OwnBackward(Plain):
    """Runs the backward in its own hook."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2.0 * loss).backward()


class MadeInSetup(Plain):
    """Makes its layers in ``setup``."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.seen = []

    def setup(self, stage: str) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = self.make_net()


class MadeInConfigureModel(MadeInSetup):
    """Makes its layers in ``configure_model``."""

    def setup(self, stage: str) -> None:
        pass

    def configure_model(self) -> None:
        MadeInSetup.setup(self, "fit")


class Skipping(Plain):
    """Gives no loss for some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class Gathers(Plain):
    """Gathers its outputs over all workers in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of a name of torch's in Lightning
            return loss + 0.0 * self.all_gather(loss.detach()).sum()


class NormsOfGradients(Plain):
    """Logs the norm of each gradient, as Lightning's documentation has it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]
        self.seen.append(len(norms))


class Manual(Plain):
    """Optimises by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


# ---------------------------------------------------------------------- optimizers


class Lion(torch.optim.Optimizer):
    """The sign of a mix of momentum and gradient (arXiv 2302.06675)."""

    updates_apart = "element"

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.setdefault("exp_avg", torch.zeros_like(p))
                p.add_((0.9 * momentum + 0.1 * p.grad).sign(), alpha=-group["lr"])
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)
        return loss


class ScheduleFree(Lion):
    """Exchanges the weights between training and evaluation, as schedule-free ones do."""

    def train(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(0.01)

    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(0.01)


class With(Plain):
    """Has another optimizer.

    Args:
        name: which.
        **options: of it.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.name_of_optimizer, self.options = name, options

    def configure_optimizers(self) -> Any:
        name, parameters = self.name_of_optimizer, list(self.parameters())
        if name == "Lion":
            return Lion(parameters, **self.options)
        if name == "ScheduleFree":
            return ScheduleFree(parameters, **self.options)
        if hasattr(optimizers, name):
            return getattr(optimizers, name)(parameters, **self.options)
        if name == "Muon":
            parameters = [p for p in parameters if p.ndim == 2]
        return getattr(torch.optim, name)(parameters, **self.options)


class Groups(Plain):
    """Has groups with rates of their own."""

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.AdamW([
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "lr": 0.01},
        ], lr=0.05)  # fmt: skip


# ---------------------------------------------------------------------- Hugging Face


class LanguageModel(LightningModule):
    """GPT-2, with what Hugging Face lets one switch on.

    Args:
        lora: whether low-rank parts alone are trained (peft).
    """

    def __init__(self, *, lora: bool = False) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": SIZE, "n_layer": 3, "n_head": 2}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, **none, **ends))
        self.seen: list[Any] = []
        if lora:
            from peft import LoraConfig, get_peft_model

            wanted = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
            self.model = get_peft_model(self.model, wanted)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Generating(LanguageModel):
    """Generates text in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        start = batch["input_ids"][:, :2]
        tokens = self.model.generate(start, max_new_tokens=3, do_sample=False)
        if not self.trainer.sanity_checking:
            self.seen.append(tokens.tolist())


# ---------------------------------------------------------------------- hooks of torch


class GradientHooks(Plain):
    """Halves the gradients of parameters in hooks on them."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda grad: grad / 2)  # type: ignore[no-untyped-call]


class TensorHooks(Plain):
    """Triples a gradient within its second half, in a hook of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[:3](x)
        if x.requires_grad:
            x.register_hook(lambda grad: 3 * grad)  # type: ignore[no-untyped-call]
        return self.net[3:](x)


class BackwardHooks(Plain):
    """Has a layer whose hook halves what its backward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].register_full_backward_hook(lambda _, grads, __: (grads[0] / 2,))


class GradientPenalty(Plain):
    """Penalises the gradient of its scores by its input."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        scores = self(x)
        (grad,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return F.cross_entropy(scores, batch[1]) + grad.pow(2).mean()


class FunctionalCall(Plain):
    """Calls its layers with their parameters as arguments."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.net, dict(self.net.named_parameters()), x)


class Reversed(torch.autograd.Function):
    """Turn a gradient round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


class GradientReversal(Plain):
    """Turns a gradient round between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = Reversed.apply(self.net[:2](x))
        return self.net[2:](x)


class StepHooks(Plain):
    """Clips weights in a hook of its optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self._clip)
        return optimizer

    @torch.no_grad()
    def _clip(self, optimizer: Any, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.clamp_(-0.3, 0.3)
