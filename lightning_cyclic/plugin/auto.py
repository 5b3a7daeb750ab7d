"""The automatic choice: a plan for this module on these workers, before anything is set up.

    rank 0      one batch  ->  survey  ->  profiles  ->  search  ->  decision
    all ranks   the decision, as text

What comes of it are the same options that a user could have written, so a run goes on as one
with these would, bit by bit. Measured times differ from run to run; so a checkpoint keeps the
decision, and who resumes from it does not choose again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plan.presets import PLACEMENTS, PRESETS
from lightning_cyclic.planner.candidates import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY,
    DEFAULT_PRESETS,
    INSIDE_BANDWIDTH,
    INSIDE_LATENCY,
    Problem,
)
from lightning_cyclic.planner.data_parallel import ALIKE
from lightning_cyclic.planner.ranked import RankedPlan
from lightning_cyclic.planner.reference import Reference, reference
from lightning_cyclic.planner.ring_numbers import sizes_of_groups
from lightning_cyclic.planner.search import search
from lightning_cyclic.planner.table import table, written
from lightning_cyclic.plugin.checks import check_bytes
from lightning_cyclic.plugin.first_batch import first_batch
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.precision.sparse_state import SparseStatePrecision
from lightning_cyclic.plugin.profiles import leaves_out_parameters, profiles_of
from lightning_cyclic.plugin.told import told_by_rank_0
from lightning_cyclic.simulate import Network, parse_bandwidth, parse_seconds
from lightning_cyclic.simulate.units import show_bytes, show_seconds

AUTO: Final = "auto"
SAVED: Final = "auto"  # a decision's place in a checkpoint's key
_AXES = ("schedule", "placement", "weights", "sharding")
# what belongs to a preset by name -> its default, and a preset that has it
_FIXED: Mapping[str, tuple[object, str]] = {
    "stages": ("auto", "1f1b"),
    "groups": (None, "cyclic_dp"),
    "clip": (None, "1f1b"),
    "backward_weights": ("current", "pipeoptim"),
    "horizon": ("linear", "pipeoptim"),
    "lookahead_lrs": (False, "pipeoptim"),
    "error_feedback": (False, "pipedream_2bw"),
    "warmup_steps": (0, "pipedream_2bw"),
    "lr_annealing_steps": (0, "pipedream"),
}
_LOCKSTEP = "lockstep_dp"  # whose axes are those of DistributedDataParallel
_USED_SHARE = 0.9  # of a device's memory; the rest is the framework's

Check = Callable[[Options], None]


def network_of(bandwidth: str | float | None, latency: str | float | None) -> Network:
    """Return the links between workers, by default those of `lightning-cyclic plan`.

    Args:
        bandwidth: like "10Gbit/s", or bytes per second.
        latency: like "50us", or seconds.

    Raises:
        PlanError: text that is no such number.
    """
    return Network(
        latency_s=_number(DEFAULT_LATENCY if latency is None else latency, parse_seconds),
        bandwidth_bytes_per_s=_number(
            DEFAULT_BANDWIDTH if bandwidth is None else bandwidth, parse_bandwidth
        ),
    )


def on_hosts(network: Network, hosts: Sequence[str]) -> Network:
    """Return the links of workers of which several share a host.

    Args:
        network: the links between hosts; between all workers where there is one host.
        hosts: of each worker.
    """
    if len(set(hosts)) in (1, len(hosts)):
        return network
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    inside = Network(
        latency_s=min(network.latency_s, parse_seconds(INSIDE_LATENCY)),
        bandwidth_bytes_per_s=max(
            network.bandwidth_bytes_per_s, parse_bandwidth(INSIDE_BANDWIDTH)
        ),
    )
    return replace(network, hosts=tuple(numbers[host] for host in hosts), inside=inside)


def possible_group_sizes(trainer: Trainer, hosts: Sequence[str]) -> tuple[int, ...]:
    """Return how many workers may be a group: those of one host, if nothing forbids it."""
    # buffers go from one worker to the next, of all batches of a step
    has_buffers = any(True for _ in trainer.lightning_module.buffers())
    if has_buffers and trainer.accumulate_grad_batches > 1:
        return (1,)
    return tuple(sizes_of_groups(len(hosts), hosts)) if hosts else (1,)


def lies_on_hosts(groups: int | None, hosts: Sequence[str]) -> bool:
    """Say whether groups that were chosen, maybe by a run on other hosts, are each on one."""
    return groups is None or len(hosts) // groups in sizes_of_groups(len(hosts), hosts)


def _number(given: object, parse: Callable[[str], float]) -> float:
    """Return a number that is given as it is, or as text with a unit."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return float(given) if is_number else parse(str(given))  # type: ignore[arg-type]


