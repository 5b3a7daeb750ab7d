"""Measure what the comparison of the first step with the plain one costs.

    python -m benchmarks first_step                        all models, 1, 2 and 4 ranks
    python -m benchmarks first_step --only mlp --ranks 2 --rounds 5

Each fit is a process of its own for each rank, and trains two steps by 1f1b with four
micro-batches; with and without the comparison in turn. Seconds are from the begin of the first
batch to the end of the first step (stages are found within), memory is the largest resident set of
rank 0 in it. Median of the rounds (lowest - highest).
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.rounds import quiet, result, spread, start
from lightning_cyclic import PipelineStrategy
from recipes.models.resnet import resnet50

NUM_MICRO = 4
SMOKE = ("--only", "mlp", "--ranks", "2", "--rounds", "1")
MODELS = ("mlp", "resnet50", "gpt2")


class Module(LightningModule):
    """Train one of the models."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = _net(kind)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found = self.net(x)
        logits = found.logits if hasattr(found, "logits") else found
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _net(kind: str) -> nn.Module:
    if kind == "mlp":
        layers = [m for _ in range(8) for m in (nn.Linear(512, 512), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(512, 10))
    if kind == "resnet50":
        return resnet50(channels=3, num_classes=10, stem="imagenet")
    return GPT2LMHeadModel(GPT2Config(n_layer=24, n_embd=512, n_head=8, use_cache=False))


def _batch(kind: str) -> Any:
    if kind == "mlp":
        return torch.randn(256, 512), torch.randint(10, (256,))
    if kind == "resnet50":
        return torch.randn(16, 3, 96, 96), torch.randint(10, (16,))
    return torch.randint(50_000, (4, 64)), torch.randint(50_000, (4, 64))


class Watch(Callback):
    """Note when the first step begins and ends."""

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 0:
            self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 1 and trainer.is_global_zero:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found = {"seconds": time.perf_counter() - self.began, "mib": peak / 1024}
            result(found)


def work(kind: str, ranks: int, verify: int) -> None:
    """Be one rank: train two steps."""
    quiet()
    strategy = PipelineStrategy(
        "1f1b", num_microbatches=NUM_MICRO, stages=max(ranks, 2), verify=verify
    )
    trainer = Trainer(
        accelerator="cpu", devices=1, num_nodes=ranks, strategy=strategy, max_steps=2,
        callbacks=[Watch()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    rows: Any = [_batch(kind)] * 2
    trainer.fit(Module(kind), DataLoader(rows, batch_size=None))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--only", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace) -> None:
    """Measure, and print a table as it grows."""
    print("| model | ranks | first step, s | compared, s | ratio | rank 0, MiB | compared, MiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind in args.only:
        for ranks in args.ranks:
            pairs = [
                [start("first_step", [kind, ranks, verify], ranks)[0] for verify in (0, 1)]
                for _ in range(args.rounds)
            ]
            seconds = [[x["seconds"] for x in side] for side in zip(*pairs, strict=True)]
            mib = [[x["mib"] for x in side] for side in zip(*pairs, strict=True)]
            ratios = [b / a for a, b in zip(*seconds, strict=True)]
            cells = [spread(x, 2) for x in (*seconds, ratios)] + [spread(x, 0) for x in mib]
            print(f"| {kind} | {ranks} | {' | '.join(cells)} |", flush=True)
