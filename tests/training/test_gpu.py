"""What only a GPU can show; each test runs on the CPU, too, as far as that goes.

One GPU is enough here. Ranks that share it over NCCL are in `test_nccl.py`.
"""

from __future__ import annotations

import copy
import os
import random
import time
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_cyclic import CyclicStrategy
from lightning_cyclic.cli.trial import Came, Trial, train
from lightning_cyclic.plan import PRESETS, make_plan
from lightning_cyclic.plugin.precision.sparse_state import SparseStatePrecision
from lightning_cyclic.registration import make_strategy
from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.transport import HostStagedTransport
from tests.harness import processes
from tests.harness.local_transport import LocalTransport, PostOffice
from tests.harness.processes import here
from tests.harness.rows import more
from tests.harness.trainers import assert_same
from tests.references import pruned
from tests.runtime.partial_step.crews import Crew, compare

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])


def devices(names: str, rows: Iterable[Any], always: Collection[Any]) -> Any:
    """Return rows with each device; on the CPU some of them run exhaustively alone."""
    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    return pytest.mark.parametrize(
        f"{names}, device",
        [
            *((*row, "cpu") if row[0] in always else more(*row, "cpu") for row in rows),
            *(pytest.param(*row, "cuda", marks=pytest.mark.gpu) for row in rows),
        ],
    )


# ---------------------------------------------------------------------- the same bits


def trial(preset: str, device: str, num_workers: int = 1, **more: Any) -> Trial:
    on_gpu = device == "cuda"
    return Trial(
        preset=preset, num_workers=num_workers, size=2,
        is_cut=PRESETS[preset].placement != "replicated",
        accelerator="gpu" if on_gpu else "cpu", devices=(0,) * num_workers if on_gpu else (),
        **more,
    )  # fmt: skip


def tried(given: Trial, folder: str) -> Came:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    warnings.simplefilter("ignore")  # what torch says of determinism is no matter here
    return train(given, here().rank, folder)


@pytest.mark.multi
@devices("preset", ["gpipe", "1f1b", "lockstep_dp"], ["1f1b"])
def test_one_device_has_the_bits_of_lightning_alone(
    preset: str, device: str, tmp_path: Path
) -> None:
    mine = trial(preset, device)
    alone = Trial(**{**vars(mine), "preset": ""})
    (given,), (expected,) = (
        processes.run(tried, 1, x, str(tmp_path / x.preset)) for x in (mine, alone)
    )
    assert given == expected


@pytest.mark.multi
@devices(
    "preset", ["cyclic_dp", "cyclic_dp_v1", "1f1b", "cyclic_pipeline"],
    ["cyclic_dp", "cyclic_pipeline"],
)  # fmt: skip
def test_workers_that_share_a_device_have_the_bits_of_one(
    preset: str, device: str, tmp_path: Path
) -> None:
    (one,) = processes.run(tried, 1, trial(preset, device), str(tmp_path / "one"))
    shared = {"backend": "gloo"} if device == "cuda" else {"route": "host_staged"}
    both = processes.run(tried, 2, trial(preset, device, 2, **shared), str(tmp_path / "two"))
    for came in both:
        assert came == one._replace(route="host_staged")


@pytest.mark.multi
@devices(
    "precision, preset", product(["16-mixed", "bf16-mixed"], ["cyclic_zero", "pipedream_2bw"]),
    ["16-mixed"],
)  # fmt: skip
def test_mixed_precision_of_workers_that_share_a_device(
    preset: str, precision: Any, device: str, tmp_path: Path
) -> None:
    one, two = trial(preset, device), trial(preset, device, 2, backend="gloo")
    (expected,), *both = (
        processes.run(tried, x.num_workers, replace(x, precision=precision), str(tmp_path))
        for x in (one, two)
    )
    for came in both[0]:
        assert came.weights == expected.weights
        assert came.steps == expected.steps


