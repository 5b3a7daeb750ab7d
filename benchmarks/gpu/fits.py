"""GPT-2, trained by Lightning's Trainer: what a step takes, and what it keeps."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.ranks import Place, Say, last_line
from benchmarks.pipeline.model import Case, cut_by_hand, loss_of
from benchmarks.pipeline.model import LitGPT as LitGPTBySGD

WARM_UP = 3  # updates
GIB = 1 << 30
# of dense bfloat16, by what is in the name of the card; the first that is in it counts
_PEAK_FLOPS = {"H100 PCIe": 756e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}


def case_of(args: argparse.Namespace, **changes: Any) -> Case:
    """Return what is trained: the GPT-2 of the command line."""
    case = Case(
        name="gpu", num_workers=1, num_stages=args.micro, num_microbatches=args.micro,
        rows=args.rows[0], length=args.length, width=args.width, depth=args.layers, sleep_ms=0,
        num_steps=args.steps, rounds=args.rounds, heads=args.heads, vocabulary=args.vocabulary,
        device=args.device, dtype=torch.bfloat16, is_tied=True,
    )  # fmt: skip
    return replace(case, **changes)


class LitGPT(LitGPTBySGD):
    """Be GPT-2 with random weights, trained by AdamW."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


@dataclass
class Seen:
    """Hold what rounds of one way to train have shown.

    Args:
        step_s: seconds of an update, of each round.
        peak_bytes: most that the allocator had handed out within the timed updates.
        between_bytes: what it had between two of them, gradients left out.
        gradient_bytes: of all parameters.
    """

    step_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    between_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def activation_bytes(self) -> int:
        return self.peak_bytes - self.between_bytes - self.gradient_bytes


class Meter(L.Callback):
    """Time the updates behind the warm-up, all together, and weigh them.

    The host is not made to wait between two updates: that it runs ahead is what is measured.
    """

    def __init__(self, seen: Seen, num_updates: int) -> None:
        self._seen, self._num_updates, self._done = seen, num_updates, 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == self._done:
            return
        self._done = trainer.global_step
        if self._done == WARM_UP:
            self._begin(module)
        if self._done == self._num_updates and module.device.type == "cuda":
            self._seen.peak_bytes = max(self._seen.peak_bytes, torch.cuda.max_memory_allocated())

    def _begin(self, module: nn.Module) -> None:
        meet()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
            kept = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
            self._seen.between_bytes = torch.cuda.memory_allocated() - kept
            self._seen.gradient_bytes = sum(p.nbytes for p in module.parameters())
        self._began_s = time.perf_counter()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        meet()
        taken = time.perf_counter() - self._began_s
        self._seen.step_s.append(taken / (self._num_updates - WARM_UP))


