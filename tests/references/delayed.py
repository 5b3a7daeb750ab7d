"""A chain of linear layers, trained on ranks, and the sequential reference of late gradients.

The reference is written from the published rules, not from the package: nothing of it is
imported. Stage j of S; micro-batch i of m in step t. Each stage has an optimizer of its own, whose
learning rate is set by hand in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from tests.harness.trainers import make_trainer
from tests.modules.classifier import Resumable
from tests.references import asynchronous

STAGES = ["layers.1", "layers.2", "layers.3"]  # that begin stages 1, 2, 3
NUM_STAGES, ROWS, SIZE, LR = 4, 3, 5, 0.25
Factor = Callable[[int], float]  # of the learning rate, by step

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.5),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=LR / 8, weight_decay=0.01),
}
FACTORS: dict[str, Factor] = {
    "constant": lambda t: 1.0,
    "sawtooth": lambda t: (1 + t % 5) / 5,  # another rate in every step
}


def batch_of(k: int) -> Tensor:
    """Return micro-batch k."""
    return torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(k))


class Steps(Dataset[Tensor]):
    """The micro-batches of each step, joined."""

    def __init__(self, num_microbatches: int, num_steps: int) -> None:
        self.num_microbatches, self.num_steps = num_microbatches, num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, t: int) -> Tensor:
        return torch.cat(
            [batch_of(t * self.num_microbatches + i) for i in range(self.num_microbatches)]
        )


class Chain(LightningModule):
    """Linear layers with tanh behind each; learns to give zero.

    Args:
        optimizer: name.
        factor: name of the schedule of its learning rate.
        tied: whether the last layer has the weight of the first.
    """

    def __init__(
        self, optimizer: str = "sgd", factor: str = "constant", *, tied: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(NUM_STAGES))
        if tied:
            self.layers[-1].weight = self.layers[0].weight
        self.names = (optimizer, factor)

    def loss(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.names[0]](self.parameters())
        factor = FACTORS[self.names[1]]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def stages(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each stage; of what is tied, the first has it."""
        found: dict[nn.Parameter, int] = {}
        for j, layer in enumerate(self.layers):
            for p in layer.parameters():
                found.setdefault(p, j)
        return [[p for p, k in found.items() if k == j] for j in range(NUM_STAGES)]

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.named_parameters()}


# ---------------------------------------------------------------------- on ranks


def loader(num_microbatches: int, num_steps: int) -> DataLoader[Any]:
    return Resumable(Steps(num_microbatches, num_steps), batch_size=None)


def fit(
    make: Callable[[], Chain],
    strategy: dict[str, Any],
    num_steps: int,
    saved: tuple[str, int] | None = None,
    callbacks: Sequence[Callback] = (),
    ckpt_path: str | None = None,
    **flags: Any,
) -> dict[str, Tensor]:
    """Train on this rank; with ``saved``, save behind that step and go on in a new Trainer."""
    batches = (strategy["num_microbatches"], num_steps)
    strategy = {"stages": STAGES} | strategy
    if saved is not None:
        folder, step = saved
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=step, save_top_k=-1)
        first = make_trainer(
            strategy, max_steps=step + 2, callbacks=[saver], enable_checkpointing=True, **flags
        )
        first.fit(make(), loader(*batches))
        ckpt_path = f"{folder}/step={step}.ckpt"
    module = make()
    trainer = make_trainer(strategy, max_epochs=1, callbacks=list(callbacks), **flags)
    valid = loader(strategy["num_microbatches"], 1) if "val_check_interval" in flags else None
    trainer.fit(module, loader(*batches), valid, ckpt_path=ckpt_path)
    return module.weights()


# ---------------------------------------------------------------------- by the rules


def version_read(rule: str, t: int, i: int, j: int, m: int, num_sync: int) -> int:
    """Return the version that micro-batch i of step t reads on stage j.

    In synchronous steps, the newest; behind them, as if training had begun there.
    """
    k = t - num_sync
    late = asynchronous.version_read(rule, k, i, j, m, NUM_STAGES) if k >= 0 else 0
    return t if k < 0 else num_sync + late


def delay(rule: str, j: int, m: int) -> float:
    """Return by how many updates gradients of stage j are old, on average, far from the start."""
    t = 4 * NUM_STAGES
    return sum(t - version_read(rule, t, i, j, m, 0) for i in range(m)) / m