def pruned_and_dense(device: str, compute: Any) -> list[Any]:
    """Return weights that are trained with masks: kept compressed, and dense."""
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    given, module = pruned.batches(10), pruned.Regression(pruned.mlp())
    masks = pruned.random_masks(module)  # on the host, where masks are mostly made
    there = {name: mask.to(device) for name, mask in masks.items()}
    dense = copy.deepcopy(module).to(device)
    moved = [batch.to(device) for batch in given]
    expected, _ = pruned.dense_run(dense, there, pruned.DTYPES[compute], moved)
    trainer = pruned.trainer(
        SparseStatePrecision(mask=masks, compute=compute),
        accelerator="gpu" if device == "cuda" else "cpu",
        strategy=CyclicStrategy("lockstep_dp", num_microbatches=1, stages=2),
        use_distributed_sampler=False,  # which shuffles
    )
    trainer.fit(module, pruned.loader(given))
    found = {name: p.detach() for name, p in module.named_parameters()}
    return [{name: x.cpu() for name, x in each.items()} for each in (found, expected)]


@pytest.mark.multi
@DEVICES
@pytest.mark.parametrize("compute", pruned.DTYPES)
def test_states_of_pruned_networks_on_a_device(compute: str, device: str) -> None:
    ((found, expected),) = processes.run(pruned_and_dense, 1, device, compute)
    assert_same(found, expected)


# ---------------------------------------------------------------------- the host goes on


