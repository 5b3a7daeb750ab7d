"""The contenders of the benchmark "pipeline": one GPT, trained by several executors.

Each is made once, in processes of its own, and then asked for steps, round after round:

    contender(num_steps)   what it took per step, from barrier to barrier
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.utils.data import DataLoader

from benchmarks.pipeline.model import Case, LitGPT, LitSequential, cut_by_hand, loss_of
from lightning_cyclic import PipelineStrategy, make_plan
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.partial_step.collectives import rank_of
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig, Summarise
from lightning_cyclic.runtime.partial_step.session import StagewiseSession
from lightning_cyclic.runtime.predict import guesses
from lightning_cyclic.runtime.stages.cuts import choose_cuts
from lightning_cyclic.runtime.stages.survey import survey
from lightning_cyclic.runtime.transport.choice import link
from lightning_cyclic.runtime.transport.crew import Crew

WARM_UP = 2  # steps of every fit that are not timed
BY_THE_STEP = ("cyclic_pipeline", "pipedream_2bw", "cyclic_mp")
BY_THE_MICRO_BATCH = ("pipedream", "pipeoptim", "spectrain")  # update after each
TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zb_v": ScheduleZBVZeroBubble,
}
Figures: TypeAlias = dict[str, Any]
Contender: TypeAlias = Callable[[int], Figures]


class Stopwatch:
    """Measure from barrier to barrier.

    Args:
        alone: measure without barriers, which would empty a pipeline that has no flush.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._meet: Callable[[], object] = (lambda: None) if alone else _barrier
        self._meet()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self, num_steps: int, loss: Any = None) -> Figures:
        """Return seconds and CPU seconds per step, the last loss if any, and the GPU's peak."""
        self._meet()
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        loss = None if loss is None else float(loss)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
        return {"wall": wall / num_steps, "cpu": cpu / num_steps, "loss": loss, "peak": peak}


def _barrier() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _repeated(step: Callable[[], Any]) -> Contender:
    def contender(num_steps: int) -> Figures:
        watch, loss = Stopwatch(), None
        for _ in range(num_steps):
            loss = step()
        return watch.stop(num_steps, loss)

    return contender


# ---------------------------------------------------------------------- plain loops


def _plain(case: Case) -> Contender:
    """Accumulate the micro-batches of a step."""
    module, batch = LitGPT(case), case.batch()
    optimizer = module.configure_optimizers()

    def step() -> Any:
        total = torch.zeros((), device=case.device)
        for part in batch.split(case.rows):
            loss = module.training_step(part) / case.num_microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return _repeated(step)


