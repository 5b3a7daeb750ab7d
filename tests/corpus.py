"""LightningModules and data of the multi-process tests: the same file under every strategy.

Micro-batch k = t * N + i of a run is element k of one data set; the sampler of worker i gives it
exactly the micro-batches (t, i).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_cyclic import PRESETS, CyclicStrategy, PipelineStrategy
from lightning_cyclic.plan.presets import AXES
from lightning_cyclic.registration import make_strategy
from tests import sequential
from tests.optimizers import Counting
from tests.processes import here

Batch = tuple[Tensor, Tensor]


# ---------------------------------------------------------------------- networks


def mlp(num_layers: int = 9, dropout: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(12, 12), nn.Tanh()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(12, 3))


def batchnorm_mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(12, 3))


class Block(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False))
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


# ---------------------------------------------------------------------- data


class MicroBatches(Dataset[Batch]):
    """Micro-batch k, made from k alone.

    Args:
        kind: "vectors", "images" or "tokens".
        num: how many there are.
        seed: of the whole set.
    """

    def __init__(self, kind: str, num: int, seed: int = 0) -> None:
        self.kind, self.num, self.seed = kind, num, seed

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, k: int) -> Batch:
        g = torch.Generator().manual_seed(100_000 * self.seed + k)
        if self.kind == "tokens":
            x = torch.randint(0, 50, (2, 12), generator=g)
            return x, x
        shape = (7, 12) if self.kind == "vectors" else (4, 3, 8, 8)
        return torch.randn(shape, generator=g), torch.randint(0, 3, shape[:1], generator=g)


class Resumable(DataLoader[Batch]):
    """Knows where it is, so that a run can go on in mid epoch."""

    _next = 0

    def __iter__(self) -> Any:
        for k, batch in enumerate(super().__iter__()):
            if k >= self._next:
                self._next = (k + 1) % len(self)
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def loader(data: Dataset[Any]) -> DataLoader[Any]:
    """Give worker i of N elements i, N + i, 2 N + i, ..."""
    rank, num = here().rank, here().num_ranks
    sampler = range(rank, len(data), num) if num > 1 else None  # type: ignore[arg-type]
    return Resumable(data, batch_size=None, sampler=sampler, shuffle=False)


# ---------------------------------------------------------------------- optimizers


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that differs in every step, so that an update with another step's rate is seen."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (1 + t % 7) / 7)


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "sgd": (sgd, False),
    "adamw": (adamw, True),  # with the scheduler
    "counting": (Counting, True),
}
NETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (mlp, "vectors"),
    "batchnorm_mlp": (batchnorm_mlp, "vectors"),
    "resnet": (resnet, "images"),
    "gpt2": (gpt2, "tokens"),
}


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    if x.dtype == torch.int64:
        return net(input_ids=x, labels=y).loss
    return F.cross_entropy(net(x), y)


# ---------------------------------------------------------------------- the module


class Classifier(LightningModule):
    """An ordinary LightningModule; no line of it knows of a strategy.

    Args:
        net: name of a network.
        optimizer: name of an optimizer.
    """

    def __init__(self, net: str = "mlp", optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(0)
        make_net, self.kind = NETS[net]
        self.net = make_net()
        self.optimizer_name = optimizer
        self.losses: list[float] = []
        self.rates: list[float] = []

    def loss(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch), sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", loss_of(self.net, batch), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        make_optimizer, scheduled = OPTIMIZERS[self.optimizer_name]
        optimizer = make_optimizer(self.parameters())
        if not scheduled:
            return optimizer
        scheduler = {"scheduler": warm_up(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


# ---------------------------------------------------------------------- running it


def make_trainer(strategy: Any, **flags: Any) -> Trainer:
    """Make a quiet Trainer for the ranks that :mod:`tests.processes` started."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return Trainer(
        accelerator="cpu", devices=1, num_nodes=here().num_ranks, strategy=strategy_of(strategy),
        **(quiet | flags),
    )  # fmt: skip


def strategy_of(strategy: Any) -> Any:
    """Return a name as it is, and a dict as the strategy of its options; it may replace axes."""
    if not isinstance(strategy, dict):
        return strategy
    given = {"preset": "cyclic_dp"} | strategy
    replaced = {axis: given.pop(axis) for axis in AXES if axis in given}
    if not replaced:
        return make_strategy(**given)
    preset = PRESETS[given.pop("preset")]
    door = CyclicStrategy if preset.placement == "replicated" else PipelineStrategy
    return door({axis: getattr(preset, axis) for axis in AXES} | replaced, **given)


def train_data(module: Classifier, num_batches: int) -> DataLoader[Any]:
    """Return the loader of so many batches per worker."""
    return loader(MicroBatches(module.kind, num_batches * here().num_ranks))


def valid_data(module: Classifier, num_batches: int = 2) -> DataLoader[Any]:
    """Return the loader of so many other batches per worker."""
    return loader(MicroBatches(module.kind, num_batches * here().num_ranks, seed=1))


def fit(
    make_module: Callable[[], Classifier], strategy: Any, num_batches: int, flags: dict[str, Any]
) -> dict[str, Any]:
    """Train on this rank and return what tests compare."""
    module = make_module()
    trainer = make_trainer(strategy, **({"max_epochs": 1} | flags))
    trainer.fit(module, train_data(module, num_batches), valid_data(module))
    return outcome(trainer, module)