def meet() -> None:
    """Wait until all ranks have come here, and their GPU has done what they asked for."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def fit(
    case: Case, place: Place, strategy: Any, *, seen: Seen | None = None, accumulate: int = 1,
    rows: int = 0, module: L.LightningModule | None = None,
    callbacks: Sequence[L.Callback] = (), **flags: Any,
) -> L.Trainer:  # fmt: skip
    """Train by a Trainer of its own, and give the memory back.

    Args:
        case: the model, and the timed steps.
        place: of this process.
        strategy: what the Trainer is given.
        seen: where figures are added. [they are not]
        accumulate: batches of an update.
        rows: of a batch on each rank. [those of all micro-batches]
        module: what is trained. [GPT-2]
        callbacks: more of the Trainer's.
        flags: more of the Trainer's.
    """
    updates = WARM_UP + case.num_steps
    rows = rows or case.rows * case.num_microbatches
    generator = torch.Generator().manual_seed(1)
    size = (updates * accumulate * rows, case.length)
    batches: Any = torch.randint(case.vocabulary, size, generator=generator).split(rows)
    meters = [] if seen is None else [Meter(seen, updates)]
    trainer = L.Trainer(
        accelerator="gpu" if case.device == "cuda" else "cpu", devices=1, strategy=strategy,
        num_nodes=place.num_ranks, accumulate_grad_batches=accumulate, max_epochs=1,
        callbacks=[*meters, *callbacks], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        **{"precision": "bf16-true", **flags},
    )  # fmt: skip
    trainer.fit(module or LitGPT(case), DataLoader(batches, batch_size=None))
    if trainer.global_step != updates:
        raise AssertionError(f"{trainer.global_step} updates instead of {updates}")
    return trainer


def clear() -> None:
    """Give back what nothing needs any more, so that the next way to train begins as this one."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def in_turn(
    place: Place, rounds: int, ways: dict[str, Callable[[Seen], object]], say: Say
) -> dict[str, Seen]:
    """Train each way round after round, at least once and as long as there is time.

    On one rank a way that fails says so and is left out of the rounds to come; of several ranks
    the others would wait for the one that failed.
    """
    found = {name: Seen() for name in ways}
    for k in range(rounds):
        if k > 0 and not place.has_time():
            break
        for name, seen in list(found.items()):
            try:
                ways[name](seen)
            except Exception as error:
                if place.num_ranks > 1:
                    raise
                say(f"  {name}: failed: {last_line(error)}")
                del found[name]
            clear()
            if place.rank == 0 and name in found:
                say(f"  round {k + 1}, {name}: {1e3 * seen.step_s[-1]:.1f} ms")
    return found


# ---------------------------------------------------------------------- what figures say


def flops_per_token(case: Case) -> float:
    """Return the operations of a forward and its backward, attention to all tokens included."""
    one = replace(case, device="meta", rows=1, num_microbatches=1)
    module, batch = nn.Sequential(*cut_by_hand(one)), one.batch()
    with FlopCounterMode(display=False) as counter:
        loss_of(module(batch), batch).backward()
    return counter.get_total_flops() / case.length


def peak_flops(card: str) -> float | None:
    """Return what a card can do in dense bfloat16, by its name; None where that is not known.

    Example:
        >>> peak_flops("NVIDIA H200"), peak_flops("NVIDIA L4")
        (989000000000000.0, None)
    """
    return next((flops for name, flops in _PEAK_FLOPS.items() if name in card), None)


def table(
    found: dict[str, Seen], base: str, tokens: int, case: Case, share_of: str = ""
) -> list[str]:
    """Return a row for each way to train.

    Args:
        found: way -> what it has shown.
        base: with which step times are compared.
        tokens: of an update.
        case: the model.
        share_of: with whose activations those of all are compared. [they are not]
    """
    card = torch.cuda.get_device_name() if case.device == "cuda" else "CPU"
    most, each = peak_flops(card), flops_per_token(case)
    lines = [f"  {'':20}{'ms a step':>24}{'ratio':>23}{'tokens/s':>10}{'MFU':>7}{'peak':>12}"
             f"{'activations':>14}{'share':>7}"]  # fmt: skip
    for way, seen in found.items():
        times = [1e3 * x for x in seen.step_s]
        ratios = [a / b for a, b in zip(seen.step_s, found[base].step_s, strict=False)]
        per_s = tokens / median(seen.step_s)
        mfu = f"{per_s * each / most:7.3f}" if most else f"{'-':>7}"
        lines.append(
            f"  {way:20}{show(times, 1):>24}{show(ratios, 3):>23}{per_s:10.0f}{mfu}"
            f"{_memory(seen, found.get(share_of))}"
        )
    return lines


def show(values: Sequence[float], digits: int) -> str:
    """Return median (lowest - highest)."""
    low, high = min(values), max(values)
    return f"{median(values):.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def _memory(seen: Seen, other: Seen | None) -> str:
    if not seen.peak_bytes:
        return f"{'-':>12}{'-':>14}{'-':>7}"
    share = "-" if other is None else f"{seen.activation_bytes / other.activation_bytes:.2f}"
    peak, kept = (f"{x / GIB:.2f} GiB" for x in (seen.peak_bytes, seen.activation_bytes))
    return f"{peak:>12}{kept:>14}{share:>7}"
