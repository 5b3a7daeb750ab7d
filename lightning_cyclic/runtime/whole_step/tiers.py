"""What of optimizer state stays in memory under a limit, and what comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.tiers import Tiers
from lightning_cyclic.planner.tiers import with_state_in_tiers
from lightning_cyclic.runtime.absent import num_bytes_of
from lightning_cyclic.runtime.stages.stage_map import StageMap
from lightning_cyclic.runtime.state_homes import AbstractHome, FileHome, HostHome
from lightning_cyclic.runtime.state_layout import lay_state
from lightning_cyclic.runtime.state_tier import StateTier
from lightning_cyclic.runtime.weight_forms import WeightForms
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
        early: whether each stage is updated right behind its backward (:class:`Tiers`).
        say: tells the user what follows.
    """

    limit_bytes: float
    folder: Path | None
    device: torch.device
    optimizer: Callable[[], Optimizer]
    early: bool = False
    say: Callable[[str], None] = print


@final
class PlannedTiers:
    """Know where optimizer state lies, and a plan that brings it.

    Args:
        plan: whose state would all stay.
        sent: bytes that single stages are sent for a micro-batch. [workers have all stages]
        again: whether backwards of single stages run their forward again.
    """

    def __init__(
        self, config: TierConfig, plan: Plan, module: nn.Module, stages: StageMap,
        forms: WeightForms, *, sent: Sequence[int] = (), again: bool = False,
    ) -> None:  # fmt: skip
        self._sent, self._again = sent, again
        self._config = config
        named = dict(module.named_parameters())
        self._parameters = [[forms.trained(named[n]) for n in ns] for ns in stages.trained]
        self._layout = lay_state(config.optimizer(), self._parameters)
        self.plan = self._planned(plan, module, stages, named)

    def _planned(
        self, plan: Plan, module: nn.Module, stages: StageMap, named: Mapping[str, nn.Parameter]
    ) -> Plan:
        layout = self._layout
        kept = [stage.activation_bytes for stage in stages.stages]
        if None in kept:  # of a checkpoint of a run that had no limit
            moved = tuple(n * layout.chunk_bytes for n in layout.counts)
            self._config.say(
                "How much room activations take is not known (from a checkpoint of a run without "
                "a limit, or where no rank may have all weights), so that nobody can say whether "
                f"memory_limit_bytes={self._config.limit_bytes:.0f} is kept: all optimizer state "
                "comes for its update, and goes behind it"
            )
            none = (0,) * len(moved)
            return replace(plan, tiers=Tiers(moved=moved, kept=none, early=self._config.early))
        sizes = [sum(num_bytes_of(named[n]) for n in s.parameters) for s in stages.stages]
        held = sum(map(num_bytes_of, named.values())) - sum(sizes)
        held += sum(b.numel() * b.element_size() for b in module.buffers())
        nothing = (0.0,) * len(sizes)
        costs = Costs(
            forward_s=nothing, backward_s=nothing, param_bytes=tuple(map(float, sizes)),
            cut_bytes=tuple(map(float, self._sent)) or nothing,
            activation_bytes=tuple(float(x or 0) for x in kept),
        )  # fmt: skip
        of_each = max(1, plan.num_microbatches // plan.replicas) if self._sent else 1
        steady = replace(plan, num_steps=steps_to_count(plan.num_stages, of_each))
        limit = self._config.limit_bytes
        found = with_state_in_tiers(
            steady,
            costs,
            layout.counts,
            layout.chunk_bytes,
            limit,
            besides=held,
            early=self._config.early,
            remat=self._again,
        )
        return replace(plan, tiers=found.tiers)

    def tier(self, worker: int) -> StateTier:
        """Make what moves the state of a worker's own stages."""
        assert self.plan.tiers is not None
        self._config.say(self._words())
        owned = [j for j in range(self.plan.num_stages) if self.plan.owner(j) == worker]
        layout, config = self._layout, self._config
        kept = [x // layout.chunk_bytes for x in self.plan.tiers.kept]
        parameters = {j: self._parameters[j] for j in owned}
        return StateTier(
            layout, kept, parameters, config.optimizer, self._make_home, config.device
        )

    def _make_home(self, num_bytes: int) -> AbstractHome:
        folder = self._config.folder
        if folder is not None:
            return FileHome(folder, num_bytes)
        return HostHome(num_bytes, is_pinned=self._config.device.type == "cuda")

    def _words(self) -> str:
        """Say where optimizer state is."""
        tiers = self.plan.tiers
        assert tiers is not None
        stays, goes, unused = sum(tiers.kept), sum(tiers.moved), self._layout.unused
        if not goes:
            return f"All optimizer state, {stays / 1e6:.1f} MB, has room, and stays in memory"
        return (
            f"Optimizer state of {stays / 1e6:.1f} MB stays in memory; {goes / 1e6:.1f} MB lie in "
            f"{self._config.folder or HostHome.name}, and come for their update (chunks of "
            f"{self._layout.chunk_bytes / 1e6:.1f} MB, of which {unused:.0%} is not used)"
        )
