"""Compare, on one GPU, what a step of GPT-2 takes and keeps under the plans of one device.

    python -m benchmarks gpu                                     GPT-2 medium, bfloat16
    python -m benchmarks gpu --micro 8 --rows 2 --rounds 5
    python -m benchmarks gpu --device cpu --layers 4 --width 32 --heads 2 --length 16 --rows 2

Four ways to train on the same batches of N micro-batches, in turn, round after round:

    at once       Lightning, the whole batch in one forward
    accumulate    Lightning, one micro-batch after the other, with accumulate_grad_batches=N
    cyclic_dp     the timetable of N cyclic workers, on this device
    1f1b          N stages, N micro-batches, on this device

Step time is the median over all rounds (lowest - highest of their medians), with its ratio to
"accumulate". Activations are the peak inside a step beyond what lies between steps, less the
gradients; cyclic_dp may keep (N + 1) / 2N of those of "at once". Random weights, no download.
Memory is that of torch's allocator, and is not known on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.rounds import quiet
from lightning_cyclic.registration import make_strategy

VOCABULARY = 50_257
WARM_UP = 3  # updates
SMOKE = (
    "--layers", "4", "--width", "32", "--heads", "2", "--length", "16", "--rows", "1",
    "--vocabulary", "64", "--steps", "2", "--rounds", "1",
)  # fmt: skip
WAYS = ("at once", "accumulate", "cyclic_dp", "1f1b")
GIB = 1 << 30


class LitGPT(L.LightningModule):
    """Be GPT-2 with random weights, without dropout."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=args.vocabulary, n_positions=args.length, n_embd=args.width,
                n_layer=args.layers, n_head=args.heads, use_cache=False, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )
        ).train()  # fmt: skip

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


@dataclass
class Seen:
    """Hold what rounds of one way have shown."""

    medians_s: list[float] = field(default_factory=list)  # of each round
    peak_bytes: int = 0
    activation_bytes: int = 0


class Meter(L.Callback):
    """Time updates, and measure the peak of memory in them."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._times_s: list[float] = []
        self._updates, self._since_s, self._between = 0, 0.0, 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == self._updates:
            return
        self._updates = trainer.global_step
        on_gpu = module.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        if self._updates > WARM_UP:
            self._times_s.append(now_s - self._since_s)
            if on_gpu:
                self._weigh(module)
        if on_gpu:
            self._between = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self._since_s = time.perf_counter()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._seen.medians_s.append(median(self._times_s))

    def _weigh(self, module: L.LightningModule) -> None:
        peak, seen = torch.cuda.max_memory_allocated(), self._seen
        gradients = sum(p.nbytes for p in module.parameters())
        kept = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
        between = self._between - kept  # where gradients are there between steps, too
        seen.peak_bytes = max(seen.peak_bytes, peak)
        seen.activation_bytes = max(seen.activation_bytes, peak - between - gradients)


def train(way: str, args: argparse.Namespace, seen: Seen) -> None:
    """Train one round of one way."""
    n, whole = args.micro, args.micro * args.rows
    strategy: Any = "auto"
    if way in ("cyclic_dp", "1f1b"):
        strategy = make_strategy(way, num_microbatches=n, stages=n)
    accumulates = n if way == "accumulate" else 1
    rows = args.rows if way == "accumulate" else whole
    updates = WARM_UP + args.steps
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(args.vocabulary, (updates * whole, args.length), generator=generator)
    trainer = L.Trainer(
        accelerator="gpu" if args.device == "cuda" else "cpu", devices=1, precision="bf16-true",
        strategy=strategy, accumulate_grad_batches=accumulates, max_epochs=1,
        callbacks=[Meter(seen)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches: Any = tokens.split(rows)
    trainer.fit(LitGPT(args), DataLoader(batches, batch_size=None))
    assert trainer.global_step == updates
    del trainer
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()


def table(found: dict[str, Seen], args: argparse.Namespace) -> list[str]:
    """Return the lines of the comparison."""
    base = found["accumulate"]
    lines = [f"{'':12}{'step':>10}{'':22}{'ratio':>7}{'peak':>11}{'activations':>14}{'share':>8}"]
    for way, seen in found.items():
        each = seen.medians_s
        step = f"{1e3 * median(each):>7.1f} ms"
        spread = f" ({1e3 * min(each):.1f} - {1e3 * max(each):.1f})"
        ratio = median(mine / other for mine, other in zip(each, base.medians_s, strict=True))
        lines.append(f"{way:12}{step}{spread:22}{ratio:7.2f}{_memory(seen, found['at once'])}")
    bound = (args.micro + 1) / (2 * args.micro)
    return [*lines, f"(N + 1) / 2N = {bound:.3f}"]


def _memory(seen: Seen, at_once: Seen) -> str:
    if not seen.peak_bytes:
        return f"{'-':>11}{'-':>14}{'-':>8}"
    share = seen.activation_bytes / at_once.activation_bytes
    peak, activations = (f"{x / GIB:.2f} GiB" for x in (seen.peak_bytes, seen.activation_bytes))
    return f"{peak:>11}{activations:>14}{share:8.2f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    numbers = {
        "layers": (24, "of the model"), "width": (1024, "features"), "heads": (16, "per layer"),
        "length": (1024, "tokens of a sample"), "vocabulary": (VOCABULARY, "tokens there are"),
        "rows": (2, "samples of a micro-batch"), "micro": (4, "micro-batches of a batch: N"),
        "steps": (10, "timed updates of a round"), "rounds": (3, "of each way, in turn"),
    }  # fmt: skip
    for name, (default, meaning) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} ({default})")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")


def run(args: argparse.Namespace) -> None:
    """Run all rounds, and print what they showed."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU; allowed: cuda where there is one, cpu; use --device cpu")
    quiet(torch.get_num_threads())
    torch.set_float32_matmul_precision("high")
    name = "CPU" if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}: GPT-2 of {args.layers} layers of {args.width}, "
          f"{args.micro} x {args.rows} samples of {args.length} tokens, bfloat16")  # fmt: skip
    found = {way: Seen() for way in WAYS}
    for k in range(args.rounds):
        for way, seen in found.items():
            train(way, args, seen)
            print(f"round {k + 1}, {way}: {1e3 * seen.medians_s[-1]:.1f} ms", flush=True)
    print("\n".join(table(found, args)))
