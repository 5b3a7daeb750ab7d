"""The options of ``simulate`` that say which forwards of a pipeline run again in its backward.

lightning-cyclic simulate 1f1b --workers 4 --activation-checkpointing optimal --memory 8GB
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_cyclic.cli.arguments import explained
from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.planner.rematerialisation import Unit
from lightning_cyclic.planner.reruns import least_limit, reruns
from lightning_cyclic.simulate import Costs, parse_bytes, show_bytes
from lightning_cyclic.simulate.compare import Again
from lightning_cyclic.simulate.memory import memory, steps_to_count

_UNITS = 12


def add_checkpointing(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """Add the options.

    Args:
        count: reads a number from 1 on.
    """
    add: Any = parser.add_argument
    add("--activation-checkpointing", choices=("never", "always", "optimal"), default="never",
        help="forwards of a pipeline that its backwards run again: none, all, or those that "
        "--memory has no room for (default: never)")  # fmt: skip
    add("--memory", type=explained(parse_bytes), metavar="SIZE", help="of \"optimal\": what each "
        "worker may keep, like 24GB")  # fmt: skip
    add("--units", type=count, metavar="U", help="of \"optimal\": equal units that each stage "
        f"has, of which some run again (default: {_UNITS})")  # fmt: skip


def run_again(arguments: argparse.Namespace, plan: Plan, costs: Costs) -> Again | None:
    """Return what backwards run again; None where it is nothing."""
    choice, limit = arguments.activation_checkpointing, arguments.memory
    if choice != "optimal" and (limit is not None or arguments.units is not None):
        given = "--memory" if limit is not None else "--units"
        raise PlanError(
            f"{given} with --activation-checkpointing {choice}, which no limit changes; allowed: "
            "optimal, which runs again what a limit has no room for; use "
            f"--activation-checkpointing optimal, or leave {given} out"
        )
    if choice == "never":
        return None
    _check(plan, choice)
    steady = replace(plan, num_steps=steps_to_count(plan.num_stages, plan.num_microbatches))
    state = arguments.state
    if choice == "always":
        kept = memory(steady, costs, remat=True, state_per_param=state)
        return Again(costs.forward_s, kept)
    if limit is None:
        raise PlanError(
            "--activation-checkpointing optimal without --memory, by which it chooses what runs "
            "again; allowed: what each worker may keep; add --memory 24GB"
        )
    units = _units(costs, arguments.units or _UNITS)
    found = reruns(steady, units, costs, limit, state_per_param=state)
    if found is None:
        least = least_limit(steady, units, costs, state_per_param=state)
        raise PlanError(
            f"--memory {limit:.0f} ({show_bytes(limit)}) is kept by no choice of what runs again; "
            f"allowed: {least} ({show_bytes(least)}) or more; use --memory {least}, more stages "
            "or smaller micro-batches"
        )
    return Again(found.again_s, found.memory)


def _check(plan: Plan, choice: str) -> None:
    what = f"--activation-checkpointing {choice} with preset {plan.preset!r}"
    if plan.axes.placement.runs_whole_micro:
        raise PlanError(
            f"{what}, whose workers run whole micro-batches, as the module does; allowed: "
            "pipelines; use preset 1f1b, or checkpoints in the module"
        )
    if choice == "optimal" and plan.axes.weights.looks_ahead:
        raise PlanError(
            f"{what}, whose predicted weights are gone when a part of a forward would run again; "
            "allowed: rules that keep what a forward has read; use always, or pipedream_2bw"
        )
    if plan.offloads:
        raise PlanError(
            f"{what} and --offload, by which nothing runs again; allowed: one of them; leave "
            "--offload out"
        )


def _units(costs: Costs, num_units: int) -> Sequence[Sequence[Unit]]:
    """Cut stages into equal units, of which each gives as much as crosses the next cut."""
    crossing = (*costs.cut_bytes[1:], 0.0)
    return [
        [Unit(forward_s / num_units, int(size / num_units), int(given))] * num_units
        for forward_s, size, given in zip(
            costs.forward_s, costs.activation_bytes, crossing, strict=True
        )
    ]
