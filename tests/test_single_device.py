"""One device runs the cyclic timetable of several micro-batches: same bits, less memory."""

from __future__ import annotations

import random
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.dataflow import live_activations
from tests.harness import processes
from tests.harness.rows import in_turn
from tests.harness.trainers import assert_same, fit, make_trainer, outcome, train_data, weights_of
from tests.modules.classifier import Batch, Classifier, MicroBatches, Resumable
from tests.references.replicated import Reference

NUM_MICRO = 4
NUM_STEPS = 9
RULES = {"cyclic_dp": "freshest", "cyclic_dp_v1": "delayed", "lockstep_dp": "sync"}


class Joined(Dataset[Batch]):
    """The micro-batches of each step as one batch."""

    def __init__(
        self, kind: str, num_steps: int = NUM_STEPS, num_microbatches: int = NUM_MICRO
    ) -> None:
        self._micro = MicroBatches(kind, num_steps * num_microbatches)
        self._num_steps, self._num_micro = num_steps, num_microbatches

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, t: int) -> Batch:
        parts = [self._micro[t * self._num_micro + i] for i in range(self._num_micro)]
        x, y = zip(*parts, strict=True)
        return torch.cat(x), torch.cat(y)


def loader(module: Classifier, **numbers: int) -> DataLoader[Any]:
    return DataLoader(Joined(module.kind, **numbers), batch_size=None)


def fit_single(preset: str, net: str, optimizer: str, **more: Any) -> dict[str, Any]:
    module = Classifier(net, optimizer)
    strategy = {"preset": preset, "num_microbatches": NUM_MICRO} | more
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(module, loader(module))
    assert trainer.strategy.plan.placement == "single"
    return outcome(trainer, module)


@pytest.mark.parametrize(
    ("net", "optimizer", "preset"),
    in_turn(
        [("mlp", "sgd"), ("batchnorm_mlp", "adamw"), ("resnet", "sgd"), ("gpt2", "adamw")],
        list(RULES),
    ),
)
def test_one_device_equals_the_sequential_rule(preset: str, net: str, optimizer: str) -> None:
    (single,) = processes.run(fit_single, 1, preset, net, optimizer)
    assert max(single["stage_of"].values()) == NUM_MICRO - 1
    reference = Reference(rule=RULES[preset], n=NUM_MICRO, num_batches=NUM_STEPS)
    reference.run(Classifier(net, optimizer), single["stage_of"])
    assert_same(single["weights"], reference.weights)
    assert single["global_step"] == NUM_STEPS


def test_rematerialisation_reads_the_same_versions() -> None:
    (single,) = processes.run(fit_remat, 1)
    reference = Reference(rule="freshest", n=NUM_MICRO, num_batches=NUM_STEPS)
    reference.run(Classifier("resnet", "sgd"), single["stage_of"])
    assert_same(single["weights"], reference.weights)


def fit_remat() -> dict[str, Any]:
    again = {"activation_checkpointing": "always", "placement": "single"}
    return fit_single("cyclic_pipeline", "resnet", "sgd", **again)


class Backwards(nn.Module):
    """Uses its parameters in another order than it registers them, as torch's Transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.c, self.b, self.a = (nn.Linear(12, n) for n in (3, 12, 12, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


class Clipped(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Backwards()


def fit_clipped(strategy: dict[str, Any]) -> dict[str, Tensor]:
    module, n = Clipped(), processes.here().num_ranks
    data = loader(module, num_microbatches=2) if n == 1 else train_data(module, NUM_STEPS)
    trainer = make_trainer(strategy, max_epochs=1, gradient_clip_val=0.01)
    trainer.fit(module, data)
    return weights_of(module)


def test_stages_are_clipped_by_the_same_norms_on_one_device_and_in_many_processes() -> None:
    strategy = {"preset": "cyclic_dp", "stages": ["net.c"], "clip_norm": "stage"}
    (one,) = processes.run(fit_clipped, 1, strategy | {"num_microbatches": 2})
    for weights in processes.run(fit_clipped, 2, strategy):
        assert_same(weights, one)


# ---------------------------------------------------------------------- randomness


class Block(nn.Module):
    """Draws inside a module with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.linear(x)) + 0.1 * torch.randn(12))


class Drawing(nn.Module):
    """Draws in modules and between them: from activations, from the batch, from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.drops = nn.ModuleList(nn.Dropout(0.2) for _ in range(4))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x + 0.1 * torch.randn_like(x)
        for block, drop in zip(self.blocks, self.drops, strict=True):
            h = drop(block(h)) + F.dropout(x, 0.5)
            h = h * (1 + 0.1 * random.random() + 0.1 * np.random.rand()) + torch.rand(1)
        return self.head(F.dropout(h, 0.1))


class Random(Classifier):
    """Draws in training_step, too; its sampler of data and it have the same seed anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Drawing()

    def loss(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return super().loss((x + 0.1 * torch.rand_like(x), y), batch_idx) * (1 + random.random())


STAGES = {2: ["net.blocks.2"], 4: ["net.blocks.1", "net.blocks.2", "net.drops.2"]}


def seeded(seed: int) -> Random:
    module = Random()
    torch.manual_seed(seed)
    return module


def fit_apart(preset: str, n: int, seed: int) -> dict[str, Any]:
    strategy = {"preset": preset, "stages": STAGES[n]}
    return fit(partial(seeded, seed), strategy, NUM_STEPS, {})


def fit_together(preset: str, n: int, seed: int) -> dict[str, Any]:
    module = seeded(seed)
    trainer = make_trainer(
        {"preset": preset, "num_microbatches": n, "stages": STAGES[n]}, max_epochs=1
    )
    trainer.fit(module, loader(module, num_microbatches=n))
    return outcome(trainer, module)


@pytest.mark.multi
@pytest.mark.parametrize(("preset", "n"), [*((preset, 2) for preset in RULES)])
def test_what_is_drawn_is_the_same_on_one_device_and_in_many_processes(
    preset: str, n: int
) -> None:
    (single,) = processes.run(fit_together, 1, preset, n, 7)
    ranks = processes.run(fit_apart, n, preset, n, 7)
    for i, rank in enumerate(ranks):
        assert rank["stage_of"] == single["stage_of"]
        assert rank["losses"] == single["losses"][i::n]
        assert_same(rank["weights"], single["weights"], f"worker {i}")


# ---------------------------------------------------------------------- checkpoints


class SaveAtFive(Callback):
    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self._path)


