"""A data-parallel preset by name, on a network that the user describes.

    rank 0      one batch  ->  profile  ->  prediction  ->  what it says, and numbers if asked
    all ranks   the same, as text

What is predicted is said once: the step, and that of DDP at its best. With slack="auto" or
groups="auto" the numbers are chosen by it, too. Measured times differ from run to run; so a
checkpoint keeps what was chosen, and who resumes from it does not choose again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_cyclic.plan import Plan
from lightning_cyclic.planner.data_parallel import (
    ALIKE,
    best_around_ring,
)
from lightning_cyclic.planner.partition import balance
from lightning_cyclic.planner.profile import ModelProfile
from lightning_cyclic.planner.ring_numbers import RingChoices, RingNumbers
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.plugin.auto import lies_on_hosts, on_hosts, possible_group_sizes
from lightning_cyclic.plugin.checks import check_hosts_of_groups
from lightning_cyclic.plugin.first_batch import first_batch
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.precision.sparse_state import SparseStatePrecision
from lightning_cyclic.plugin.profiles import profiles_of
from lightning_cyclic.plugin.told import told_by_rank_0
from lightning_cyclic.runtime.failure_words import reason_of
from lightning_cyclic.simulate import (
    Network,
    best_lockstep,
    show_bytes,
    show_seconds,
    steady_step_s,
)

SAVED: Final = "ring"  # a choice's place in a checkpoint's key
_NUM_STEPS = 10  # to be steady


@final
class RingPlan:
    """Say what a step takes beside DDP's, and choose what the user leaves to it."""

    def __init__(self) -> None:
        self._chosen: dict[str, Any] | None = None
        self._module: LightningModule | None = None  # that it was chosen for

    def choose(self, trainer: Trainer, options: Options, hosts: Sequence[str]) -> Options:
        """Return the options of this run; all workers must call it.

        Args:
            trainer: whose module is on its device.
            options: with the number of workers.
            hosts: of each rank.

        Raises:
            ConfigurationError: "auto" with data that can be read once only; on every worker.
        """
        module, workers = trainer.lightning_module, trainer.world_size
        if not _is_predicted(trainer, options):
            return replace(
                options,
                slack=0 if options.slack == "auto" else options.slack,
                groups=None if options.groups == "auto" else options.groups,
            )
        check_hosts_of_groups(options.plan(1), hosts)
        found = self._chosen if self._module in (None, module) else None
        if (
            found is None
            or found["num_workers"] != workers
            or not found["options"].keys() >= {*options.left_open}
            or not lies_on_hosts(found["options"].get("groups"), hosts)
        ):
            decide = _choice if options.left_open else _comparison
            self._chosen = told_by_rank_0(trainer, lambda: decide(trainer, options, hosts))
            (rank_zero_warn if self._chosen["warns"] else rank_zero_info)(self._chosen["why"])
        self._module = module
        assert self._chosen is not None
        chosen = self._chosen["options"]  # of a checkpoint, maybe of a run that left more open
        return replace(options, **{k: v for k, v in chosen.items() if options.is_open(k)})

    def state(self) -> dict[str, Any] | None:
        """Return the choice for a checkpoint; None where nothing was chosen."""
        return self._chosen if self._chosen is not None and self._chosen["options"] else None

    def load(self, chosen: Mapping[str, Any]) -> None:
        """Take the choice of a checkpoint, for the next module."""
        self._chosen, self._module = dict(chosen), None


def _is_predicted(trainer: Trainer, options: Options) -> bool:
    is_ring = options.plans_placement == "replicated" and trainer.world_size > 1
    # of which DDP has no like: it sends all elements, also those that are pruned
    is_sparse = isinstance(trainer.precision_plugin, SparseStatePrecision)
    return is_ring and options.is_network_given and not is_sparse


# ---------------------------------------------------------------------- on rank 0


def _comparison(trainer: Trainer, options: Options, hosts: Sequence[str]) -> dict[str, Any]:
    """Predict the plan as the user has it; nothing fails for that."""
    try:
        (profile,) = profiles_of(trainer, first_batch(trainer))
    except Exception as error:  # training says better what is wrong with a step, if it comes to it
        why = f"lightning_cyclic does not predict a step: {reason_of(error)}"
        return _decision(trainer, {}, why, warns=False)
    module = trainer.lightning_module
    num_stages = min(options.expected_stages(module), len(profile.units))
    plan = replace(options.plan(num_stages), num_steps=_NUM_STEPS)
    sums = options.wire_bytes_per_byte(module)
    costs = _cut(profile, num_stages).costs(sums=sums)
    network = on_hosts(options.network, hosts)
    step_s = steady_step_s(plan, costs, network)
    ddp_s = _ddp_step_s(profile, network, trainer.world_size)
    why = _words(options, profile, step_s, ddp_s)
    return _decision(trainer, {}, why, warns=step_s > ALIKE * ddp_s)


