"""Part "trace": where the time of a step goes, on the host and on the GPU, and who waits."""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.fits import WARM_UP, case_of, clear, fit, meet
from benchmarks.gpu.ranks import Place, Say, run
from benchmarks.gpu.shared import backend, missing_nccl
from benchmarks.pipeline.model import Case
from lightning_cyclic.registration import make_strategy

_ROWS = 12
_WAITED = "called a synchronizing CUDA operation"


def trace(args: argparse.Namespace, until: float) -> Iterator[str]:
    """Write a trace of a step of two ranks, and say by what 1f1b differs from accumulation."""
    yield from run(_differences, 1, args.device, until, args)
    yield from run(_two_ranks, 2, args.device, until, args)


class Step(NamedTuple):
    """Hold what one step has taken.

    Args:
        host_us: of each operator or range, by itself, in microseconds.
        gpu_us: of each kernel.
        waits: how often the host waited for the GPU; None where there is none.
    """

    host_us: Counter[str]
    gpu_us: Counter[str]
    waits: int | None


class Watch(L.Callback):
    """Profile the update behind the warm-up, and count in the next where the host waits."""

    def __init__(self, batches_per_update: int, path: Path | None = None) -> None:
        self._per_update, self._path = batches_per_update, path
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]
            if torch.cuda.is_available() else [ProfilerActivity.CPU],
        )  # fmt: skip
        self._caught = warnings.catch_warnings(record=True)
        self._waits: int | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, k: int) -> None:
        update, first = divmod(k, self._per_update)
        if first == 0 and update == WARM_UP:
            meet()
            self._profiler.start()
        if first == 0 and update == WARM_UP + 1 and torch.cuda.is_initialized():
            self._warned = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, k: int
    ) -> None:
        update, last = divmod(k + 1, self._per_update)
        if last == 0 and update == WARM_UP + 1:
            meet()
            self._profiler.stop()
        if last == 0 and update == WARM_UP + 2 and torch.cuda.is_initialized():
            torch.cuda.set_sync_debug_mode("default")
            self._waits = sum(_WAITED in str(each.message) for each in self._warned or ())
            self._caught.__exit__(None, None, None)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self._path is not None:
            self._profiler.export_chrome_trace(str(self._path))

    @property
    def step(self) -> Step:
        host, gpu = Counter[str](), Counter[str]()
        for event in self._profiler.key_averages():
            key = re.sub(r"\b\d+\b", "N", event.key)  # one row for all runs of all stages
            if event.device_type.name != "CUDA":
                host[key] += event.self_cpu_time_total
            elif not event.is_user_annotation:  # ranges, whose kernels have rows of their own
                gpu[key] += event.self_device_time_total
        return Step(host, gpu, self._waits)


def _differences(place: Place, say: Say, args: argparse.Namespace) -> None:
    case, m = case_of(args, num_steps=2), args.micro
    found = {}
    for name in ("accumulate", "1f1b"):
        watch = Watch(m if name == "accumulate" else 1)
        if name == "accumulate":
            fit(case, place, "auto", accumulate=m, rows=case.rows, callbacks=[watch])
        else:
            strategy = make_strategy("1f1b", num_microbatches=m, stages=m)
            fit(case, place, strategy, callbacks=[watch])
        found[name] = watch.step
        clear()
    say("\n".join(differences(found["accumulate"], found["1f1b"])))


def differences(before: Step, after: Step) -> list[str]:
    """Return what differs most, in milliseconds of a step: GPU and host are told apart."""
    lines = [
        f"  {name}: {sum(step.gpu_us.values()) / 1e3:.1f} ms of kernels, "
        f"{sum(step.host_us.values()) / 1e3:.1f} ms of the host, which waits for the GPU "
        f"{'?' if step.waits is None else step.waits} times in a step"
        for name, step in (("accumulate", before), ("1f1b", after))
    ]
    rows = [
        (after_us[key] - before_us[key], where, key, before_us[key], after_us[key])
        for where, before_us, after_us in (
            ("GPU", before.gpu_us, after.gpu_us), ("host", before.host_us, after.host_us),
        )
        for key in {*before_us, *after_us}
    ]  # fmt: skip
    rows.sort(key=lambda row: (-abs(row[0]), row[2]))
    lines.append(f"  {'ms more':>9} {'':5}{'accumulate':>11}{'1f1b':>9}")
    lines += [
        f"  {more / 1e3:+9.2f} {where:5}{a / 1e3:11.2f}{b / 1e3:9.2f}  {key[:70]}"
        for more, where, key, a, b in rows[:_ROWS]
    ]
    return lines


def _two_ranks(place: Place, say: Say, args: argparse.Namespace) -> None:
    case: Case = case_of(args, num_steps=2)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trace-rank{place.rank}.json.gz"
    watch = Watch(1, path)
    talks = "gloo" if missing_nccl(args.device) else backend(args.device)
    strategy = partial(make_strategy, "1f1b", num_microbatches=args.micro, stages=2)
    fit(case, place, strategy(process_group_backend=talks), callbacks=[watch])
    waits = watch.step.waits
    say(f"  rank {place.rank}, over {talks}: {path} ({path.stat().st_size >> 10} KiB, for "
        f"ui.perfetto.dev); the host waits for the GPU {'?' if waits is None else waits} times "
        "in a step")  # fmt: skip
