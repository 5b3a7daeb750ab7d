"""Pruned training by hand, in dense tensors: what SparseStatePrecision has to give, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from tests.harness import processes

WIDTH = 24
DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "32-true": torch.float32}

PLAIN_LIGHTNING = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in processes.EXPECTED_WARNINGS
    if ":" not in message
]

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


class Regression(LightningModule):
    """Learns the sine of its input.

    Args:
        net: what is trained.
        make: of the optimizer.
        schedule: whether the rate falls from step to step.
    """

    def __init__(self, net: nn.Module, make: Make = adamw, *, schedule: bool = False) -> None:
        super().__init__()
        self.net = net
        self._make = make
        self._schedule = schedule

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = self._make(self.parameters())
        if not self._schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(net(batch), torch.sin(3 * batch))


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, WIDTH)
    )


def with_norms() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, WIDTH))


def tied() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    layers[2].weight = layers[0].weight
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def batches(num: int, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(size, WIDTH, generator=generator) for _ in range(num)]


def loader(given: Sequence[Tensor]) -> Any:
    return DataLoader(given, batch_size=None)  # type: ignore[arg-type]


def trainer(plugin: Any, **flags: Any) -> Trainer:
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    defaults = {"enable_checkpointing": False, "max_epochs": 1, "accelerator": "cpu", "devices": 1}
    plugins = {} if plugin is None else {"plugins": [plugin]}
    return Trainer(**{**quiet, **defaults, **plugins, **flags})


def random_masks(module: nn.Module, kept: float = 0.3) -> dict[str, Tensor]:
    """Return masks of all weights that are matrices."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.rand(p.shape, generator=generator) < kept
        for name, p in module.named_parameters()
        if p.ndim > 1
    }


def dense_run(
    module: Regression,
    masks: dict[str, Tensor],
    dtype: torch.dtype,
    given: Sequence[Tensor],
    *,
    clip: float | None = None,
    accumulate: int = 1,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights and master weights of training with masks in dense tensors.

    A norm adds squares in the order of its tensor, so the reference gives it the kept elements
    alone, as compressed training has them: zeros between them would be added in other pairs.
    """
    module = copy.deepcopy(module)
    weights = dict(module.named_parameters())
    masters = {n: nn.Parameter(p.detach().float().clone()) for n, p in weights.items()}
    module.to(dtype)
    _mask_and_round(masters, weights, masks)
    module.parameters = lambda *_: iter(masters.values())  # type: ignore[method-assign]
    configured: Any = module.configure_optimizers()
    optimizer = configured[0][0] if isinstance(configured, tuple) else configured
    for k, batch in enumerate(given):
        (loss_of(module.net, batch.to(dtype)) / accumulate).backward()
        if (k + 1) % accumulate:
            continue
        for name, p in weights.items():
            assert p.grad is not None
            masters[name].grad = p.grad.float() * masks.get(name, 1)
            p.grad = None
        if clip:
            grads = {n: p.grad for n, p in masters.items() if p.grad is not None}
            kept = [g[masks[n]] if n in masks else g for n, g in grads.items()]
            total = torch.nn.utils.get_total_norm(kept)
            torch.nn.utils.clip_grads_with_norm_(masters.values(), clip, total)
        optimizer.step()
        _mask_and_round(masters, weights, masks)
        if isinstance(configured, tuple):
            configured[1][0]["scheduler"].step()
    found = {n: p.detach() for n, p in weights.items()}
    return found, {n: p.detach() for n, p in masters.items()}


@torch.no_grad()
def _mask_and_round(masters: Any, weights: Any, masks: dict[str, Tensor]) -> None:
    for name, master in masters.items():
        master.mul_(masks.get(name, 1))
        weights[name].copy_(master)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that are made within and still there.

    Args:
        smallest: number of bytes below which one is not counted: counts of steps, losses and
            small batches.
    """

    def __init__(self, smallest: int = 0) -> None:
        super().__init__()
        self.peak = 0
        self._smallest = smallest
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage.nbytes() >= self._smallest:
                    self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.num_bytes)
        return result

    @property
    def num_bytes(self) -> int:
        self._known = {k: v for k, v in self._known.items() if not v[0].expired()}
        return sum(n for _, n in self._known.values())


class MaskedMasters:
    """Update float32 master weights by gradients that are multiplied by masks.

    Args:
        module: whose weights get what the masters are, rounded.
        masks: name -> mask.
        dtype: of the weights.
        clip: largest norm of all gradients together.
    """

    def __init__(
        self, module: Any, masks: dict[str, Tensor], dtype: torch.dtype, clip: float | None = None
    ) -> None:
        self._weights = dict(module.named_parameters())
        self._masks, self._clip = masks, clip
        self._masters = {
            n: nn.Parameter(p.detach().float().clone()) for n, p in self._weights.items()
        }
        module.to(dtype)
        for p in self._weights.values():
            p.grad_dtype = None  # masters are given sums as they are
        module.parameters = lambda *_: iter(self._masters.values())  # type: ignore[method-assign]
        made = module.configure_optimizers()
        del module.parameters  # type: ignore[method-assign]
        schedulers: list[Any] = []
        if isinstance(made, tuple):
            (made,), schedulers = made
        self._optimizer, self.schedulers = made, schedulers
        self.param_groups = made.param_groups
        self._write()

    def step(self) -> None:
        for n, p in self._weights.items():
            grad = None if p.grad is None else p.grad.float() * self._masks.get(n, 1)
            self._masters[n].grad = grad
        if self._clip:  # by norms in the order of the optimizer
            name_of = {p: n for n, p in self._masters.items()}
            each = [p for group in self._optimizer.param_groups for p in group["params"]]
            grads = {name_of[p]: p.grad for p in each if p.grad is not None}
            kept = [g[self._masks[n]] if n in self._masks else g for n, g in grads.items()]
            total = torch.nn.utils.get_total_norm(kept)
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._clip, total)
        self._optimizer.step()
        self._write()

    def zero_grad(self) -> None:
        for p in self._weights.values():
            p.grad = None

    @torch.no_grad()
    def _write(self) -> None:
        for n, master in self._masters.items():
            master.mul_(self._masks.get(n, 1))
            self._weights[n].copy_(master)