def _session(case: Case, preset: str, module: Any, remat: str = "never") -> Contender:
    """Run the package's session of stages, without Lightning's loops."""
    batch, transport, assembly, worker = case.batch(), None, Assembly(), 0
    device = case.place
    if case.num_workers > 1:
        worker = rank_of(dist.get_rank(), case.num_workers)
        assembly = Assembly(Crew(600.0))
        transport = link("auto", device, assembly, lambda w: rank_of(w, case.num_workers))
    config = StagewiseConfig(
        make_plan=lambda stages, num_microbatches, tied, relayed: make_plan(
            preset, num_stages=stages, num_workers=case.num_workers,
            num_microbatches=num_microbatches,
            tied=tied, relayed=relayed,
        ),
        find_cuts=lambda m, step: choose_cuts(survey(m, step), module.stage_paths),
        num_microbatches=1 if preset in BY_THE_MICRO_BATCH else case.num_microbatches,
        replicas=1, remat=remat, seed=0, expected_stages=case.num_stages,
        apply=lambda t, j: optimizer.step(),
        guess=lambda parameters, v, updates: list(
            guesses(optimizer, parameters, updates, optimizer.param_groups, {})
        ),
    )  # fmt: skip
    session = StagewiseSession(
        module, config, transport, worker, case.num_workers, device, assembly
    )
    optimizer = module.configure_optimizers()  # of what others hold there are no gradients
    if preset in BY_THE_STEP + BY_THE_MICRO_BATCH:
        batches = batch.split(case.rows * config.num_microbatches)
        fills = -(-2 * case.num_stages // case.num_microbatches)
        return _flowing(session, module, batches, fills)

    def step() -> Any:
        session.find_stages(batch, module.training_step)
        session.train(batch, module.training_step, _summarise)
        optimizer.step()
        session.end_step()
        optimizer.zero_grad()
        ((_, summary),) = session.take_arrived()
        return summary.tensors[0]

    return _repeated(step)


def _flowing(
    session: StagewiseSession, module: Any, batches: Sequence[torch.Tensor], fills: int
) -> Contender:
    """Time steps in the middle of a run, neither filling the pipeline nor flushing it.

    A step trains all the batches: one, or where weights are updated after each micro-batch, as
    many as that has micro-batches. ``fills`` of them come before those that are timed.
    """

    def train(batch: torch.Tensor) -> None:
        session.find_stages(batch, module.training_step)
        session.train(batch, module.training_step, _summarise)
        session.take_arrived()

    def contender(num_steps: int) -> Figures:
        _barrier()
        for batch in [*batches] * fills:
            train(batch)
        watch = Stopwatch(alone=True)
        for batch in [*batches] * num_steps:
            train(batch)
        figures = watch.stop(num_steps)
        session.flush()
        return figures

    return contender


def _summarise(sizes: list[int]) -> Summarise:
    return lambda outcomes: Message([torch.stack([x.output for x in outcomes]).mean()])


def _torch_pipelining(case: Case, preset: str) -> Contender:
    """Run torch.distributed.pipelining as its tutorial does."""
    rank, last = dist.get_rank(), case.num_stages - 1
    parts, batch = cut_by_hand(case), case.batch()
    mine: Sequence[int] = range(rank, case.num_stages, case.num_workers)
    if preset == "zb_v":
        mine = (rank, last - rank)
    hidden, logits = (
        torch.zeros(
            case.rows, case.length, features, requires_grad=True, device=case.device,
            dtype=case.dtype,
        )
        for features in (case.width, case.vocabulary)
    )  # fmt: skip
    stages = [
        PipelineStage(
            parts[j], j, case.num_stages, case.place,
            input_args=(batch[: case.rows] if j == 0 else hidden,),
            output_args=(logits if j == last else hidden,),
        )
        for j in mine
    ]  # fmt: skip
    numbers: Any = {"n_microbatches": case.num_microbatches, "loss_fn": loss_of}
    has_one = preset in ("gpipe", "1f1b")
    schedule = TORCH_SCHEDULES[preset](stages[0] if has_one else list(stages), **numbers)
    optimizer = case.optimizer(nn.ModuleList(parts[j] for j in mine))

    def step() -> Any:
        losses: list[torch.Tensor] = []
        given = (batch,) if rank == 0 else ()
        schedule.step(*given, **({"target": batch, "losses": losses} if last in mine else {}))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else None

    return _repeated(step)


def _torchgpipe(case: Case) -> Contender:
    from torchgpipe import GPipe

    stages, batch = cut_by_hand(case), case.batch()
    model = GPipe(
        nn.Sequential(*(layer for stage in stages for layer in stage)),
        balance=[len(stage) for stage in stages], devices=["cpu"] * len(stages),
        chunks=case.num_microbatches, checkpoint="except_last",
    )  # fmt: skip
    optimizer = case.optimizer(model)

    def step() -> Any:
        loss = loss_of(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return _repeated(step)


# ---------------------------------------------------------------------- Lightning's Trainer


class _Clock(L.Callback):
    def __init__(self, batches_per_step: int) -> None:
        self._per_step = batches_per_step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, k: int) -> None:
        if k == WARM_UP * self._per_step:
            self._watch = Stopwatch()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        num_steps = trainer.num_training_batches // self._per_step - WARM_UP
        self.figures = self._watch.stop(num_steps)


def _trained(case: Case, preset: str) -> Contender:
    """Train with Lightning's Trainer, a new fit each time."""
    plain = preset == "plain"
    per_step = case.num_microbatches if plain else 1
    batches: Any = list(case.batch().split(case.rows)) if plain else [case.batch()]

    def contender(num_steps: int) -> Figures:
        clock, module = _Clock(per_step), LitGPT(case)
        trainer = L.Trainer(
            accelerator="cpu", devices=1, num_nodes=case.num_workers, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[clock], accumulate_grad_batches=per_step,
            strategy=SingleDeviceStrategy("cpu") if plain else PipelineStrategy(
                preset, stages=module.stage_paths, num_microbatches=case.num_microbatches
            ),
        )  # fmt: skip
        trainer.fit(module, DataLoader(batches * (num_steps + WARM_UP), batch_size=None))
        return clock.figures

    return contender


def make(name: str, case: Case) -> Contender:
    """Make a contender by its name: its executor, and a preset."""
    executor, _, preset = name.partition(" ")
    if executor == "trainer":
        return _trained(case, preset)
    if executor == "loop":
        return _plain(case) if preset == "plain" else _session(case, preset, LitGPT(case))
    if executor == "sequential":
        return _session(case, preset, LitSequential(case), remat="except_last")
    return _torchgpipe(case) if executor == "torchgpipe" else _torch_pipelining(case, preset)
