"""Measure the Python that it takes to run an unmodified step one stage at a time.

    python -m benchmarks stage_overhead                      all models
    python -m benchmarks stage_overhead --only mlp --rounds 50
    python -m benchmarks stage_overhead --profile gpt  where the time of the forwards goes
    PYTHONPATH=OTHER_CHECKOUT python -m benchmarks stage_overhead     of another version

One process trains by 1f1b on one device, four micro-batches a step, and plainly, in alternating
rounds. The models are so small that Python is all that takes time. What the forwards of all
stages take beyond plain forwards of the same micro-batches, by the number of stage runs, is the
overhead of one; likewise for backwards. CPU time of the thread; median over rounds (quartiles).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_cyclic import make_plan
from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig
from lightning_cyclic.runtime.partial_step.session import StagewiseSession
from lightning_cyclic.runtime.partial_step.stage_step import StageStep
from lightning_cyclic.runtime.stages.cuts import choose_cuts
from lightning_cyclic.runtime.stages.survey import survey

SMOKE = ("--only", "mlp", "--rounds", "2")
NUM_MICRO, ROWS, LENGTH, WIDTH = 4, 2, 8, 16
WARM_UP, STEPS = 3, 5  # of a round


class Times(NamedTuple):
    """Hold milliseconds of CPU time per micro-batch, forward and backward."""

    forward_ms: float
    backward_ms: float


class Model(NamedTuple):
    """Hold a module, its batch, and the modules with which stages begin."""

    module: nn.Module
    batch: Tensor
    step: Callable[[Tensor], Tensor]
    starts: list[str]


class Clock:
    """Add up the CPU time of calls."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.total_s += time.thread_time() - began

        return call


def make_gpt(**options: Any) -> Model:
    """Return Hugging Face's GPT-2 of 24 layers, in 4 stages."""
    config = GPT2Config(
        vocab_size=64, n_positions=LENGTH, n_embd=WIDTH, n_layer=24, n_head=2,
        bos_token_id=0, eos_token_id=0, **options,
    )  # fmt: skip
    module = GPT2LMHeadModel(config).train()
    batch = torch.randint(64, (NUM_MICRO * ROWS, LENGTH))
    starts = [f"transformer.h.{k}" for k in (6, 12, 18)]
    return Model(module, batch, lambda x: module(input_ids=x, labels=x).loss, starts)


def make_mlp() -> Model:
    """Return 8 blocks in 8 stages."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)]
    module = nn.Sequential(*blocks)
    batch = torch.randn(NUM_MICRO * ROWS, WIDTH)
    return Model(module, batch, lambda x: F.mse_loss(module(x), x), [f"{k}" for k in range(1, 8)])


PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
         "tie_word_embeddings": False}  # fmt: skip
MODELS = {
    "gpt": lambda: make_gpt(**PLAIN),
    "gpt-default": make_gpt,  # with dropout, tied embeddings and a cache
    "mlp": make_mlp,
}


def plain(model: Model) -> Callable[[], Times]:
    """Return what times plain steps."""
    parts = model.batch.split(ROWS)
    forward, backward = Clock(), Clock()
    run_f, losses = forward.timed(model.step), list[Tensor]()
    run_b = backward.timed(lambda: losses.pop().backward())  # and free the graph

    def step() -> None:
        for part in parts:
            losses.append(run_f(part) / NUM_MICRO)
            run_b()
        model.module.zero_grad()

    return lambda: times(step, forward, backward)


def staged(model: Model) -> Callable[[], Times]:
    """Return what times staged steps."""
    session = _session(model)
    forward, backward = Clock(), Clock()
    for clock, name in ((forward, "forward"), (backward, "backward")):
        setattr(StageStep, name, clock.timed(getattr(StageStep, name)))

    def step() -> None:
        session.find_stages(model.batch, model.step)
        session.train(model.batch, model.step, lambda sizes: _no_summary)
        session.take_arrived()
        session.end_step()
        model.module.zero_grad()

    return lambda: times(step, forward, backward)


def _session(model: Model) -> StagewiseSession:
    def make(num_stages: int, num_microbatches: int, tied: Any, relayed: Any) -> Any:
        return make_plan(
            "1f1b", num_stages=num_stages, num_workers=1, num_microbatches=num_microbatches,
            tied=tied,
            relayed=relayed,
        )  # fmt: skip

    config = StagewiseConfig(
        make_plan=make, find_cuts=lambda m, step: choose_cuts(survey(m, step), model.starts),
        num_microbatches=NUM_MICRO, replicas=1, remat="never", seed=0,
    )  # fmt: skip
    return StagewiseSession(model.module, config, None, 0, 1, torch.device("cpu"))


def _no_summary(outcomes: Sequence[Any]) -> Message:
    return Message([], None)


def times(step: Callable[[], None], forward: Clock, backward: Clock) -> Times:
    """Run steps; return what their forwards and backwards took per micro-batch."""
    for _ in range(WARM_UP):
        step()
    gc.collect()
    forward.total_s = backward.total_s = 0.0
    for _ in range(STEPS):
        step()
    per_micro = 1000 / (STEPS * NUM_MICRO)
    return Times(forward.total_s * per_micro, backward.total_s * per_micro)


def report(name: str, rounds: int) -> None:
    """Run a model and print its lines."""
    torch.manual_seed(0)
    model = MODELS[name]()
    num_stages = len(model.starts) + 1
    of_plain, of_staged = plain(model), staged(model)
    pairs = [(of_plain(), of_staged()) for _ in range(rounds)]
    print(f"{name}, {num_stages} stages, {NUM_MICRO} micro-batches; ms")
    for k, what in enumerate(("F", "B")):
        figures = {
            "plain": [a[k] for a, _ in pairs],
            "staged": [b[k] for _, b in pairs],
            "overhead per stage run": [(b[k] - a[k]) / num_stages for a, b in pairs],
        }
        shown = (f"{title} {quartiles(values)}" for title, values in figures.items())
        print(f"  {what}: {', '.join(shown)}", flush=True)


def quartiles(values: Sequence[float]) -> str:
    """Return median (first - third quartile)."""
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.3f} ({low:.3f} - {high:.3f})"


def profile(name: str) -> None:
    """Print where the time of the staged steps of a model goes."""
    step = staged(MODELS[name]())
    step()
    profiler = cProfile.Profile()
    profiler.runcall(step)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--only", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20, help="of either way, alternating")
    parser.add_argument("--profile", choices=MODELS, help="print where the time goes, instead")


def run(args: argparse.Namespace) -> None:
    """Measure the models that were asked for."""
    torch.set_num_threads(1)
    if args.profile:
        profile(args.profile)
        return
    for name in args.only:
        report(name, args.rounds)
