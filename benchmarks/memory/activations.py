"""Train a GPT in a pipeline that keeps activations, runs forwards again, or puts them away.

    python -m benchmarks activations                        the table of docs/options.md
    python -m benchmarks activations --preset gpipe --micro 8 --rooms --disk /scratch

Each contender is a process of its own, with the same weights and batches. "planned" is what the
schedule of "optimal" keeps at its peak, or the account of activations counts where there are
several stages; "alive" are the most bytes of storages in a step beyond what is there when it
begins. Times are the least of all steps,
over those of "never"; the weights must have the same bits at the end.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.gpu.fits import LitGPT
from benchmarks.memory.sparse_states import Clock
from benchmarks.pipeline.model import Case
from benchmarks.rounds import quiet, result, start
from lightning_cyclic import MemoryTimeline, PipelineStrategy
from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.bits import digest

SMOKE = (
    "--rounds", "1", "--num-steps", "3", "--width", "64", "--depth", "2", "--words", "100",
    "--length", "8", "--batch", "8", "--micro", "8", "--preset", "gpipe", "--rooms", "2",
)  # fmt: skip
WARM_UP = 2
MB = 1e6
BYTES_PER_PARAM_BYTE = 4  # weights, their gradients, and what AdamW has of them


class Chosen(L.Callback):
    """Remember which units are run again, and what that was planned to keep."""

    again, planned = "", 0.0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        schedules = trainer.strategy._training._session._step.schedules
        for chain, plan in [] if schedules is None else schedules.chosen.values():
            self.again, self.planned = f"{plan.runs_again} of {len(chain.units)}", plan.peak_bytes


def work(options: dict[str, Any], choice: str, room_bytes: int) -> None:
    """Be one contender."""
    args = argparse.Namespace(**options)
    quiet()
    module = LitGPT(case_of(args))
    clock, chosen = Clock(), Chosen()
    memory = MemoryTimeline(steps=(args.num_steps,))  # behind those that are timed
    how: dict[str, Any] = {"activation_checkpointing": choice}
    if choice == "optimal":
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        how["memory_limit_bytes"] = BYTES_PER_PARAM_BYTE * size + room_bytes
    if choice == "offload":
        how["disk"] = args.disk
    strategy = PipelineStrategy(
        args.preset, stages=args.stages, num_microbatches=args.micro, verify=False, **how
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[clock, chosen, memory],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, strategy=strategy,
        enable_model_summary=False, default_root_dir=tempfile.gettempdir(),
        use_distributed_sampler=False,
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    shape = (args.batch, args.length)
    rows: Any = [torch.randint(args.words, shape, generator=g) for _ in range(args.num_steps + 1)]
    try:
        trainer.fit(module, DataLoader(rows, batch_size=None))
    except PlanError as error:  # a room in which nothing fits
        result({"refused": str(error).partition(";")[0]})
        return
    timeline = memory.timeline
    assert timeline is not None
    (step,) = timeline.spans
    begins = sum(series[0] for series in timeline.bytes_at(step).values())
    counted = 0.0 if memory.planned is None else memory.planned.activations
    result({
        "step_s": min(clock.seconds[WARM_UP : args.num_steps]), "again": chosen.again,
        "alive": timeline.peak(step).num_bytes - begins, "planned": chosen.planned or counted,
        "digests": [int(digest(p)) for p in module.parameters()],
    })  # fmt: skip


def case_of(args: argparse.Namespace) -> Case:
    return Case(
        name="activations", num_workers=1, num_stages=args.stages, num_microbatches=args.micro,
        rows=args.batch // args.micro, length=args.length, width=args.width, depth=args.depth,
        sleep_ms=0, num_steps=args.num_steps, rounds=args.rounds, heads=args.width // 32,
        vocabulary=args.words,
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--preset", default="1f1b")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--micro", type=int, default=2, help="micro-batches of a batch")
    parser.add_argument("--rooms", type=float, nargs="*", default=[64, 32, 24, 16, 12, 9, 7],
                        help="of activations, in MB, under \"optimal\"")  # fmt: skip
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", default=tempfile.gettempdir())


def run(args: argparse.Namespace) -> None:
    rooms = [("optimal", int(room * MB)) for room in args.rooms]
    contenders = [("never", 0), *rooms, ("always", 0), ("offload", 0)]
    found: dict[tuple[str, int], list[Any]] = {x: [] for x in contenders}
    for _ in range(args.rounds):
        for choice, room in contenders:
            found[choice, room] += start("activations", [vars(args), choice, room], 1)
    whole = found["never", 0]
    least_s = min(end["step_s"] for end in whole)
    print(f"{'choice':<10}{'room':>10}{'again':>10}{'planned':>12}{'alive':>12}   time")
    for (choice, room), ends in found.items():
        if "refused" in ends[0]:
            print(f"{choice:<10}{room / MB:>7.0f} MB   {ends[0]['refused']}")
            continue
        assert all(end["digests"] == whole[0]["digests"] for end in ends), "other weights"
        row = [f"{x / MB:.1f} MB" if x else "" for x in (ends[0]["planned"], ends[0]["alive"])]
        cells = [f"{room / MB:.0f} MB" if room else "", ends[0]["again"]]
        ratio = min(end["step_s"] for end in ends) / least_s
        text = "".join(f"{x:>10}" for x in cells) + "".join(f"{x:>12}" for x in row)
        print(f"{choice:<10}{text}   {ratio:.2f}")
