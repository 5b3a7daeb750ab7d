"""Ranks that share one GPU over NCCL, where that lets them: bits, precisions, failures.

On the CPU the same rows run over gloo, by the transport of NCCL: a group of two for each channel.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic.cli import trial as trials
from lightning_cyclic.cli.selftest import presets_of
from lightning_cyclic.cli.trial import Came, Trial
from lightning_cyclic.plan import PRESETS
from lightning_cyclic.registration import make_strategy
from lightning_cyclic.runtime.transport.shared_gpus import loaded_nccl
from tests.harness import processes
from tests.harness.rows import more
from tests.harness.trainers import make_trainer
from tests.harness.troubles import (
    assert_death_is_told,
    assert_lack_of_memory_is_told,
    assert_silence_is_told,
    die,
    errors_of,
    fit,
    freeze,
    rank_of,
    run_out_of_memory,
)
from tests.training.test_gpu import tried

MISSING = loaded_nccl().missing
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(MISSING), reason=f"ranks may not share a GPU: {MISSING}"),
    pytest.mark.timeout(240),
]
LIMITS = {"time_limit_s": 200, "after_failure_s": 30}  # of ranks that start on a GPU
FOUR = ["1f1b", "interleaved_1f1b", "cyclic_dp", "cyclic_zero"]
PRECISIONS = ["bf16-true", "bf16-mixed", "16-mixed"]

pytestmark = pytest.mark.multi


def rows(names: str, given: Iterable[tuple[Any, ...]], always: Iterable[tuple[Any, ...]]) -> Any:
    """Return rows for both devices; on the CPU some of them run exhaustively alone."""
    given, always = list(given), list(always)
    assert set(always) <= set(given)
    on_cpu = [(*row, "cpu") if row in always else more(*row, "cpu") for row in given]
    on_gpu = [pytest.param(*row, "cuda", marks=ON_GPU) for row in given]
    return pytest.mark.parametrize(f"{names}, device", [*on_cpu, *on_gpu])


def trial(preset: str, num_workers: int, size: int, device: str, **more: Any) -> Trial:
    """Return one of as many workers, which share a device, of a plan for so many."""
    on_gpu = device == "cuda"
    talks = {"backend": "nccl" if on_gpu else "gloo", "route": "edges"} if num_workers > 1 else {}
    return Trial(
        preset=preset, num_workers=num_workers, size=size,
        is_cut=PRESETS[preset].placement != "replicated",
        accelerator="gpu" if on_gpu else "cpu", devices=(0,) * num_workers if on_gpu else (),
        **talks, **more,
    )  # fmt: skip


def assert_bits_of_one(
    preset: str, num_workers: int, device: str, folder: Path, tried: Any = tried, **more: Any
) -> None:
    one, many = (trial(preset, n, num_workers, device, **more) for n in (1, num_workers))
    (expected,) = processes.run(tried, 1, one, str(folder / "one"), **LIMITS)
    for came in processes.run(tried, num_workers, many, str(folder / "many"), **LIMITS):
        assert came == expected._replace(route="edges")


@rows(
    "preset, num_workers",
    product(presets_of([]), [2, 4]),
    [("interleaved_1f1b", 2), ("cyclic_zero", 4)],
)
def test_every_preset_has_the_bits_of_one_process(
    preset: str, num_workers: int, device: str, tmp_path: Path
) -> None:
    assert_bits_of_one(preset, num_workers, device, tmp_path)


@rows("preset, precision", product(FOUR, PRECISIONS), [("cyclic_dp", "bf16-true")])
def test_precisions_have_the_bits_of_one_process(
    preset: str, precision: Any, device: str, tmp_path: Path
) -> None:
    assert_bits_of_one(preset, 2, device, tmp_path, precision=precision)


def tried_compiled(given: Trial, folder: str) -> Came:
    """Train a module of compiled blocks: by inductor on a GPU, which takes a minute on a CPU."""
    plain = trials._Module
    backend = "inductor" if given.accelerator == "gpu" else "aot_eager"

    def compiled(*args: Any, **options: Any) -> nn.Module:
        module = plain(*args, **options)
        for block in module.blocks:
            block.compile(backend=backend)
        return module

    trials._Module = compiled  # type: ignore[misc, assignment]  # in this process, which ends
    return tried(given, folder)


@rows("preset", [(preset,) for preset in FOUR], [])
def test_compiled_blocks_have_the_bits_of_one_process(
    preset: str, device: str, tmp_path: Path
) -> None:
    assert_bits_of_one(preset, 2, device, tmp_path, tried_compiled)


def tried_in_float8(given: Trial, folder: str) -> Came:
    """Train with matrix products in float8, as torchao has them."""
    float8 = pytest.importorskip("torchao.float8")
    plain = trials._Module

    def converted(*args: Any, **options: Any) -> nn.Module:
        module = plain(*args, **options)
        float8.convert_to_float8_training(module.blocks)
        return module

    trials._Module = converted  # type: ignore[misc, assignment]  # in this process, which ends
    return tried(given, folder)


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=f"ranks may not share a GPU: {MISSING}")
@pytest.mark.parametrize("preset", FOUR)
def test_products_in_float8_have_the_bits_of_one_process(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao.float8")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    more = {"precision": "bf16-true"}
    assert_bits_of_one(preset, 2, "cuda", tmp_path, tried_in_float8, **more)


# ---------------------------------------------------------------------- the host is ahead

LAYER_S = 0.02
CYCLES = 40_000_000  # that a GPU sleeps in a layer: 20 ms or more at 2 GHz or less


class Sleeping(nn.Module):
    """Keep the GPU busy, and not the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(CYCLES)
        return torch.tanh(self.layer(x))


