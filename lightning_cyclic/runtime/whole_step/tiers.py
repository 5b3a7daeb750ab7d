"""What of a module and its optimizer stays in memory under a limit, and what comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.plan.tiers import Tiers
from lightning_cyclic.planner.tiers import Chunks, in_tiers
from lightning_cyclic.runtime.absent import num_bytes_of
from lightning_cyclic.runtime.stages.stage_map import StageMap
from lightning_cyclic.runtime.state_holders import Holder, ModuleWeights, OptimizerState
from lightning_cyclic.runtime.state_homes import AbstractHome, FileHome, HostHome
from lightning_cyclic.runtime.state_layout import StateLayout, lay_state, lay_weights
from lightning_cyclic.runtime.state_tier import StateTier, StateTiers
from lightning_cyclic.runtime.weight_forms import ALL, WeightForms
from lightning_cyclic.runtime.whole_step.shards import shared_parameters
from lightning_cyclic.simulate import Costs
from lightning_cyclic.simulate.memory import steps_to_count


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Hold what the user chose.

    Args:
        limit_bytes: most bytes that a worker may keep, as the plan counts them.
        folder: of a disk, for what does not stay. [the host's memory, beside a GPU]
        device: of the worker.
        optimizer: returns the one whose state it is.
        moves_weights: whether weights may come and go, as well.
        early: whether each stage is updated right behind its backward (:class:`Tiers`).
        say: tells the user what follows.
    """

    limit_bytes: float
    folder: Path | None
    device: torch.device
    optimizer: Callable[[], Optimizer]
    moves_weights: bool = False
    early: bool = False
    say: Callable[[str], None] = print