def check_network(options: Options, given: Mapping[str, object]) -> None:
    """Refuse numbers of links where nothing is decided by them.

    Args:
        options: of a named preset.
        given: bandwidth and latency, None where they are not.

    Raises:
        ConfigurationError: with the argument.
    """
    name, value = next(((n, v) for n, v in given.items() if v is not None), ("", None))
    if name and options.plans_placement not in ("pipelined", "replicated"):
        raise ConfigurationError(
            f"{name}={value!r} is of no use with placement {options.plans_placement!r} (preset "
            f"{options.preset!r}), where nothing is chosen by it; allowed: {name}=None, a "
            "pipeline, whose stages are cut by it, workers that each have the whole model, or "
            f'"auto"; use CyclicStrategy("auto", {name}={value!r})'
        )


@final
class AutoPlan:
    """Choose the options of a run.

    Args:
        asked: what the user gave beside "auto": axes, num_micro, width and remat="always" narrow
            the search, memory_limit_bytes is of a worker.

    Raises:
        ConfigurationError: an argument that only a named preset has, or no preset with the axes.
    """

    def __init__(self, asked: Options) -> None:
        self._asked = asked
        self._presets = _presets(asked)
        self._chosen: dict[str, Any] | None = None
        self._module: LightningModule | None = None  # that it was chosen for
        self._problem: Problem | None = None  # that was solved here

    @property
    def provisional(self) -> Options:
        """Return options that stand in until the choice: whole modules on all workers."""
        return replace(
            self._asked,
            preset="cyclic_dp",
            schedule=None,
            placement=None,
            weights=None,
            sharding=None,
            stages="auto",
            slack=0 if isinstance(self._asked.slack, str) else self._asked.slack,
            num_micro=None,
            width=1,
            remat="never",
            memory_limit_bytes=None,
        )

    @property
    def is_decided(self) -> bool:
        """Say whether a plan has been chosen."""
        return self._chosen is not None

    def choose(self, trainer: Trainer, check: Check, hosts: Sequence[str]) -> Options:
        """Return the options of this run; all workers must call it.

        Args:
            trainer: whose module is on its device.
            check: refuses options that do not fit the Trainer.
            hosts: of each rank.

        Raises:
            PlanError: no plan fits; on every worker.
            ConfigurationError: what the Trainer or its data cannot do; on every worker.
        """
        module, workers = trainer.lightning_module, trainer.world_size
        found = self._chosen if self._module in (None, module) else None
        if (
            found is None
            or found["num_workers"] != workers
            or not lies_on_hosts(found["options"].get("groups"), hosts)
        ):
            self._chosen = told_by_rank_0(trainer, lambda: self._choice(trainer, check, hosts))
            rank_zero_info(self._chosen["why"])
        self._module = module
        assert self._chosen is not None
        return replace(self.provisional, **self._chosen["options"])

    def state(self) -> dict[str, Any] | None:
        """Return the choice for a checkpoint."""
        return self._chosen

    def load(self, chosen: Mapping[str, Any]) -> None:
        """Take the choice of a checkpoint, for the next module."""
        self._chosen, self._module = dict(chosen), None

    def report(self) -> str | None:
        """Return the table of the plans that were looked at; None where this worker has not."""
        return None if self._problem is None else table(search(self._problem, most=10))

    # ------------------------------------------------------------------ on rank 0

    def _choice(self, trainer: Trainer, check: Check, hosts: Sequence[str]) -> dict[str, Any]:
        presets = self._checked_presets(trainer.world_size, check)
        batch = first_batch(trainer)
        problems = self._problems(trainer, batch, presets, hosts)
        best, self._problem = _best(problems)
        options, why = _options(best), _why(best, self._problem)
        ddp = self._ddp(problems[-1], presets)
        if ddp is not None and ddp.samples_per_s * ALIKE >= best.samples_per_s:
            self._problem, why = problems[-1], _why_ddp(ddp, best)
            unused = leaves_out_parameters(trainer, batch)
            options = {"preset": _LOCKSTEP, "ddp_arguments": {"find_unused_parameters": unused}}
        return {"options": options, "num_workers": trainer.world_size, "why": why}

    def _ddp(self, problem: Problem, presets: Sequence[str]) -> Reference | None:
        """Predict DistributedDataParallel, if it does what is asked for."""
        asked = self._asked
        is_asked = _LOCKSTEP in presets and asked.remat != "always"
        is_wide = problem.num_workers > 1 and problem.widths == (problem.num_workers,)
        return reference(problem) if is_asked and is_wide else None

    def _checked_presets(self, num_workers: int, check: Check) -> tuple[str, ...]:
        """Leave out what the Trainer cannot run so."""
        kept, refusals = [], []
        for preset in self._presets:
            try:
                check(
                    replace(
                        self.provisional,
                        preset=preset,
                        num_workers=num_workers,
                        num_micro=None if _runs_whole_micro(preset) else 4 * num_workers,
                    )
                )
                kept.append(preset)
            except ConfigurationError as error:
                refusals.append(error)
        if not kept:
            raise refusals[0]
        return tuple(kept)

    def _problems(
        self, trainer: Trainer, batch: Any, presets: tuple[str, ...], hosts: Sequence[str]
    ) -> tuple[Problem, ...]:
        """Measure the module; return what is asked of the planner, for each number of replicas.

        A loader's batch is a replica's, so that more replicas train on more samples per update.
        """
        asked, num_workers = self._asked, trainer.world_size
        profiles = profiles_of(
            trainer, batch, lambda rows: self._num_micros(rows, trainer.world_size)
        )
        sizes = tuple(profile.micro_size for profile in profiles)
        batch_size = max(sizes) * (asked.num_micro or 1)
        sparsity, precision = _states(trainer)
        return tuple(
            Problem(
                profiles=profiles,
                num_workers=num_workers,
                memory_bytes=asked.memory_limit_bytes or _memory_bytes(trainer),
                network=asked.network,
                batch_size=width * batch_size,
                presets=presets,
                remats=(True,) if asked.remat == "always" else (False, True),
                slack=0 if isinstance(asked.slack, str) else asked.slack,
                widths=(width,),
                micro_sizes=sizes,
                sparsity=sparsity,
                precision=precision,
                host_network=on_hosts(asked.network, hosts),
                group_sizes=possible_group_sizes(trainer, hosts),
            )
            for width in range(1, num_workers + 1)
            if num_workers % width == 0 and asked.width in (1, width)
        )

    def _num_micros(self, rows: int, num_workers: int) -> Iterator[int]:
        """Yield into how many micro-batches a replica may cut its batch."""
        if self._asked.num_micro is not None:
            yield self._asked.num_micro
            return
        num_micro = 1
        while num_micro <= max(4, 2 * num_workers) and rows % num_micro == 0:
            yield num_micro
            num_micro *= 2