class Tower(LightningModule):
    """Have four such layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Sleeping() for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Ahead(Callback):
    """Measure how long the GPU is busy behind the last launch of a step; refuse that it waits."""

    def __init__(self) -> None:
        self.ahead_s: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, k: int) -> None:
        if 3 < k < trainer.num_training_batches - 1:  # the first steps look around
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, k: int
    ) -> None:
        if torch.cuda.get_sync_debug_mode() == 0:
            return
        torch.cuda.set_sync_debug_mode("default")
        launched_s = time.perf_counter()
        torch.cuda.synchronize()
        self.ahead_s.append(time.perf_counter() - launched_s)


def ahead(preset: str) -> list[float]:
    is_cut = PRESETS[preset].placement != "replicated"
    options = {"num_microbatches": 4} if is_cut else {}
    strategy = make_strategy(preset, stages=2, process_group_backend="nccl", **options)
    measured = Ahead()
    trainer = make_trainer(
        strategy, max_epochs=1, accelerator="gpu", devices=[0], callbacks=[measured]
    )
    trainer.fit(Tower(), DataLoader(list(torch.randn(10, 8, 16)), batch_size=None))
    return measured.ahead_s


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=f"ranks may not share a GPU: {MISSING}")
@pytest.mark.parametrize("preset", ["1f1b", "cyclic_pipeline", "cyclic_dp", "cyclic_zero"])
def test_the_host_has_launched_a_step_before_the_gpu_has_done_it(preset: str) -> None:
    for ahead_s in processes.run(ahead, 2, preset, **LIMITS):
        assert len(ahead_s) == 5
        assert min(ahead_s) > LAYER_S  # a stage has two layers, of which one is a run at least


@pytest.mark.gpu
@pytest.mark.skipif(not MISSING, reason="ranks may share a GPU here")
def test_workers_that_may_not_share_a_gpu_are_told_what_to_do(tmp_path: Path) -> None:
    given = trial("1f1b", 2, 2, "cuda")
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(tried, 2, given, str(tmp_path), **LIMITS)
    for text in caught.value.errors.values():
        assert "ConfigurationError" in text
        assert MISSING in text
        assert 'use process_group_backend="gloo"' in text


# ---------------------------------------------------------------------- failures

TROUBLED = rows(
    "num_ranks, culprit, preset", [(4, 2, "cyclic_dp"), (2, 0, "1f1b"), (4, 3, "1f1b")], []
)


def troubled(trouble: Any, num_ranks: int, culprit: int, preset: str, device: str, *args: Any,
             **limits: Any) -> dict[int, str]:  # fmt: skip
    run = partial(fit, route="edges", on_gpu=device == "cuda")
    limits |= LIMITS if device == "cuda" else {}
    return errors_of(run, num_ranks, trouble, culprit, preset, *args, **limits)


@TROUBLED
def test_a_worker_that_dies_is_named(
    num_ranks: int, culprit: int, preset: str, device: str
) -> None:
    errors = troubled(die, num_ranks, culprit, preset, device)
    assert_death_is_told(errors, num_ranks, culprit, preset)


@TROUBLED
def test_a_worker_that_is_silent_is_named_within_the_limit(
    num_ranks: int, culprit: int, preset: str, device: str
) -> None:
    limit_s = 10.0 if device == "cuda" else 3.0  # within which its ranks start, too
    frozen = {rank_of(culprit, preset, num_ranks)}
    errors = troubled(freeze, num_ranks, culprit, preset, device, limit_s, frozen=frozen)
    assert_silence_is_told(errors, num_ranks, culprit, preset)


@TROUBLED
def test_a_worker_that_runs_out_of_memory_is_named(
    num_ranks: int, culprit: int, preset: str, device: str
) -> None:
    errors = troubled(run_out_of_memory, num_ranks, culprit, preset, device)
    whose = "device" if device == "cuda" else "host"
    assert_lack_of_memory_is_told(errors, num_ranks, culprit, preset, whose)