def fit_to_five(path: str) -> None:
    """Train to step 5, save, and go on to the end."""
    module = Classifier("mlp", "adamw")
    strategy = {"preset": "cyclic_dp", "num_microbatches": NUM_MICRO}
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[SaveAtFive(path)])
    trainer.fit(module, Resumable(Joined(module.kind), batch_size=None))


def fit_rest(path: str) -> dict[str, Any]:
    """Go on behind step 5 with the stages of the checkpoint."""
    module = Classifier("mlp", "adamw")
    trainer = make_trainer({"preset": "cyclic_dp", "num_microbatches": NUM_MICRO}, max_epochs=1)
    trainer.fit(module, Resumable(Joined(module.kind), batch_size=None), ckpt_path=path)
    assert len(module.losses) == NUM_MICRO * (NUM_STEPS - 5)
    return outcome(trainer, module)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Any) -> None:
    path = str(tmp_path / "five.ckpt")
    processes.run(fit_to_five, 1, path)
    saved = torch.load(path, weights_only=False)["lightning_cyclic"]
    assert saved["t"] == 5
    assert saved["previous"]
    (whole,) = processes.run(fit_single, 1, "cyclic_dp", "mlp", "adamw")
    (rest,) = processes.run(fit_rest, 1, path)
    assert_same(rest["weights"], whole["weights"])


class Uniform(Classifier):
    """Count the bytes that autograd keeps for backwards, and their peak."""

    def __init__(self, num_layers: int) -> None:
        super().__init__("mlp", "sgd")
        layers: list[nn.Module] = []
        for _ in range(num_layers):
            layers += [nn.Linear(12, 12), nn.Tanh()]
        self.net = nn.Sequential(*layers)
        self.meter = Meter()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            return self.net(batch[0]).square().mean()

    def _keep(self, x: Tensor) -> Kept:
        if x.shape[0] != 7:  # weights; activations have a row per sample
            return Kept(x)
        kept = Kept(x)
        self.meter.add(x.nbytes)
        weakref.finalize(kept, self.meter.drop, x.nbytes)
        return kept


class Meter:
    """Count bytes that come and go, also behind the step: no state of the module."""

    alive = peak = 0

    def add(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def drop(self, size: int) -> None:
        self.alive -= size


class Kept:
    """Stand for a tensor that autograd keeps."""

    def __init__(self, x: Tensor) -> None:
        self.tensor = x


def peak_of(preset: str, num_microbatches: int) -> int:
    module = Uniform(2 * num_microbatches)
    stages = [f"net.{4 * j}" for j in range(1, num_microbatches)]
    strategy = {
        "preset": preset,
        "num_microbatches": num_microbatches,
        "stages": stages,
        "verify": False,
    }
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(module, loader(module, num_steps=4, num_microbatches=num_microbatches))
    assert module.meter.alive == 0
    return module.meter.peak


@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_activation_memory_is_that_of_the_timetable(num_microbatches: int) -> None:
    (cyclic,) = processes.run(peak_of, 1, "cyclic_dp", num_microbatches)
    (at_once,) = processes.run(peak_of, 1, "gpipe", num_microbatches)
    given = cyclic / at_once
    assert given <= 1.05 * (num_microbatches + 1) / (
        2 * num_microbatches
    )  # with slots of equal length
    # one device runs the actions of a slot one after another, and so frees some earlier
    plan = make_plan(
        "cyclic_dp",
        placement="single",
        num_stages=num_microbatches,
        num_workers=1,
        num_microbatches=num_microbatches,
    )
    alive = live_activations(plan.programs[0])
    assert given == pytest.approx(alive / num_microbatches**2, rel=0.05)


def fit_ragged() -> None:
    module = Classifier("mlp", "sgd")
    trainer = make_trainer({"preset": "cyclic_dp", "num_microbatches": 4}, max_epochs=1)
    batches = [(torch.zeros(n, 12), torch.zeros(n, dtype=torch.long)) for n in (8, 3)]
    trainer.fit(module, DataLoader(batches, batch_size=None))


def test_fewer_samples_than_micro_batches_are_refused() -> None:
    with pytest.raises(
        processes.RanksFailedError, match="gave 3 micro-batches, but num_microbatches=4"
    ):
        processes.run(fit_ragged, 1)
