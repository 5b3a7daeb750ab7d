"""The doctor: say of a LightningModule where its stages can begin, and what stands against others.

    lightning-cyclic doctor model.py:Model --stages 4 --arg depth=12
    lightning-cyclic doctor package.models:Model --data package.data:Digits --num-microbatches 8

Only its arguments are known here, so that the command line starts without torch; the examination
itself is in :mod:`lightning_cyclic.cli.load_module`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from lightning_cyclic.cli.selftest import presets_of
from lightning_cyclic.errors import PlanError
from lightning_cyclic.simulate import parse_bytes


def add_doctor(commands: Any) -> None:
    """Add the command to those of a parser."""
    parser = commands.add_parser(
        "doctor",
        help="say where the stages of a LightningModule can begin",
        description="Run a module's training_step once on the CPU; print where its time and bytes "
        "go, where stages can begin, what stands against others (with the line), the stages "
        "that balance best, and whether calling branches in another order would help. Times are "
        "counted, of FLOPs and bytes, and the same in every run, unless --measured.",
        epilog="example: lightning-cyclic doctor model.py:Model --stages 4 --arg depth=12",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("module", metavar="PATH:CLASS", help="a LightningModule: a file or a dotted module")
    add("--stages", type=_stages, metavar="N", help="number of stages, or paths of modules that "
        "begin stages 1, 2, ..., with commas (default: 2 where that is possible)")  # fmt: skip
    add("--num-microbatches", type=int, metavar="M", help="micro-batches that a batch is cut "
        "into (default: 1; of --verify 4)")  # fmt: skip
    add("--data", metavar="PATH:CLASS", help="a LightningDataModule (default: the module's own "
        "train_dataloader, else its example_input_array)")  # fmt: skip
    add("--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of the "
        "module, or with data.NAME=VALUE of the data; values as in YAML")  # fmt: skip
    add("--memory-limit", metavar="SIZE", help="most parameters and activations of one "
        "micro-batch that a stage may have, like 2GB")  # fmt: skip
    add("--measured", action="store_true", help="take times, in a few runs of the step on this "
        "machine, as a pipeline with stages=\"measured\" does")  # fmt: skip
    add("--verify", action="store_true", help="train a few steps by every preset, and compare "
        "them, bit by bit, with the module's own step; exit status 1 unless all are "
        "equal")  # fmt: skip
    add("--steps", type=int, metavar="K", help="steps that --verify compares (default: 2)")
    add("--preset", action="append", default=[], metavar="PRESET", help="of --verify: try this "
        "one only; may be repeated (default: all)")  # fmt: skip
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> str | tuple[str, int]:
    if arguments.verify:
        return _verify(arguments)
    for name in ("steps", "preset"):
        if getattr(arguments, name):
            raise PlanError(
                f"--{name} was given without --verify, whose steps and presets it names; allowed: "
                "both, or none; add --verify"
            )
    from lightning_cyclic.cli.load_module import examine  # noqa: PLC0415

    num_microbatches = 1 if arguments.num_microbatches is None else arguments.num_microbatches
    if num_microbatches < 1:
        raise PlanError(
            f"--num-microbatches {num_microbatches} is no number of micro-batches; allowed: whole "
            "numbers from 1 on; leave it out for whole batches"
        )
    limit = arguments.memory_limit
    return examine(
        arguments.module,
        data=arguments.data,
        texts=arguments.arg,
        stages=arguments.stages,
        num_microbatches=num_microbatches,
        memory_limit_bytes=None if limit is None else int(parse_bytes(limit)),
        clock="measured" if arguments.measured else "counted",
    )


def _verify(arguments: argparse.Namespace) -> tuple[str, int]:
    from lightning_cyclic.cli.verify import NUM_MICRO, verify  # noqa: PLC0415

    num_steps = 2 if arguments.steps is None else arguments.steps
    if num_steps < 1:
        raise PlanError(
            f"--steps {num_steps} compares nothing; allowed: whole numbers from 1 on; leave it out"
        )
    bad, begun = 0, time.perf_counter()
    for line, is_equal in verify(
        arguments.module,
        data=arguments.data,
        texts=arguments.arg,
        stages=2 if arguments.stages is None else arguments.stages,
        num_microbatches=NUM_MICRO
        if arguments.num_microbatches is None
        else arguments.num_microbatches,
        num_steps=num_steps,
        presets=presets_of(arguments.preset),
    ):
        print(line, flush=True)
        bad += not is_equal
    seconds = f"{time.perf_counter() - begun:.0f} s"
    return (f"{bad} not equal, {seconds}", 1) if bad else (f"all equal, {seconds}", 0)


def _stages(text: str) -> int | list[str]:
    return (
        int(text) if text.lstrip("-").isdecimal() else [part.strip() for part in text.split(",")]
    )