def outcome(trainer: Trainer, module: Classifier) -> dict[str, Any]:
    """Return what tests compare."""
    return {
        "weights": weights_of(module),
        "stage_of": dict(getattr(trainer.strategy, "stage_of", {})),
        "losses": list(module.losses),
        "rates": list(module.rates),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "metrics": {name: float(x) for name, x in trainer.callback_metrics.items()},
    }


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all parameters and buffers."""
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


def assert_same(given: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    """Compare bit by bit."""
    assert given.keys() == expected.keys(), what
    for name, x in expected.items():
        assert torch.equal(given[name], x), f"{what} {name}"


class Said(logging.Handler):
    """Note what is logged.

    Args:
        name: of the logger.
    """

    def __init__(self, name: str = "lightning.pytorch.utilities.rank_zero") -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# ---------------------------------------------------------------------- the reference


@dataclass(kw_only=True)
class Reference:
    """The sequential run of a module, and what it left.

    Args:
        rule: "sync", "delayed" or "freshest".
        n: number of workers.
        slack: of the rule.
        num_batches: of each worker and epoch.
        num_epochs: how often they are trained on.
        accumulate: batches per step of each worker.
        clip: called before each update with (all parameters, parameters by stage).
        each_epoch: called behind each epoch with the module and the optimizer.
        seed_of: (step, micro-batch) -> seed of the randomness inside.
        saved: a checkpoint whose weights, optimizer and scheduler state it begins with.
        groups: of workers. [each is one]
        wire: between them. [in their own dtype]
    """

    rule: str
    n: int
    num_batches: int
    slack: int = 0
    num_epochs: int = 1
    max_steps: int | None = None
    accumulate: int = 1
    clip: Callable[[list[nn.Parameter], list[list[nn.Parameter]]], None] | None = None
    each_epoch: Callable[[Any, Any], None] | None = None
    seed_of: Callable[[int, int], int] | None = None
    saved: dict[str, Any] | None = None
    groups: int | None = None
    wire: sequential.Wire | None = None

    def run(self, module: Classifier, stage_of: dict[str, int]) -> Reference:
        """Train the module in place; return the reference with losses and rates by worker."""
        self.losses: list[list[float]] = [[] for _ in range(self.n)]
        self.rates: list[float] = []
        self._data = MicroBatches(module.kind, self.num_batches * self.n)
        made = module.configure_optimizers()
        parts = made if isinstance(made, dict) else {"optimizer": made}
        optimizer, scheduler = parts["optimizer"], parts.get("lr_scheduler")
        per_epoch = -(-self.num_batches // self.accumulate)
        stages = by_stage(module, stage_of)
        if self.saved is not None:
            module.load_state_dict(self.saved["state_dict"])
            optimizer.load_state_dict(self.saved["optimizer_states"][0])
            if scheduler is not None:
                scheduler["scheduler"].load_state_dict(self.saved["lr_schedulers"][0])

        def before_update() -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])
            if self.clip is not None:
                self.clip([p for g in optimizer.param_groups for p in g["params"]], stages)

        def after_update(t: int) -> None:
            if scheduler is not None and scheduler["interval"] == "step":
                scheduler["scheduler"].step()
            if (t + 1) % per_epoch == 0 and self.each_epoch is not None:
                self.each_epoch(module, scheduler and scheduler["scheduler"])

        sequential.train(
            module, stages, optimizer, self._loss, rule=self.rule, num_workers=self.n,
            num_steps=self.max_steps or self.num_epochs * per_epoch, slack=self.slack,
            before_update=before_update, after_update=after_update, num_groups=self.groups,
            wire=self.wire,
        )  # fmt: skip
        self.weights = weights_of(module)
        return self

    def _loss(self, module: nn.Module, t: int, i: int) -> Tensor:
        """Sum the gradients of the window's batches on this worker; return its last loss."""
        if self.seed_of is not None:
            torch.manual_seed(self.seed_of(t, i))
        start = t % -(-self.num_batches // self.accumulate) * self.accumulate
        window = range(start, min(start + self.accumulate, self.num_batches))
        for b in window:
            loss = module.loss(self._data[b * self.n + i], b)
            self.losses[i].append(float(loss.detach()))
            if b < window[-1]:
                (loss / self.accumulate / self.n).backward()
        return loss / self.accumulate

    def compare(self, ranks: list[dict[str, Any]]) -> None:
        """Compare losses and weights of every worker, bit by bit."""
        for i, rank in enumerate(ranks):
            assert rank["stage_of"] == ranks[0]["stage_of"]
            assert rank["losses"] == self.losses[i], f"losses of worker {i}"
            assert_same(rank["weights"], self.weights, f"worker {i}")


def by_stage(module: nn.Module, stage_of: dict[str, int]) -> list[list[nn.Parameter]]:
    """Group the trained parameters as the strategy did."""
    named = dict(module.named_parameters())
    stages: list[list[nn.Parameter]] = [[] for _ in range(1 + max(stage_of.values()))]
    for name, j in stage_of.items():
        stages[j].append(named[name])
    return stages
