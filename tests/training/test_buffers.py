"""Buffers that a step changes outside of modules with parameters have one owner, and its order.

Each is what it is on one device that accumulates the same micro-batches: in hooks behind each
step, in validation, and in the end, on every rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.harness.rows import more
from tests.harness.runs import Result, run, trained
from tests.harness.trainers import assert_same

pytestmark = pytest.mark.multi
NUM_MICRO, NUM_STEPS = 4, 3


class Center(nn.Module):
    """Takes a running mean off; from one place, or by another tensor each time."""

    def __init__(self, *, anew: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.anew = anew

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.anew:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        elif self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class Codebook(nn.Module):
    """Begins with the first batch, which Python asks for, and is used by another module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(3, 4))
        self.register_buffer("has_begun", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_begun:
            self.codes.copy_(x.detach())
            self.has_begun.fill_(True)
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            self.codes.index_copy_(0, nearest, 0.9 * self.codes[nearest] + 0.1 * x.detach())
        return x + (self.codes[nearest] - x).detach()


class Stateful(LightningModule):
    """Has buffers of modules without parameters, and of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whiten = Center()  # what the batch alone decides
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.inner = nn.Sequential(nn.Linear(4, 4), Center(), nn.Tanh(), nn.Linear(4, 4))
        self.other, self.codebook = Center(anew=True), Codebook()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("level", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(6, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, batch: Tensor) -> Tensor:
        x = self.inner(self.norm(self.a(self.whiten(batch))))
        shift = batch * self.level  # of no parameter, but of one stage
        if self.training:
            self.level.mul_(0.5).add_(x.detach().mean(0))
        x = self.c(self.other(self.b(x)))
        return self.d(self.codebook(x)) + shift

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps.add_(1)
        y = self(batch)
        at = int(self.place)
        self.queue[at : at + len(y)] = y.detach()
        self.place.copy_((self.place + len(y)) % len(self.queue))
        return F.mse_loss(y, self.queue.mean(0).expand_as(y)) + y.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self(batch).square().sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Reads(Callback):
    """Reads a buffer of each kind behind each step, and before validation."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        with getattr(trainer.strategy, "whole", nullcontext)():
            self.on_validation_start(trainer, module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.seen.append([float(b.double().sum()) for b in module.buffers()])


def batches(num_rows: int) -> DataLoader[Any]:
    data = torch.randn(NUM_STEPS * NUM_MICRO * 3, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, num_rows)  # type: ignore[arg-type]


def seen(trainer: Any, module: Any) -> list[list[float]]:
    return next(c.seen for c in trainer.callbacks if isinstance(c, Reads))


def train(
    strategy: Any, n: int, make: Any = Stateful, how: Any = trained, **flags: Any
) -> list[Result]:
    if strategy != "auto":
        strategy = {"num_microbatches": NUM_MICRO} | strategy
    rows = 3 * NUM_MICRO // flags.get("accumulate_grad_batches", 1)
    found: list[Result] = how(
        make, strategy, n, data=partial(batches, rows), look=seen, callbacks=[Reads()],
        valid=partial(batches, 3 * NUM_MICRO * NUM_STEPS), num_sanity_val_steps=0, **flags,
    )  # fmt: skip
    return found


@cache
def plain(make: Any = Stateful) -> Result:
    return train("auto", 1, make, accumulate_grad_batches=NUM_MICRO)[0]


@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [
        (1, {"preset": "1f1b", "stages": ["inner.3", "c", "d"]}),
        (1, {"preset": "lockstep_dp", "stages": ["inner", "codebook"]}),
        (2, {"preset": "gpipe", "stages": ["inner.2"]}),
        (2, {"preset": "1f1b", "stages": ["inner.0", "c"], "activation_checkpointing": "always"}),
    ],
    ids=str,
)
def test_buffers_are_those_of_one_device(num_ranks: int, strategy: dict[str, Any]) -> None:
    reads = plain().found  # behind each micro-batch, and before validation
    for rank in train(strategy, num_ranks):
        assert_same(rank.weights, plain().weights)
        assert rank.found == reads[NUM_MICRO - 1 :: NUM_MICRO] + reads[-1:]
        assert rank.metrics["val"] == plain().metrics["val"]


# ---------------------------------------------------------------------- refused by name


class Anew(Stateful):
    def forward(self, batch: Tensor) -> Tensor:
        x = self.b(self.a(batch))
        self.level = 0.9 * self.level + x.detach().mean(0)
        return self.d(self.c(x - self.level))


class Late(Stateful):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx:
            self.level.add_(1)
        return self.d(self.b(batch) + self.level).square().mean()


class LateAnew(Stateful):
    """Changes a buffer from its third batch on.

    Args:
        how: "anew", or "data".
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx > 1:
            level = self.level + 1
            if self.how == "anew":
                self.level = level
            else:
                self.level.data.copy_(level)
        return self.d(self.b(batch) + self.level).square().mean()


@pytest.mark.parametrize("how", ["anew", "data"])
@pytest.mark.parametrize("preset", ["cyclic_dp", more("lockstep_dp"), more("cyclic_dp_v1")])
def test_buffers_that_begin_to_change_later_are_named_where_steps_are_whole(
    preset: str, how: str
) -> None:
    """They are not relayed, and were other ones on each rank, in silence."""
    said = "buffer 'level' changed in step 2 of rank"
    strategy = {"preset": preset, "stages": ["d"]}
    data = partial(batches, 6)
    ends = run(partial(LateAnew, how), strategy, 2, data=data, num_sanity_val_steps=0)
    assert any(said in end.text for end in ends), ends
    assert all(end.error for end in ends)
    relayed = run(partial(LateAnew, how), strategy | {"relay_buffers": "all"}, 2, data=data)
    assert not any(end.error for end in relayed), relayed


class Counts(nn.Linear):
    """Counts its calls in training, from the third batch on, in a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        self.count = self.count + (self.calls > 2 * NUM_MICRO)
        return super().forward(x)


class LateOwn(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.b = Counts()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.d(self.b(batch)).square().mean()


@pytest.mark.parametrize("preset", ["1f1b", more("zb_h1"), "pipedream_2bw"])
def test_a_module_s_own_buffer_that_begins_to_change_later_is_named(preset: str) -> None:
    """The rank that runs it had the new one, others validated with that of the beginning."""
    strategy = {"preset": preset, "stages": ["d"], "num_microbatches": NUM_MICRO}
    ends = run(LateOwn, strategy, 2, data=partial(batches, 3 * NUM_MICRO))
    assert any("buffer 'b.count' changed in step 2 on rank" in end.text for end in ends), ends
    assert all(end.error for end in ends)


class Caches(nn.Linear):
    """Makes a cache anew, of another size, from the third batch on."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 2 * NUM_MICRO:
            self.cache = torch.zeros(2)
        return super().forward(x) + self.cache.sum()


class Cached(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.b = Caches()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.d(self.b(batch)).square().mean()

    def on_train_epoch_end(self) -> None:
        with self.trainer.strategy.whole():  # type: ignore[attr-defined]
            assert self.d(self.b(torch.ones(1, 4))).shape == (1, 4)


@pytest.mark.parametrize("preset", ["1f1b", more("pipedream_2bw")])
def test_caches_that_are_made_anew_are_each_rank_s_own(preset: str) -> None:
    """Where all weights were gathered, a message of the wrong size ended the process."""
    strategy = {"preset": preset, "stages": ["d"], "num_microbatches": NUM_MICRO}
    ends = run(Cached, strategy, 2, data=partial(batches, 3 * NUM_MICRO))
    assert not any(end.error for end in ends), ends


def test_code_between_modules_changes_buffers_in_place() -> None:
    (end,) = train({"preset": "1f1b", "stages": ["c"]}, 1, Anew, run)
    assert "buffer 'level' is assigned anew by code that later stages repeat" in end.text
    assert "self.level.copy_(...)" in end.text
    assert 'use stages=["b"]' in end.text
    (rank,) = train({"preset": "1f1b", "stages": ["b"]}, 1, Anew)
    assert_same(rank.weights, plain(Anew).weights)


@pytest.mark.parametrize("preset", ["1f1b", more("cyclic_pipeline")])
def test_buffers_that_begin_to_change_later_are_named(preset: str) -> None:
    ends = train({"preset": preset, "stages": ["d"]}, 2, Late, run)
    said = "buffer 'level' was changed in step 1 by code that several stages run"
    assert any(said in end.text for end in ends)
    assert all(end.error for end in ends)
