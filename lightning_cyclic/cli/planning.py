"""The command ``plan``: which preset, stages and micro-batches train a model fastest.

    lightning-cyclic plan model.py:Model --workers 4 --memory 24GB --bandwidth 10Gbit/s
    lightning-cyclic plan profile.json --workers 16 --memory 16GB --save strategy.yaml

Only its arguments are known here, so that the command line starts without torch; modules are
measured in :mod:`lightning_cyclic.cli.load_module`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from lightning_cyclic.cli.arguments import explained
from lightning_cyclic.cli.codecs import add_codec, coding_of, offered
from lightning_cyclic.cli.user_code import load
from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.candidates import (
    CHECKPOINTING,
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY,
    DEFAULT_PRESETS,
    INSIDE_BANDWIDTH,
    INSIDE_LATENCY,
    PRECISIONS,
    Problem,
)
from lightning_cyclic.planner.gains import of_first, told
from lightning_cyclic.planner.profile import ModelProfile, from_json, to_json
from lightning_cyclic.planner.ring import sizes_of_groups
from lightning_cyclic.planner.search import search
from lightning_cyclic.planner.table import as_config, as_data, table
from lightning_cyclic.simulate import Network, parse_bandwidth, parse_bytes, parse_seconds
from lightning_cyclic.viz.files import write

_LAYOUTS = {  # of the file of a strategy -> how it is used
    "lightning": "python train.py fit --trainer.strategy {}",
    "hydra": "python train.py strategy=NAME, from the folder of your strategies",
}
_REPLICAS = 2  # of pipelines: the planner chooses how many, and of one nothing is sent
_CHECKPOINTING = {
    "all": ("never", "always", "optimal"), "both": ("never", "always"),
    **{choice: (choice,) for choice in CHECKPOINTING},
}  # fmt: skip


def add_plan(commands: Any, has_colours: Callable[[], bool]) -> None:
    parser = commands.add_parser(
        "plan",
        help="rank the ways to train a model on given workers",
        description="Rank presets, stages, replicas, sizes of micro-batches and "
        "rematerialisation by the step time that the simulator predicts, of those that fit into "
        "the memory of the workers.",
        epilog="example: lightning-cyclic plan model.py:Model --workers 4 --memory 24GB "
        "--bandwidth 1Gbit/s",
    )
    add = parser.add_argument
    add("model", metavar="PROFILE.json|PATH:CLASS", nargs="+", help="a LightningModule, which is "
        "measured here, or what --save-profile kept of it")  # fmt: skip
    add("--workers", type=_number(int, 1), required=True, metavar="N", help="number of workers")
    add("--memory", type=explained(parse_bytes), required=True, metavar="SIZE", help="of each "
        "worker, like 24GB; leave some to the framework")  # fmt: skip
    add("--bandwidth", type=explained(parse_bandwidth), default=DEFAULT_BANDWIDTH,
        metavar=DEFAULT_BANDWIDTH, help="of each worker, in each direction "
        f"(default: {DEFAULT_BANDWIDTH})")  # fmt: skip
    add("--latency", type=explained(parse_seconds), default=DEFAULT_LATENCY,
        metavar=DEFAULT_LATENCY, help=f"of a message (default: {DEFAULT_LATENCY})")  # fmt: skip
    add("--workers-per-host", type=_number(int, 1), default=1, metavar="K", help="workers that "
        f"share a host, joined by {INSIDE_BANDWIDTH} and {INSIDE_LATENCY}, or better (default: "
        "1)")  # fmt: skip
    add("--batch", type=_number(int, 1), default=0, metavar="B", help="samples per update, of all "
        "workers (default: for each worker the largest measured micro-batch)")  # fmt: skip
    add("--preset", action="append", default=[], metavar="PRESET", help="look at this preset "
        f"only; may be repeated (default: {', '.join(DEFAULT_PRESETS)})")  # fmt: skip
    add("--activation-checkpointing", choices=tuple(_CHECKPOINTING), default="all",
        help="recompute, do not, or both; recompute what --memory has no room for; all of these; "
        "or put it on a disk (default: all)")  # fmt: skip
    add("--disk-bandwidth", type=explained(parse_bandwidth), default="1GB/s", metavar="1GB/s",
        help="of that disk, each way (default: 1GB/s)")  # fmt: skip
    add("--state", type=_number(float, 0), default=2.0, metavar="X", help="bytes of optimizer "
        "state per byte of parameters: Adam 2, momentum 1, SGD 0 (default: 2)")  # fmt: skip
    add("--sparsity", type=float, default=None, metavar="S", help="pruned fraction of the "
        "parameters, of which no gradient, master weight and optimizer state is kept or sent, as "
        "SparseStatePrecision does (default: dense)")  # fmt: skip
    add("--precision", choices=tuple(PRECISIONS), default="32-true", help="in which the profile's "
        "bytes are; low ones have float32 master weights besides (default: 32-true)")  # fmt: skip
    add_codec(parser)
    add("--slack", type=_number(int, 0), default=0, metavar="C", help="slots for messages "
        "(default: 0; where workers have the whole model, what is predicted to be fastest, "
        "too)")  # fmt: skip
    add("--rows", type=_number(int, 1), default=10, metavar="R", help="plans to print "
        "(default: 10)")  # fmt: skip
    add("--json", action="store_true", help="print JSON in place of a table")
    add("--save", type=_yaml, metavar="STRATEGY.yaml", help="write plan 1 as the configuration of "
        "a strategy")  # fmt: skip
    add("--layout", choices=tuple(_LAYOUTS), default="lightning", help="of that file: for "
        "LightningCLI, or for Hydra (default: lightning)")  # fmt: skip
    _add_module(parser)
    parser.set_defaults(run=lambda arguments: _run(arguments, has_colours))


def _add_module(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("of a module").add_argument
    add("--num-microbatches", type=_sizes, default=(1, 2, 4), metavar="M,...",
        help="micro-batches that its batch is cut into; the first is measured, for each "
        "(default: 1,2,4)")  # fmt: skip
    add("--data", metavar="PATH:CLASS", help="a LightningDataModule (default: the module's own "
        "train_dataloader, else its example_input_array)")  # fmt: skip
    add("--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of the "
        "module, or with data.NAME=VALUE of the data; values as in YAML")  # fmt: skip
    add("--save-profile", metavar="PROFILE.json", help="keep what was measured")


def _run(arguments: argparse.Namespace, has_colours: Callable[[], bool]) -> str:
    presets = tuple(dict.fromkeys(arguments.preset))
    coding = coding_of(arguments, presets, of_pipelines=_REPLICAS)
    profiles = _profiles(arguments)
    network = Network(latency_s=arguments.latency, bandwidth_bytes_per_s=arguments.bandwidth)
    host_network = _on_hosts(network, arguments.workers, arguments.workers_per_host)
    problem = Problem(
        profiles=profiles,
        num_workers=arguments.workers,
        memory_bytes=arguments.memory,
        network=network,
        host_network=host_network,
        group_sizes=tuple(sizes_of_groups(arguments.workers, host_network.hosts)),
        batch_size=arguments.batch,
        presets=presets or DEFAULT_PRESETS,
        checkpointing=_CHECKPOINTING[arguments.activation_checkpointing],
        disk_bytes_per_s=arguments.disk_bandwidth
        if arguments.activation_checkpointing == "offload"
        else None,
        state_per_param=arguments.state,
        slack=arguments.slack,
        sparsity=arguments.sparsity,
        precision=arguments.precision,
        coding=coding,
    )
    ranking = search(problem, most=arguments.rows)
    if arguments.save:
        config = as_config(ranking.plans[0], problem, arguments.layout)
        write(Path(arguments.save), yaml.safe_dump(config, sort_keys=False).encode())
    less = of_first(ranking, offered)
    if arguments.json:
        return json.dumps(as_data(ranking, less), indent=2)
    parts = [table(ranking, colour=has_colours())]
    if less is not None:
        parts.append(told(less))
    if arguments.save:
        use = _LAYOUTS[arguments.layout].format(arguments.save)
        parts.append(f"wrote {arguments.save}: {use}")
    return "\n\n".join(parts)


def _on_hosts(network: Network, num_workers: int, per_host: int) -> Network:
    """Return the links of workers of which several share a host."""
    if per_host in (1, num_workers):
        return network
    inside = Network(
        latency_s=min(network.latency_s, parse_seconds(INSIDE_LATENCY)),
        bandwidth_bytes_per_s=max(
            network.bandwidth_bytes_per_s, parse_bandwidth(INSIDE_BANDWIDTH)
        ),
    )
    return replace(network, hosts=tuple(w // per_host for w in range(num_workers)), inside=inside)


def _profiles(arguments: argparse.Namespace) -> tuple[ModelProfile, ...]:
    if all(where.endswith(".json") for where in arguments.model):
        if arguments.save_profile or arguments.data or arguments.arg:
            raise PlanError(
                "--save-profile, --data and --arg go with a module, not with profiles; allowed: "
                "PATH:CLASS; leave them out"
            )
        read = (from_json(_text(Path(where))) for where in arguments.model)
        return tuple(profile for profiles in read for profile in profiles)
    if len(arguments.model) > 1:
        raise PlanError(
            f"{' '.join(arguments.model)} is more than one model; allowed: one PATH:CLASS, or "
            "files of profiles that end in .json; give one"
        )
    load(arguments.model[0])
    from lightning_cyclic.cli.load_module import measure  # noqa: PLC0415

    found = measure(
        arguments.model[0],
        data=arguments.data,
        texts=arguments.arg,
        num_micros=arguments.num_microbatches,
    )
    if arguments.save_profile:
        write(Path(arguments.save_profile), to_json(found).encode())
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"{path} cannot be read ({error}); allowed: a profile as --save-profile writes it; "
            "check the path"
        ) from error


def _number(kind: type[int] | type[float], least: int) -> Callable[[str], float]:
    what = "whole numbers" if kind is int else "numbers"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(
                f"{text!r} does not fit; allowed: {what} from {least} on"
            )
        return value

    return parse


def _yaml(text: str) -> str:
    if not text.endswith((".yaml", ".yml")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no YAML file; allowed: a name that ends in .yaml, for the strategy; use "
            "--save strategy.yaml, or --save-profile for what was measured"
        )
    return text


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(_number(int, 1)(part)) for part in text.split(","))
