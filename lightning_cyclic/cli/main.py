"""The command line: draw a plan, and ask the simulator what it costs on a given cluster.

    lightning-cyclic draw cyclic_dp --workers 4
    lightning-cyclic draw 1f1b --workers 4 --num-microbatches 8 --out timetable.svg
    lightning-cyclic draw 1f1b --workers 4 --memory --model-bytes 4GB --activation-bytes 2GB
    lightning-cyclic simulate cyclic_dp --workers 16 --bandwidth 10Gbit/s --latency-s 50us
    lightning-cyclic doctor model.py:Model --stages 4
    lightning-cyclic plan model.py:Model --workers 4 --memory 24GB
    lightning-cyclic selftest

It imports no torch, so that it starts at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn, TypeAlias

from lightning_cyclic.cli.arguments import explained
from lightning_cyclic.cli.checkpointing import add_checkpointing, run_again
from lightning_cyclic.cli.codecs import add_codec, coding_of
from lightning_cyclic.cli.planning import add_plan
from lightning_cyclic.cli.selftest import add_selftest, presets_of
from lightning_cyclic.cli.user_code import load
from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import PRESETS, LocalSteps, Plan, make_plan
from lightning_cyclic.plan.presets import default_num_stages
from lightning_cyclic.planner.candidates import INSIDE_BANDWIDTH, INSIDE_LATENCY
from lightning_cyclic.simulate import (
    Coding,
    Costs,
    Network,
    compare,
    memory,
    memory_by_slot,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
    show_bytes,
    table,
)
from lightning_cyclic.simulate.memory import KINDS, steps_to_count
from lightning_cyclic.viz import Row, draw, draw_memory, save_memory, save_picture

USAGE_ERROR = 2  # exit status of a command that was not understood, as shells and argparse have it
_CLOSED_PIPE = 141  # exit status of a command whose reader has left: 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name. [those of the process]

    Returns:
        The exit status: 0, 1 where a self-test has failed, or 2 behind one line on stderr.
    """
    try:
        arguments = _parser().parse_args(argv)
        outcome: str | tuple[str, int] = arguments.run(arguments)
        text, status = outcome if isinstance(outcome, tuple) else (outcome, 0)
        print(text, flush=True)
    except PlanError as error:
        print(f"lightning-cyclic: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        # Python flushes stdout once more at exit, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    return status


class _Parser(argparse.ArgumentParser):
    """Say what is wrong in one line, without the usage above it; options have one name each."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        from lightning_cyclic.plugin.departed import DEPARTED  # noqa: PLC0415  (slow to import)

        given = {word.partition("=")[0] for word in message.split()}
        instead = [f"{flag} has left; {what}" for flag, what in DEPARTED.items() if flag in given]
        raise PlanError("; ".join([message, *instead, f"see {self.prog} --help"]))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lightning-cyclic",
        description="Draw, simulate and choose plans for delay-tolerant parallel training.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    _add_draw(commands)
    _add_simulate(commands)
    add_doctor(commands)
    add_plan(commands, _has_colours)
    add_selftest(commands)
    return parser


def _add_draw(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "draw",
        help="draw who computes what when, on which weights",
        epilog="2F0@3 reads: stage 2, forward of micro-batch 0, on version 3 of the weights. "
        "In a terminal each version has its colour, and backwards (B) are reversed.",
    )
    _add_plan(parser, num_steps=2)
    parser.add_argument(
        "--columns", type=_whole, metavar="C", help="most characters per line; 0 draws all "
        "slots (default: as wide as the terminal)",
    )  # fmt: skip
    parser.add_argument(
        "--from", type=_whole, dest="first_slot", default=0, metavar="SLOT",
        help="slot at which the picture begins (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE", help="draw all slots into a .svg or .png file, with a legend, "
        "which needs matplotlib (pip install 'lightning-cyclic[viz]'), or into a .json file for "
        "ui.perfetto.dev (default: print text)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", action="store_true", help="draw the bytes that each worker keeps in each "
        "slot, by what they are for, in place of the timetable",
    )  # fmt: skip
    parser.add_argument(
        "--remat", action="store_true", help="of --memory: backwards run their forward again",
    )  # fmt: skip
    _add_quantities(parser, _SIZES, "of --memory: ")
    parser.set_defaults(run=_draw)


_Quantity: TypeAlias = tuple[str, Callable[[str], float], str, str]


def _add_quantities(
    parser: argparse.ArgumentParser, quantities: Sequence[_Quantity], of: str = ""
) -> None:
    """Add options with a unit; those of another option are None where they are not given."""
    for option, parse, default, meaning in quantities:
        parser.add_argument(
            option, type=explained(parse), default=None if of else default, metavar=default,
            help=f"{of}{meaning} (default: {default})",
        )  # fmt: skip


def _add_simulate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "simulate", help="compare step time, messages and memory with lockstep data parallelism"
    )
    _add_plan(parser, num_steps=12)
    times: list[_Quantity] = [
        ("--step-s", parse_seconds, "0.1", "one micro-batch forward and backward, whole model"),
        ("--update-s", parse_seconds, "0", "one optimizer step of the whole model"),
        ("--latency-s", parse_seconds, "50us", "latency of a message"),
        ("--bandwidth", parse_bandwidth, "10Gbit/s", "of each worker, in each direction"),
        ("--disk-bandwidth", parse_bandwidth, "1GB/s", "of --offload, in each direction"),
    ]
    _add_quantities(parser, [*_SIZES, *times])
    parser.add_argument(
        "--bucket-bytes", type=explained(parse_bytes), metavar="25MiB",
        help="size of the reference's ring all-reduces, as DDP has them; 0: stages (default: the "
        "best all-reduce, in the best number of buckets)",
    )  # fmt: skip
    add_checkpointing(parser, _count)
    add_codec(parser)
    _add_hosts(parser)
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.set_defaults(run=_simulate)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers-per-host", type=_count, default=1, metavar="K",
        help="with faster links inside of it (default: 1)",
    )  # fmt: skip
    inside: list[tuple[str, Callable[[str], float], str]] = [
        ("--inside-latency-s", parse_seconds, INSIDE_LATENCY),
        ("--inside-bandwidth", parse_bandwidth, INSIDE_BANDWIDTH),
    ]
    for option, parse, default in inside:
        parser.add_argument(
            option, type=explained(parse), metavar=default,
            help=f"inside a host of several workers (default: {default})",
        )  # fmt: skip
    parser.add_argument(
        "--distribution",
        choices=("block", "cyclic"),
        help="of workers over hosts, in SLURM's words: host by host, or in turn (default: block)",
    )


def _add_plan(parser: argparse.ArgumentParser, *, num_steps: int) -> None:
    parser.add_argument("preset", metavar="PRESET", help=", ".join(PRESETS))
    add = parser.add_argument
    add("--workers", type=_count, required=True, metavar="N", help="number of workers")
    add("--stages", type=_count, metavar="S", help="number of stages (default: N/W)")
    add(
        "--num-microbatches",
        type=_count,
        metavar="M",
        help="micro-batches per step (default: the plan's)",
    )
    add(
        "--replicas",
        type=_count,
        metavar="R",
        default=1,
        help="replicas of a pipeline (default: 1)",
    )
    add("--slack", type=_whole, metavar="C", default=0, help="slots for messages (default: 0)")
    add("--group-size", type=_count, metavar="G", default=1, help="workers that run side by side, "
        "of workers that have all stages (default: 1)")  # fmt: skip
    add("--offload", action="store_true", help="what forwards of a pipeline leave is away until "
        "their backward")  # fmt: skip
    add("--every", type=_count, metavar="H",
        help="steps from one exchange of weights to the next, of diloco and streaming_diloco "
        f"(default: {LocalSteps().every})")  # fmt: skip
    add(
        "--delay",
        type=_whole,
        metavar="D",
        help="steps that such an exchange may take while workers go on (default: 0: they wait)",
    )
    add("--steps", type=_count, metavar="T", default=num_steps, help=f"(default: {num_steps})")


def _plan(arguments: argparse.Namespace, coding: Coding | None = None) -> Plan:
    depth = arguments.workers // arguments.replicas
    return make_plan(
        arguments.preset,
        num_stages=arguments.stages or default_num_stages(_schedule(arguments.preset), depth),
        num_workers=arguments.workers,
        num_microbatches=arguments.num_microbatches,
        num_steps=arguments.steps,
        slack=arguments.slack,
        group_size=arguments.group_size,
        replicas=arguments.replicas,
        offloads=arguments.offload,
        weights=_local_steps(arguments.preset, arguments.every, arguments.delay),
        to_owners=coding is not None and coding.to_owners,
    )


def _local_steps(preset: str, every: int | None, delay: int | None) -> LocalSteps | None:
    if every is delay is None or preset not in PRESETS:  # make_plan refuses it
        return None
    local = PRESETS[preset].local
    return replace(local, every=every or local.every, delay=delay or 0, mixing=None)


def _schedule(preset: str) -> str:
    return PRESETS[preset].schedule if preset in PRESETS else "cyclic"  # make_plan refuses it


def _draw(arguments: argparse.Namespace) -> str:
    columns = arguments.columns
    if arguments.out is not None and columns is not None:
        raise PlanError(
            f"--columns {columns} counts characters, and --out draws a picture; allowed: one "
            "of them; leave --columns out"
        )
    width = (shutil.get_terminal_size().columns if columns is None else columns) or None
    if arguments.memory:
        return _draw_memory(arguments, width)
    _refuse_sizes(arguments)
    if arguments.out is not None:
        save_picture(_plan(arguments), arguments.out, first_slot=arguments.first_slot)
        return f"wrote {arguments.out}"
    return draw(
        _plan(arguments), colour=_has_colours(), width=width, first_slot=arguments.first_slot
    )


def _refuse_sizes(arguments: argparse.Namespace) -> None:
    given = [option for option, *_ in _SIZES if getattr(arguments, _name(option)) is not None]
    given += ["--remat"] * arguments.remat + ["--offload"] * arguments.offload
    if given:
        raise PlanError(
            f"{', '.join(given)} of a picture of who computes what when; allowed: with --memory, "
            "which draws bytes; add --memory"
        )


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _draw_memory(arguments: argparse.Namespace, width: int | None) -> str:
    """Draw what each worker keeps, over the slots."""
    plan = _plan(arguments)
    sizes = {
        _name(option): parse(default) if (given := getattr(arguments, _name(option))) is None
        else given
        for option, parse, default, _ in _SIZES
    }  # fmt: skip
    state = sizes.pop("state")
    costs = Costs.even(plan.num_stages, **sizes)
    how: dict[str, Any] = {"remat": arguments.remat, "state_per_param": state}
    steady = replace(plan, num_steps=steps_to_count(plan.num_stages, plan.num_microbatches))
    most = [m.total for m in memory(steady, costs, **how)]
    rows = [
        Row(
            f"w{w}",
            {kind: [getattr(m, kind) for m in row] for kind in KINDS},
            (most[w], "the most that the plan counts"),
        )
        for w, row in enumerate(memory_by_slot(plan, costs, **how))
    ]  # fmt: skip
    if arguments.out is None:
        return draw_memory(rows, width=width, first=arguments.first_slot)
    title = f"{plan.preset}: what {plan.num_workers} workers keep"
    save_memory(arguments.out, title, rows, first=arguments.first_slot)
    return f"wrote {arguments.out}"


def _simulate(arguments: argparse.Namespace) -> str:
    coding = coding_of(arguments, [arguments.preset], of_pipelines=arguments.replicas)
    plan, network = _plan(arguments, coding), _network(arguments)
    costs = Costs.even(
        plan.num_stages,
        compute_s=arguments.step_s,
        model_bytes=arguments.model_bytes,
        update_s=arguments.update_s,
        cut_bytes=arguments.cut_bytes,
        activation_bytes=arguments.activation_bytes,
    ).put_away(arguments.disk_bandwidth)
    comparison = compare(
        plan, costs if coding is None else coding.of(costs), network,
        bucket_bytes=arguments.bucket_bytes, state_per_param=arguments.state,
        again=run_again(arguments, plan, costs),
    )  # fmt: skip
    if arguments.json:
        return json.dumps(comparison.as_dict(), indent=2)
    text = table(comparison, colour=_has_colours())
    besides = " and ".join(_besides(coding, costs)) if coding is not None else ""
    return (
        f"{text}\neach worker keeps {besides} besides, which is not counted" if besides else text
    )


def _besides(coding: Coding, costs: Costs) -> Iterator[str]:
    if coding.has_memory:
        yield f"{show_bytes(sum(costs.sent_sum_bytes))} of what was not sent"
    if coding.weights is not None:
        yield f"{show_bytes(sum(costs.param_bytes))} for new weights"


def _network(arguments: argparse.Namespace) -> Network:
    network = Network(latency_s=arguments.latency_s, bandwidth_bytes_per_s=arguments.bandwidth)
    num_workers, per_host = arguments.workers, arguments.workers_per_host
    latency_s, bandwidth = arguments.inside_latency_s, arguments.inside_bandwidth
    if per_host == 1:
        if {latency_s, bandwidth, arguments.distribution} != {None}:
            raise PlanError(
                "--inside-latency-s, --inside-bandwidth and --distribution are of hosts with "
                "several workers; allowed: more than one; use --workers-per-host 2"
            )
        return network
    inside = Network(
        latency_s=parse_seconds(INSIDE_LATENCY) if latency_s is None else latency_s,
        bandwidth_bytes_per_s=parse_bandwidth(INSIDE_BANDWIDTH)
        if bandwidth is None
        else bandwidth,
    )
    num_hosts, in_turn = math.ceil(num_workers / per_host), arguments.distribution == "cyclic"
    hosts = tuple(w % num_hosts if in_turn else w // per_host for w in range(num_workers))
    return replace(network, hosts=hosts, inside=inside)


def _has_colours() -> bool:
    """Say whether stdout is a terminal whose user wants colours (https://no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def _count(text: str) -> int:
    return _integer(text, at_least=1)


def _whole(text: str) -> int:
    return _integer(text, at_least=0)


def _integer(text: str, *, at_least: int) -> int:
    if not text.isdecimal() or int(text) < at_least:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a count; allowed: whole numbers from {at_least} on"
        )
    return int(text)


def _parse_state(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise PlanError(f"{text!r} is not a number from 0 on; use 2 for Adam, 1 for momentum")
    return number


_SIZES: Final[list[_Quantity]] = [
    ("--model-bytes", parse_bytes, "100MB", "all parameters"),
    ("--cut-bytes", parse_bytes, "0", "activations of one micro-batch between two stages"),
    ("--activation-bytes", parse_bytes, "0", "of one micro-batch, from forward to backward"),
    ("--state", _parse_state, "2", "bytes of optimizer state per byte of parameters"),
]


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say where the stages of a LightningModule can begin",
        description="Run a module's training_step once on the CPU; print where its time and bytes "
        "go, where stages can begin, what stands against others (with the line), the stages "
        "that balance best, and whether calling branches in another order would help. Times are "
        "counted, of FLOPs and bytes, and the same in every run, unless --measured.",
        epilog="example: lightning-cyclic doctor model.py:Model --stages 4 --arg depth=12",
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
    parser.set_defaults(run=_run_doctor)


def _run_doctor(arguments: argparse.Namespace) -> str | tuple[str, int]:
    if arguments.verify:
        return _verify(arguments)
    for name in ("steps", "preset"):
        if getattr(arguments, name):
            raise PlanError(
                f"--{name} was given without --verify, whose steps and presets it names; allowed: "
                "both, or none; add --verify"
            )
    load(arguments.module)
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
    load(arguments.module)
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


if __name__ == "__main__":
    sys.exit(main())