def _presets(asked: Options) -> tuple[str, ...]:
    """Return the presets with the axes that were asked for."""
    check_bytes(asked.memory_limit_bytes, "memory_limit_bytes")
    for name, (default, has_it) in _FIXED.items():
        if getattr(asked, name) != default:
            raise ConfigurationError(
                f'{name}={getattr(asked, name)!r} with preset "auto", which chooses it or has '
                f"none; allowed: {name}={default!r}, or a preset by name; use "
                f'CyclicStrategy("{has_it}", {name}={getattr(asked, name)!r})'
            )
    if asked.remat == "except_last":
        raise ConfigurationError(
            "remat='except_last' with preset \"auto\", whose planner does not count it; allowed: "
            "remat='always', or 'never', which leaves the choice to the planner; use one of these"
        )
    given = {axis: getattr(asked, axis) for axis in _AXES if getattr(asked, axis) is not None}
    found = [
        name
        for name in DEFAULT_PRESETS
        if all(getattr(PRESETS[name], axis) == value for axis, value in given.items())
        and not (asked.num_micro is not None and _runs_whole_micro(name))
    ]
    if not found:
        raise ConfigurationError(
            f"no preset that is chosen from has {given} with num_micro={asked.num_micro}; "
            f"allowed: the axes of {', '.join(DEFAULT_PRESETS)}; ask for less, or name a preset"
        )
    return tuple(found)


