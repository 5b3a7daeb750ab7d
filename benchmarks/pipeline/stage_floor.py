"""Measure what running a step one stage at a time costs with no package at all: the floor.

    python -m benchmarks stage_floor
    python -m benchmarks stage_floor --only mlp --rounds 50

The same models, order and figures as in stage_overhead.py. Whoever runs a stage runs the code
before it, too, in caches that other stages have used meanwhile; more micro-batches are alive than
in plain steps. Here that is all there is: blocks before the stage give back a tensor that is at
hand, the first one behind it ends the step, and nothing is checked, recorded or drawn alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipeline.stage_overhead import (
    MODELS,
    NUM_MICRO,
    ROWS,
    Clock,
    Model,
    Times,
    plain,
    quartiles,
    times,
)
from lightning_cyclic import make_plan
from lightning_cyclic.plan import program_of
from lightning_cyclic.plan.actions import Kind

SMOKE = ("--only", "mlp", "--rounds", "2")


class StageDone(BaseException):
    """End a step."""


class Bare:
    """Run stages of a model by replacing the forwards of its blocks.

    Args:
        model: what is run.
        blocks: called one after the other, each with the result of the one before.
    """

    def __init__(self, model: Model, blocks: list[nn.Module]) -> None:
        paths = {id(m): path for path, m in model.module.named_modules()}
        begins = [paths[id(block)] in model.starts for block in blocks]
        self.model = model
        self.num_stages = 1 + sum(begins)
        self._stage = 0
        self._came: Any = None
        self._left: Any = None
        for k, block in enumerate(blocks):
            door = self._door(block.forward, sum(begins[: k + 1]), begins=begins[k])
            block.forward = door

    def _door(self, forward: Callable[..., Any], j: int, *, begins: bool) -> Callable[..., Any]:
        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            if j < self._stage:
                return self._came
            if j > self._stage:
                self._left = x
                raise StageDone
            return forward(self._came if begins else x, *args, **kwargs)

        return call

    def forward(self, j: int, part: Tensor, came: Tensor | None) -> Tensor:
        """Run a stage; return what leaves it, the loss behind the last."""
        self._stage, self._came = j, came
        try:
            return self.model.step(part)
        except StageDone:
            left: Tensor = self._left
            return left


def bare(model: Model, blocks: list[nn.Module]) -> Callable[[], Times]:
    """Return what times bare staged steps."""
    stages, parts = Bare(model, blocks), model.batch.split(ROWS)
    forward, backward = Clock(), Clock()
    run_f, run_b = forward.timed(stages.forward), backward.timed(torch.autograd.backward)
    last = stages.num_stages - 1
    plan = make_plan("1f1b", num_stages=last + 1, num_workers=1, num_microbatches=NUM_MICRO)
    actions = [a for a in program_of(plan).step(0, 0) if a.kind in (Kind.F, Kind.B)]

    def step() -> None:
        came: dict[tuple[Any, int], Tensor] = {}
        left: dict[tuple[Any, int], Tensor] = {}
        for a in actions:
            if a.kind is Kind.F:
                if a.j > 0:
                    came[a.i, a.j] = left[a.i, a.j - 1].detach().requires_grad_()
                left[a.i, a.j] = run_f(a.j, parts[a.i or 0], came.get((a.i, a.j)))
                continue
            root = left.pop((a.i, a.j))
            grad = None if a.j == last else came.pop((a.i, a.j + 1)).grad
            run_b(root / NUM_MICRO if a.j == last else root, grad)
        model.module.zero_grad()

    return lambda: times(step, forward, backward)


def blocks_of(module: Any) -> list[nn.Module]:
    """Return the blocks of a model of stage_overhead.py."""
    return list(module.transformer.h if hasattr(module, "transformer") else module.children())


def report(name: str, rounds: int) -> None:
    """Run a model and print its lines."""
    torch.manual_seed(0)
    whole, cut = MODELS[name](), MODELS[name]()
    num_stages = len(cut.starts) + 1
    of_plain, of_bare = plain(whole), bare(cut, blocks_of(cut.module))
    pairs = [(of_plain(), of_bare()) for _ in range(rounds)]
    print(f"{name}, {num_stages} stages, {NUM_MICRO} micro-batches, bare; ms")
    for k, what in enumerate(("F", "B")):
        over = quartiles([(b[k] - a[k]) / num_stages for a, b in pairs])
        print(f"  {what}: plain {quartiles([a[k] for a, _ in pairs])}, per stage run {over}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--only", choices=("gpt", "mlp"), nargs="+", default=["gpt", "mlp"])
    parser.add_argument("--rounds", type=int, default=20, help="of either way, alternating")


def run(args: argparse.Namespace) -> None:
    """Measure the models that were asked for."""
    torch.set_num_threads(1)
    for name in args.only:
        report(name, args.rounds)