def sequential(
    make: Callable[[], Chain],
    rule: str,
    num_microbatches: int,
    num_steps: int,
    *,
    num_sync: int = 0,
    error_feedback: bool = False,
) -> dict[str, Tensor]:
    """Train one micro-batch after the other; return the newest weights."""
    torch.set_num_threads(1)
    chain = make()
    name, factor = chain.names[0], FACTORS[chain.names[1]]
    stages = chain.stages()
    optimizers = [OPTIMIZERS[name](stage) for stage in stages]
    base = optimizers[0].param_groups[0]["lr"]
    versions = [[[p.detach().clone() for p in stage]] for stage in stages]
    last = [[torch.zeros_like(p) for p in stage] for stage in stages]  # updates
    for t in range(num_steps):
        totals: list[list[Tensor | None]] = [[None] * len(stage) for stage in stages]
        for i in range(num_microbatches):
            for j, stage in enumerate(stages):
                v = version_read(rule, t, i, j, num_microbatches, num_sync)
                asynchronous.put(stage, versions[j][v])
            (chain.loss(batch_of(t * num_microbatches + i)) / num_microbatches).backward()
            for stage, total in zip(stages, totals, strict=True):
                asynchronous.take_grads(stage, total)
        is_late = t >= num_sync
        for j, stage in enumerate(stages):
            asynchronous.put(stage, versions[j][t])
            for p, total in zip(stage, totals[j], strict=True):
                p.grad = total
            optimizers[j].param_groups[0]["lr"] = base * factor(t)
            optimizers[j].step()
            optimizers[j].zero_grad()
            values = [p.detach().clone() for p in stage]
            if error_feedback and is_late and delay(rule, j, num_microbatches) > 0:
                for n, (old, new) in enumerate(zip(versions[j][t], values, strict=True)):
                    update = old - new
                    # old - (2 * update - last), from where the optimizer has led
                    values[n] = new - (update - last[j][n])
                    last[j][n] = update
            versions[j].append(values)
    for j, stage in enumerate(stages):
        asynchronous.put(stage, versions[j][-1])
    return chain.weights()


# ---------------------------------------------------------------------- by predicting rules

State = dict[str, Tensor]


def look_ahead(optimizer: str, weights: Tensor, state: State, lrs: Sequence[float]) -> Tensor:
    """Return where an optimizer goes in as many updates as there are learning rates."""
    if not state or not lrs:
        return weights
    if optimizer == "sgd":
        return torch.add(weights, state["momentum_buffer"], alpha=-sum(lrs, start=0.0))
    t, decay = float(state["step"]), 0.01
    root = state["exp_avg_sq"].sqrt()
    direction = state["exp_avg"] / (1 - 0.9**t) / (root / (1 - 0.999**t) ** 0.5 + 1e-8)
    kept, reach = 1.0, 0.0
    for lr in lrs:
        kept, reach = kept * (1 - lr * decay), reach * (1 - lr * decay) + lr
    return torch.add(weights * kept, direction, alpha=-reach)


def predicted(  # noqa: C901  (all rules on one screen)
    make: Callable[[], Chain],
    preset: str,
    num_microbatches: int,
    num_steps: int,
    *,
    error_feedback: bool = False,
) -> dict[str, Tensor]:
    """Train one micro-batch after the other; return the newest weights."""
    torch.set_num_threads(1)
    chain = make()
    name, factor = chain.names[0], FACTORS[chain.names[1]]
    stages = chain.stages()
    optimizers = [OPTIMIZERS[name](stage) for stage in stages]
    base = optimizers[0].param_groups[0]["lr"]
    past: list[list[Any]] = []  # version -> layer -> [(weight, state), (bias, state)]
    last = [[torch.zeros_like(p) for p in stage] for stage in stages]  # updates

    def guessed(v: int, j: int, updates: int) -> tuple[Tensor, ...]:
        lrs = [base * factor(v - 1)] * updates if v > 0 else []
        return tuple(look_ahead(name, p, state, lrs) for p, state in past[v][j])

    for t in range(num_steps):
        past.append(
            [
                [(p.detach().clone(), _state(optimizer, p)) for p in stage]
                for stage, optimizer in zip(stages, optimizers, strict=True)
            ]
        )
        totals: list[list[Tensor | None]] = [[None, None] for _ in stages]
        for i in range(num_microbatches):
            ahead, back = [], []
            for j in range(NUM_STAGES):
                v, forward, backward = asynchronous.horizons(
                    preset, t, j, num_microbatches, NUM_STAGES
                )
                ahead.append(guessed(v, j, forward))
                back.append(guessed(t, j, backward))
            x = batch_of(t * num_microbatches + i)
            grads = asynchronous._with_faces(ahead, back, x, num_microbatches)
            for total, of_layer in zip(totals, grads, strict=True):
                for n, grad in enumerate(of_layer):
                    so_far = total[n]
                    total[n] = grad if so_far is None else so_far + grad
        for j, stage in enumerate(stages):
            for p, total in zip(stage, totals[j], strict=True):
                p.grad = total
            optimizers[j].param_groups[0]["lr"] = base * factor(t)
            optimizers[j].step()
            if error_feedback and j < NUM_STAGES - 1:
                for n, (p, (old, _)) in enumerate(zip(stage, past[t][j], strict=True)):
                    update = old - p.detach()
                    p.data = p.data - (update - last[j][n])
                    last[j][n] = update
    return chain.weights()


def _state(optimizer: Optimizer, p: nn.Parameter) -> State:
    return {k: v.clone() for k, v in optimizer.state.get(p, {}).items() if v is not None}