def _choice(trainer: Trainer, options: Options, hosts: Sequence[str]) -> dict[str, Any]:
    """Choose what the user leaves open."""
    (profile,) = profiles_of(trainer, first_batch(trainer))
    module = trainer.lightning_module
    sums, num_units = options.wire_bytes_per_byte(module), len(profile.units)
    plan, workers = options.plan(1), trainer.world_size
    stages = options.given_stages
    network, is_delayed = on_hosts(options.network, hosts), plan.weights == "delayed"
    # of slack, a large one delays all
    delayed = (False, True) if options.slack == "auto" else (is_delayed,)
    found = best_around_ring(
        lambda num_stages: _cut(profile, num_stages).costs(sums=sums),
        network,
        workers,
        RingChoices(
            most_stages=num_units,
            stages=None if stages is None else (stages,),
            slacks=None if options.slack == "auto" else (plan.slack,),
            delayed=delayed,
            shardings=(plan.sharding,),
            group_sizes=_group_sizes(trainer, options, plan, hosts),
        ),
    )
    assert found is not None  # of any step time
    numbers, ddp_s = found.numbers, _ddp_step_s(profile, network, workers)
    chosen: dict[str, Any] = {}
    if options.slack == "auto":
        chosen["slack"] = _slack(numbers)
    if options.groups == "auto":
        chosen["groups"] = workers // numbers.group_size if numbers.group_size > 1 else None
    if stages is None:
        names = _cut(profile, numbers.num_stages).names[1:]
        chosen["stages"] = list(names) if names else 1
    given = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    why = (
        f'lightning_cyclic chose CyclicStrategy("{options.preset}", {given}). '
        f"{_words(options, profile, found.step_s, ddp_s)}"
    )
    return _decision(trainer, chosen, why, warns=found.step_s > ALIKE * ddp_s)


def _group_sizes(
    trainer: Trainer, options: Options, plan: Plan, hosts: Sequence[str]
) -> tuple[int, ...]:
    """Return how many workers may be a group."""
    if options.groups != "auto":
        return (plan.group_size,)
    return possible_group_sizes(trainer, hosts)


def _ddp_step_s(profile: ModelProfile, network: Network, num_workers: int) -> float:
    whole = _cut(profile, len(profile.units)).costs()
    return best_lockstep(whole, network, num_workers).step_s


def _slack(numbers: RingNumbers) -> int:
    """Return the slack of a rule by which all read the version before the newest, too."""
    return 2 * numbers.num_stages - 1 if numbers.is_delayed else numbers.slack


def _decision(
    trainer: Trainer, options: dict[str, Any], why: str, *, warns: bool
) -> dict[str, Any]:
    return {"options": options, "num_workers": trainer.world_size, "why": why, "warns": warns}


def _cut(profile: ModelProfile, num_stages: int) -> Stages:
    """Cut by bytes, as the runtime does where workers run whole micro-batches."""
    sizes = [round(unit.param_bytes) for unit in profile.units]
    return Stages.of(profile, balance(sizes, num_stages), together=True)


def _words(options: Options, profile: ModelProfile, step_s: float, ddp_s: float) -> str:
    """Say what is predicted; of what; and what to do."""
    network = options.network
    stages = Stages.of(profile, [0], together=True)
    compute_s = stages.forward_s[0] + stages.backward_s[0]
    known = (
        f"({show_seconds(ddp_s)} and {show_seconds(step_s)}, by {options.num_workers} workers, "
        f"{show_bytes(stages.param_bytes[0])} of parameters, {show_seconds(compute_s)} of compute "
        f"as measured on rank 0, {show_bytes(network.bandwidth_bytes_per_s)}/s and "
        f"{show_seconds(network.latency_s)} per message)"
    )
    if step_s > ALIKE * ddp_s:
        return (
            f"DDP is predicted to take {ddp_s / step_s:.2f} of the time of this step {known}: use "
            "Trainer(strategy='ddp'), or CyclicStrategy('auto', bandwidth=..., latency=...), "
            "which takes what is fastest"
        )
    return f"DDP is predicted to take {ddp_s / step_s:.2f} times as long as this step {known}"