@final
class PlannedTiers:
    """Know what comes and goes, and a plan that brings it.

    Args:
        plan: in which all would stay.
        sent: bytes that single stages are sent for a micro-batch. [workers have all stages]
        again: whether backwards of single stages run their forward again.
    """

    def __init__(
        self, config: TierConfig, plan: Plan, module: nn.Module, stages: StageMap,
        forms: WeightForms, *, sent: Sequence[int] = (), again: bool = False,
    ) -> None:  # fmt: skip
        self._sent, self._again = sent, again
        self._config = config
        self._named = dict(module.named_parameters())
        self._parameters = [[forms.trained(self._named[n]) for n in ns] for ns in stages.trained]
        self._state = lay_state(config.optimizer(), self._parameters)
        may_move = config.moves_weights and plan.has_one_version and forms is ALL
        self._weights = lay_weights(self._movable(module, stages) if may_move else ())
        self.plan = self._planned(plan, module, stages)

    def _movable(self, module: nn.Module, stages: StageMap) -> list[list[nn.Parameter]]:
        """Return the weights of each stage that its own modules alone use, frozen ones as well.

        A CPU reads what others use where it lies, which a GPU does not.
        """
        shared, on_host = shared_parameters(module), self._config.device.type == "cpu"
        used = (
            [
                n
                for n in (*s.parameters, *s.frozen)
                if on_host or not (n in s.glue or s.is_used_later)
            ]
            for s in stages.stages
        )
        of_stages = (map(self._named.__getitem__, names) for names in used)
        return [[p for p in ps if id(p) not in shared] for ps in of_stages]

    def _planned(self, plan: Plan, module: nn.Module, stages: StageMap) -> Plan:
        config, kept = self._config, [stage.activation_bytes for stage in stages.stages]
        sizes = [sum(num_bytes_of(self._named[n]) for n in s.parameters) for s in stages.stages]
        all_bytes = sum(map(num_bytes_of, self._named.values()))
        state = Chunks(self._state.counts, self._state.chunk_bytes)
        weights = _chunks_of_weights(self._weights)
        if None in kept:  # of a checkpoint of a run that had no limit
            moves_weights = all_bytes > config.limit_bytes and any(weights.counts)
            what = (
                "weights come for their use, and all optimizer state"
                if moves_weights
                else "optimizer state comes"
            )
            config.say(
                "How much room activations take is not known (from a checkpoint of a run without "
                "a limit, or where no rank may have all weights), so that nobody can say whether "
                f"memory_limit_bytes={config.limit_bytes:.0f} is kept: all {what} "
                "for its update, and goes behind it"
            )
            none = (0,) * plan.num_stages
            all_moves = Tiers(moved=state.of(state.counts), kept=none, early=config.early)
            if moves_weights:
                every, used = weights.rest(none), weights.used_of_rest(none)
                all_moves = replace(all_moves, weights=every, away=used)
            return replace(plan, tiers=all_moves)
        nothing = (0.0,) * len(sizes)
        costs = Costs(
            forward_s=nothing, backward_s=nothing, param_bytes=tuple(map(float, sizes)),
            cut_bytes=tuple(map(float, self._sent)) or nothing,
            activation_bytes=tuple(float(x or 0) for x in kept),
        )  # fmt: skip
        of_each = max(1, plan.num_microbatches // plan.replicas) if self._sent else 1
        found = in_tiers(
            replace(plan, num_steps=steps_to_count(plan.num_stages, of_each)), costs, state,
            config.limit_bytes, weights=weights if any(weights.counts) else None,
            besides=all_bytes - sum(sizes) + sum(map(num_bytes_of, module.buffers())),
            early=config.early, remat=self._again,
        )  # fmt: skip
        return replace(plan, tiers=found.tiers)

    def tiers(self, worker: int) -> StateTiers:
        """Make what moves what a worker's own stages have."""
        tiers, config = self.plan.tiers, self._config
        assert tiers is not None
        config.say(self._words(tiers))
        owned = [j for j in range(self.plan.num_stages) if self.plan.owner(j) == worker]
        parameters = {j: self._parameters[j] for j in owned}
        held: dict[Payload, tuple[StateLayout, Sequence[int], Holder]] = {
            Payload.O: (self._state, tiers.moved, OptimizerState(config.optimizer))
        }
        if any(tiers.weights):
            held[Payload.P] = self._weights, tiers.weights, ModuleWeights()
        return StateTiers({
            payload: StateTier(
                layout, _kept_of(layout, moved), parameters, holder, self._make_home,
                config.device,
            )
            for payload, (layout, moved, holder) in held.items()
        })  # fmt: skip

    def _make_home(self, num_bytes: int) -> AbstractHome:
        folder = self._config.folder
        if folder is not None:
            return FileHome(folder, num_bytes)
        return HostHome(num_bytes, is_pinned=self._config.device.type == "cuda")

    def _words(self, tiers: Tiers) -> str:
        """Say what is where."""
        stays, goes = sum(tiers.kept), sum(tiers.moved) + sum(tiers.weights)
        if not goes:
            return f"All optimizer state, {stays / 1e6:.1f} MB, has room, and stays in memory"
        place = self._config.folder or HostHome.name
        unused = self._state.unused
        words = (
            f"Optimizer state of {stays / 1e6:.1f} MB stays in memory; "
            f"{sum(tiers.moved) / 1e6:.1f} MB lie in {place}, and come for their update (chunks "
            f"of {self._state.chunk_bytes / 1e6:.1f} MB, of which {unused:.0%} is not used)"
        )
        if not any(tiers.weights):
            return words
        return (
            f"{words}; so do weights of {sum(tiers.weights) / 1e6:.1f} MB, which come for each "
            "forward, backward and update"
        )


def _chunks_of_weights(layout: StateLayout) -> Chunks:
    used = [[sum(num_bytes_of(x.p) for x in chunk) for chunk in each] for each in layout.stages]
    return Chunks(layout.counts, layout.chunk_bytes, used)


def _kept_of(layout: StateLayout, moved: Sequence[int]) -> list[int]:
    """Return how many chunks of each stage stay, if so many bytes do not."""
    return [n - x // layout.chunk_bytes for n, x in zip(layout.counts, moved, strict=True)]
