"""The tables that a recipe prints: the plan when training starts, the results at its end."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, final

import lightning as L
from rich import get_console
from rich.table import Table
from torch import nn

from lightning_cyclic.runtime.partial_step.collectives import rank_of


@final
class PlanReport(L.Callback):
    """Print what runs where, once the first batch has shown which stages the model has.

    Args:
        activation_checkpointing: Of a pipeline, whether stages are run again for their backward.
    """

    def __init__(self, activation_checkpointing: str | None = None) -> None:
        self.printed = False
        self.activation_checkpointing = activation_checkpointing

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Print the plan on rank 0, above the progress bar."""
        if self.printed or not trainer.is_global_zero:
            return
        self.printed = True
        console = get_console()  # the progress bar's
        console.print(
            plan_table(trainer, pl_module, activation_checkpointing=self.activation_checkpointing)
        )
        stage_of = getattr(trainer.strategy, "stage_of", None)
        if stage_of:
            console.print(stage_table(pl_module, stage_of, stage_ranks(trainer)))


def plan_table(
    trainer: L.Trainer, module: nn.Module, *, activation_checkpointing: str | None = None
) -> Table:
    """Say how the work is shared out; a strategy without a plan has fewer rows."""
    plan = getattr(trainer.strategy, "plan", None)
    pipelined = getattr(plan, "placement", None) == "pipelined"
    rows = {
        "strategy": getattr(plan, "preset", type(trainer.strategy).__name__),
        "workers": trainer.world_size,
        "replicas of the pipeline": plan.replicas if pipelined else None,
        "weights read": getattr(plan, "weights", None),
        "stages": getattr(plan, "num_stages", None),
        "micro-batches per update": getattr(plan, "num_microbatches", None),
        "rematerialisation": activation_checkpointing if pipelined else None,
        "slack (slots)": None if pipelined else getattr(plan, "slack", None),
        "parameters": f"{sum(p.numel() for p in module.parameters()):,}",
        "updates per epoch": trainer.num_training_batches // trainer.accumulate_grad_batches,
        "epochs": trainer.max_epochs,
    }
    return _two_columns("Plan", {name: row for name, row in rows.items() if row is not None})


def stage_ranks(trainer: L.Trainer) -> dict[int, list[int]]:
    """Return the ranks that run each stage of a pipeline; nothing where all ranks run all."""
    plan = getattr(trainer.strategy, "plan", None)
    if getattr(plan, "placement", None) != "pipelined":
        return {}
    size = plan.num_workers // plan.replicas
    workers_of = plan.axes.placement.workers_of
    return {
        j: sorted(rank_of(worker, size) for worker in workers_of(j))
        for j in range(plan.num_stages)
    }


def stage_table(
    module: nn.Module,
    stage_of: Mapping[str, int],
    ranks: Mapping[int, Sequence[int]] | None = None,
) -> Table:
    """List the stages, each with its first parameter and its share of all parameters."""
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    stages: dict[int, list[str]] = defaultdict(list)
    for name, j in stage_of.items():
        stages[j].append(name)
    table = Table("stage", "begins with", "tensors", "parameters", title="Stages")
    for column in (0, 2, 3):
        table.columns[column].justify = "right"
    if ranks:
        table.add_column("on ranks", justify="right")
    for j, names in sorted(stages.items()):
        count = sum(sizes.get(name, 0) for name in names)
        held = [", ".join(map(str, ranks[j]))] if ranks else []
        table.add_row(str(j), names[0], str(len(names)), f"{count:,}", *held)
    return table


def print_results(trainer: L.Trainer, metrics: Mapping[str, float], seconds: float) -> None:
    """Print the metrics, the time, and what rank 0 sent where the strategy counts it."""
    rows: dict[str, Any] = {name.replace("_", " "): f"{v:.4f}" for name, v in metrics.items()}
    rows["seconds, start-up included"] = f"{seconds:.1f}"
    messages = getattr(trainer.strategy, "messages_sent", None)
    if messages:  # none counted: one worker, another strategy, or workers that were spawned
        rows["messages sent by rank 0"] = f"{messages:,}"
        rows["bytes sent by rank 0"] = f"{trainer.strategy.bytes_sent:,}"
    rows["files"] = os.path.relpath(trainer.default_root_dir)
    get_console().print(_two_columns("Results", rows))


def _two_columns(title: str, rows: Mapping[str, object]) -> Table:
    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table