class Net(nn.Module):
    """Eight layers, whose stages take as long as a random number says."""

    def __init__(self, delays: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self._random = random.Random(0) if delays else None

    def step(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self._random is not None:
                delay(x.device, self._random.random())
            x = torch.tanh(layer(x))
        return x.square().mean()


def delay(device: torch.device, share: float) -> None:
    """Let a device do nothing for some of the time."""
    if device.type == "cuda":
        torch.cuda._sleep(int(share * 2e6))  # a millisecond at most
    else:
        time.sleep(share * 1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


class Audit(TorchDispatchMode):
    """Refuse what would make the host wait for a GPU, where there is none."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.WAITS, func
        return func(*args, **(kwargs or {}))


@contextmanager
def _as_errors() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def no_waiting(device: str) -> AbstractContextManager[Any]:
    return _as_errors() if device == "cuda" else Audit()


@DEVICES
def test_the_host_waits_for_nothing_in_a_step(device: str) -> None:
    plan = make_plan("cyclic_pipeline", num_stages=4, num_workers=1, num_microbatches=4)
    crew = Crew(plan, Net, sgd, device=device)
    (session,) = crew.sessions
    session.begin(crew.cuts)
    inputs = torch.randn(12, 6).to(device)
    for t in range(4):  # the first write down what is read and what is sent
        crew.step(0, t)
    with no_waiting(device):
        session.train(inputs, crew.models[0].step, lambda sizes: said)
    assert session.t == 5


def said(outcomes: Any) -> Message:
    return Message([outcomes[0].output.detach()])


def test_the_audit_sees_a_host_that_waits() -> None:
    for wait in (float, bool, Tensor.item):
        with pytest.raises(AssertionError, match="_local_scalar_dense"), Audit():
            wait(torch.ones(()))


@devices("preset", ["pipedream_2bw", "cyclic_pipeline"], ["cyclic_pipeline"])
def test_workers_with_streams_of_their_own_have_the_bits_of_one(device: str, preset: str) -> None:
    def staged(office: PostOffice, worker: int, num_workers: int) -> HostStagedTransport:
        return HostStagedTransport(LocalTransport(office, worker, num_workers, 30.0))

    numbers = {"num_stages": 4, "num_microbatches": 4}
    one = Crew(make_plan(preset, num_workers=1, **numbers), Net, sgd, device=device)
    one.train()
    four = Crew(
        make_plan(preset, num_workers=4, **numbers), lambda: Net(delays=True), sgd,
        device=device, join=staged,
    )  # fmt: skip
    four.train(flush_after=(3,))
    compare(four.sessions, one.models[0])
    assert four.losses[-1] == one.losses[0]


# ---------------------------------------------------------------------- memory


class Tall(LightningModule):
    """Layers whose activations take far more than their parameters."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers)]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Peak(Callback):
    """Measure the most bytes that steps have taken beyond what lies between them."""

    most = alive = _before = 0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if on_gpu(trainer):
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        self._counting = saved_tensors_hooks(self._keep, lambda kept: kept.tensor)
        self._counting.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if not on_gpu(trainer):
            self._counting.__exit__(None, None, None)
        elif trainer.global_step > 2:  # the first step looks for the stages
            self.most = max(self.most, torch.cuda.max_memory_allocated() - self._before)

    def _keep(self, x: Tensor) -> Kept:
        kept = Kept(x)
        if not isinstance(x, nn.Parameter) and x.dim() == 2 and x.shape[0] > x.shape[1]:
            self.alive += x.nbytes
            self.most = max(self.most, self.alive)
            weakref.finalize(kept, self._drop, x.nbytes)
        return kept

    def _drop(self, num_bytes: int) -> None:
        self.alive -= num_bytes


class Kept:
    """Stand for a tensor that autograd keeps."""

    def __init__(self, x: Tensor) -> None:
        self.tensor = x


def on_gpu(trainer: Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda"


def peak_of(preset: str, device: str, num_microbatches: int) -> int:
    warnings.simplefilter("ignore")
    width, rows = (512, 4096) if device == "cuda" else (8, 16)
    stages = [f"net.{8 * j}" for j in range(1, num_microbatches)]
    peak = Peak()
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, precision="bf16-true",
        strategy=make_strategy(preset, num_microbatches=num_microbatches, stages=stages),
        max_epochs=1,
        callbacks=[peak], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = torch.randn(5, num_microbatches * rows, width, dtype=torch.bfloat16)
    trainer.fit(Tall(8 * num_microbatches, width), DataLoader(list(data), batch_size=None))
    return peak.most


@pytest.mark.multi
@devices("num_microbatches", [2, 4], [4])
def test_cyclic_activations_on_one_device(device: str, num_microbatches: int) -> None:
    (cyclic,) = processes.run(peak_of, 1, "cyclic_dp", device, num_microbatches)
    (at_once,) = processes.run(peak_of, 1, "gpipe", device, num_microbatches)
    assert 0 < cyclic <= 1.1 * (num_microbatches + 1) / (2 * num_microbatches) * at_once


# ---------------------------------------------------------------------- state beside the device


class ByAdam(Tall):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def with_limit(device: str, limit_bytes: int | None, folder: str) -> dict[str, Any]:
    """Train on this rank; return weights and state, all on the host, and what has moved."""
    options: dict[str, Any] = {"memory_limit_bytes": limit_bytes, "stages": 4}
    options |= {"disk": folder} if device == "cpu" else {}
    strategy = "auto" if limit_bytes is None else CyclicStrategy("lockstep_dp", **options)
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_epochs=1,
        strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    torch.manual_seed(0)
    module = ByAdam(8, 64)
    g = torch.Generator().manual_seed(1)
    trainer.fit(module, DataLoader([torch.randn(8, 64, generator=g) for _ in range(4)], None))
    tiers = getattr(getattr(trainer.strategy, "plan", None), "tiers", None)
    state = trainer.optimizers[0].state
    return {
        "weights": {n: x.detach().cpu() for n, x in module.named_parameters()},
        "state": {
            f"{n}.{k}": x.detach().cpu().clone()
            for n, p in module.named_parameters() for k, x in state[p].items()
        },
        "moved": 0 if tiers is None else sum(tiers.moved),
    }  # fmt: skip


@pytest.mark.multi
@DEVICES
def test_optimizer_state_beside_the_device_has_the_bits_of_state_on_it(
    device: str, tmp_path: Path
) -> None:
    (plain,), (apart,) = (
        processes.run(with_limit, 1, device, limit, str(tmp_path)) for limit in (None, 450_000)
    )
    assert apart["moved"] > 0
    assert_same(apart["weights"], plain["weights"])
    assert_same(apart["state"], plain["state"])