def _runs_whole_micro(preset: str) -> bool:
    return PLACEMENTS[PRESETS[preset].placement].runs_whole_micro


def _best(problems: tuple[Problem, ...]) -> tuple[RankedPlan, Problem]:
    """Return the plan that trains most samples per second, of all numbers of replicas.

    Raises:
        PlanError: none fits; names the nearest.
    """
    found: list[tuple[RankedPlan, Problem]] = []
    refusals: list[PlanError] = []
    for problem in problems:
        try:
            found.append((search(problem, most=1).plans[0], problem))
        except PlanError as error:
            refusals.append(error)
    if not found:
        raise min(refusals, key=lambda error: getattr(error, "least_bytes", inf))

    def key(item: tuple[RankedPlan, Problem]) -> tuple[float, float, float]:
        plan = item[0]
        return -float(f"{plan.samples_per_s:.3g}"), plan.staleness[0], plan.fit.memory_bytes

    return min(found, key=key)


def _options(plan: RankedPlan) -> dict[str, Any]:
    """Return the options of a plan, as plain data."""
    candidate, names = plan.fit.candidate, plan.fit.stages.names[1:]
    ring, num_workers = candidate.ring, plan.fit.plan.num_workers
    of_ring = {} if ring is None else {
        "slack": ring.slack, "groups": ring.num_groups(num_workers),
    }  # fmt: skip
    return {
        **of_ring,
        "preset": candidate.preset,
        "stages": list(names) if names else 1,
        "num_micro": None if candidate.runs_whole_micro else candidate.of_each,
        "width": candidate.width,
        "remat": "always" if candidate.remat else "never",
    }


def _why(plan: RankedPlan, problem: Problem) -> str:
    mean, most = plan.staleness
    stale = f"{mean:.2g} updates old on average, {most} at most" if most else "always the newest"
    return (
        f"lightning_cyclic chose {written(plan)}: {show_seconds(plan.step_s)} per update of "
        f"{problem.samples} samples ({plan.samples_per_s:.4g} per second), "
        f"{show_bytes(plan.fit.memory_bytes)} of {show_bytes(problem.memory_bytes)} per worker; "
        f"the weights that forwards read are {stale}"
    )


def _why_ddp(ddp: Reference, best: RankedPlan) -> str:
    return (
        f'lightning_cyclic chose what strategy="ddp" does: {show_seconds(ddp.step.step_s)} per '
        f"update of {ddp.samples} samples ({ddp.samples_per_s:.4g} per second), predicted to be "
        f"{ddp.samples_per_s / best.samples_per_s:.2f} times as fast as {written(best)}, the "
        "fastest of the other plans; forwards read the newest weights; sums of gradients are "
        "all-reduces, which do not add in the order of one process"
    )


def _states(trainer: Trainer) -> tuple[float | None, str]:
    """Return what fraction of the module is pruned, and in which precision the rest is kept.

    What has no mask counts as kept, with an index that it does not have.
    """
    plugin = trainer.precision_plugin
    if not isinstance(plugin, SparseStatePrecision):
        return None, Problem.precision
    num = sum(p.numel() for p in trainer.lightning_module.parameters())
    return plugin.num_pruned / num, plugin.precision


def _memory_bytes(trainer: Trainer) -> float:
    """Return what a worker may fill of the memory of its device, or of its share of the host's."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return _USED_SHARE * torch.cuda.mem_get_info(device)[1]
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _USED_SHARE * host / max(1, trainer.num_devices)
