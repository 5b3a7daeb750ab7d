"""cyclic_zero: the bits of cyclic_dp, by workers that hold what they use and no more."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.buffers import Layout
from tests.conformance.harness import Batches
from tests.conformance.modules import LowRankLayers, Plain, vectors
from tests.harness import processes
from tests.harness.trainers import assert_same, make_trainer, train_data, valid_data, weights_of
from tests.modules.classifier import Classifier

pytestmark = pytest.mark.multi
NUM_BATCHES, NUM_EPOCHS = 4, 2


def is_here(p: Tensor) -> bool:
    return p.untyped_storage().nbytes() >= p.numel() * p.element_size()


class Watch(Callback):
    """Note, wherever a module begins, and its backward, which stages' parameters are here."""

    def __init__(self) -> None:
        self.most = 0
        self.sent: list[Counter[Payload]] = []  # messages and elements sent so far, by step
        self.bytes: list[Counter[Payload]] = []
        self.held: list[int] = []  # of how many stages there are gradients
        self.state_of: set[int] = set()  # stages for which there is optimizer state

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        for m in pl_module.modules():
            if next(m.parameters(recurse=False), None) is not None:
                m.register_forward_pre_hook(lambda *_: self.look(trainer, pl_module))
        for p in filter(operator.attrgetter("requires_grad"), pl_module.parameters()):
            p.register_hook(lambda grad: self.look(trainer, pl_module))  # type: ignore[no-untyped-call]

    def look(self, trainer: Any, module: nn.Module) -> None:
        if trainer.global_step < 1 or not module.training:
            return  # the first step finds the stages
        stage_of = trainer.strategy.stage_of
        parts: dict[int, list[bool]] = {}
        for name, p in module.named_parameters():
            parts.setdefault(stage_of[name], []).append(is_here(p))
        assert all(len(set(part)) == 1 for part in parts.values()), "a part of a stage is here"
        self.most = max(self.most, sum(part[0] for part in parts.values()))

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *args: Any) -> None:
        transport = trainer.strategy._training.transport
        self.sent.append(Counter(transport.messages))
        self.bytes.append(Counter(transport.num_bytes))
        engine = trainer.strategy._training._session.engine
        self.held.append(0 if engine is None else len(engine._grads._own))

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self.on_train_batch_end(trainer, pl_module)
        named = {id(p): n for n, p in pl_module.named_parameters()}
        of = trainer.strategy.stage_of
        self.state_of = {of[named[id(p)]] for p in trainer.optimizers[0].state}


def fit(
    net: str, optimizer: str, strategy: dict[str, Any], flags: dict[str, Any], num_batches: int = 5
) -> dict[str, Any]:
    """Train on this rank, where the last step of an epoch may have fewer batches than others."""
    module, watch = Classifier(net, optimizer), Watch()
    watching = {"callbacks": [watch]} if num_batches % 5 else {}
    trainer = make_trainer(strategy, **({"max_epochs": NUM_EPOCHS} | watching | flags))
    trainer.fit(module, train_data(module, num_batches), valid_data(module))
    return {
        "weights": weights_of(module), "losses": module.losses, "rates": module.rates,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "global_step": trainer.global_step, "watch": {
            "most": watch.most, "state_of": watch.state_of,
            "messages": [dict(x) for x in watch.sent], "bytes": [dict(x) for x in watch.bytes],
            "held": watch.held,
        },
    }  # fmt: skip


def compare(n: int, net: str, optimizer: str, plan: dict[str, Any], flags: dict[str, Any]) -> None:
    """Train with sharded weights and with replicas, and compare everything, bit by bit."""
    whole = processes.run(fit, n, net, optimizer, {"preset": "cyclic_dp", **plan}, flags)
    apart = processes.run(fit, n, net, optimizer, {"preset": "cyclic_zero", **plan}, flags)
    for one, other in zip(apart, whole, strict=True):
        assert_same(one.pop("weights"), other.pop("weights"))
        del one["watch"], other["watch"]
        assert one == other


@pytest.mark.parametrize(
    ("n", "net", "optimizer", "rounds", "plan"),
    [
        (2, "gpt2", "adamw", 1, {"stages": 2}),  # a tied weight
        (2, "batchnorm_mlp", "adamw", 1, {"stages": 4, "slack": 2}),
        (3, "resnet", "sgd", 1, {"stages": 3}),
        (4, "batchnorm_mlp", "sgd", 1, {"stages": 4, "slack": 2}),
        (2, "gpt2", "adamw", 3, {"stages": 2}),
        (2, "batchnorm_mlp", "adamw", 2, {"stages": 4, "slack": 2}),
        (4, "mlp", "adamw", 2, {"stages": 4}),
        (2, "batchnorm_mlp", "adamw", 2, {"stages": 2, "transport": "edges"}),
    ],
)
def test_weights_losses_rates_and_metrics_are_those_of_cyclic_dp(
    n: int, net: str, optimizer: str, rounds: int, plan: dict[str, Any]
) -> None:
    compare(n, net, optimizer, plan, {"accumulate_grad_batches": rounds})


def test_gradients_that_are_clipped_by_the_norm_of_all_stages() -> None:
    plan = {"stages": 2, "clip_norm": "global"}  # updates meet at the begin of a step
    flags = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    compare(2, "batchnorm_mlp", "adamw", plan, flags)


def test_numbers_of_batches_that_change_between_epochs() -> None:
    changing = GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})
    flags = {"max_epochs": 3, "callbacks": [changing]}
    compare(2, "batchnorm_mlp", "adamw", {"stages": 2}, flags)


@pytest.mark.parametrize("n", [2, 4])
def test_a_worker_holds_its_stage_and_the_one_in_use(n: int) -> None:
    ranks = processes.run(fit, n, "mlp", "adamw", {"preset": "cyclic_zero", "stages": n}, {}, 4)
    for r, rank in enumerate(ranks):
        assert rank["watch"]["most"] == 2
        assert rank["watch"]["state_of"] == {n - 1 - r}


class Updates(Callback):
    """Note which stages each call of the optimizer updates, and that earlier gradients went."""

    def __init__(self) -> None:
        self.stages: list[set[int]] = []
        self.are_gone = True
        self._before: list[StorageWeakRef] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: nn.Module, *args: Any) -> None:
        named = {id(p): n for n, p in pl_module.named_parameters()}
        updated = trainer.strategy.updated_parameters
        self.stages.append({trainer.strategy.stage_of[named[id(p)]] for p in updated})
        self.are_gone &= all(x.expired() for x in self._before)
        self._before = [StorageWeakRef(p.grad.untyped_storage()) for p in updated]


def fit_updating(strategy: dict[str, Any], flags: dict[str, Any]) -> tuple[list[set[int]], bool]:
    module, updates = Classifier("mlp"), Updates()
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[updates], **flags)
    trainer.fit(module, train_data(module, NUM_BATCHES))
    return updates.stages, updates.are_gone


@pytest.mark.parametrize("clip", ["stage", "global"])
def test_gradients_of_a_stage_are_gone_before_the_next_is_updated(clip: str) -> None:
    """Else all of them would be there beside copies of what others still read."""
    strategy = {"preset": "cyclic_zero", "stages": 6, "clip_norm": clip}
    ranks = processes.run(fit_updating, 2, strategy, {"gradient_clip_val": 0.1})
    for (stages, are_gone), owned in zip(ranks, [{3, 4, 5}, {0, 1, 2}], strict=True):
        assert are_gone
        if clip == "stage":
            assert stages == [{j} for j in sorted(owned)] * NUM_BATCHES
        else:  # by the norm of all
            assert stages == [owned] * NUM_BATCHES


@pytest.mark.parametrize(("n", "rounds"), [(2, 1), (4, 1), (2, 3), (4, 2)])
def test_messages_are_as_many_as_derived(n: int, rounds: int) -> None:
    """In a step r times 2 N (N - 1) of a stage's parameters, and N - 1 gradients of each."""
    plan, flags = {"preset": "cyclic_zero", "stages": n}, {"accumulate_grad_batches": rounds}
    ranks = processes.run(fit, n, "mlp", "sgd", plan, flags, NUM_BATCHES * rounds)
    # the last batches of steps between which no flush lies
    a, b = (NUM_BATCHES + 2) * rounds - 1, (NUM_BATCHES + 3) * rounds - 1

    def between(what: str, payload: Payload) -> list[int]:
        each = (rank["watch"][what] for rank in ranks)
        return [counts[b].get(payload, 0) - counts[a].get(payload, 0) for counts in each]

    assert sum(between("messages", Payload.P)) == rounds * 2 * n * (n - 1)
    assert rounds == 1 or between("messages", Payload.P) == [rounds * 2 * (n - 1)] * n
    last = [rank["watch"]["messages"][-1] for rank in ranks]  # lanes may be behind until then
    of_gradients = [x.get(Payload.H, 0) for x in last]  # each worker's, but of its own stage
    assert of_gradients == [NUM_EPOCHS * NUM_BATCHES * (n - 1)] * n
    assert not any(x.get(p, 0) for x in last for p in (Payload.S, Payload.T))
    elements = sum(x.numel() for x in ranks[0]["weights"].values())
    least = rounds * 2 * (n - 1) * elements * 4
    heads = 2 * n * (n - 1) * 512 + (2 * (n - 1) + 1) * len(ranks[0]["weights"]) * 512
    assert least <= sum(between("bytes", Payload.P)) <= least + rounds * heads
    for rank in ranks:  # until the last round, the gradients of all stages stay
        assert rank["watch"]["held"][2 * rounds : 3 * rounds - 1] == [n] * (rounds - 1)


def fit_low_rank(n: int) -> dict[str, Any]:
    module, watch, r = LowRankLayers(), Watch(), processes.here().rank
    data = DataLoader(Batches(vectors, [[n * t + r] for t in range(4)]), batch_size=None)
    strategy = {"preset": "cyclic_zero", "stages": ["net.2", "net.4"][: n - 1]}
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[watch])
    trainer.fit(module, data)
    trained: dict[int, list[Tensor]] = {j: [] for j in range(n)}
    for name, p in module.named_parameters():
        if p.requires_grad:
            trained[trainer.strategy.stage_of[name]].append(p)
    sizes = [Layout(ps, torch.device("cpu")).num_bytes for ps in trained.values()]
    return {
        "most": watch.most, "state_of": watch.state_of,
        "sums": watch.bytes[-1].get(Payload.H, 0),
        "expected": 8 * (n - 1) * sum(sizes),
    }  # fmt: skip


@pytest.mark.parametrize("n", [2, 3])
def test_what_is_frozen_lies_with_owners_and_is_in_no_sum(n: int) -> None:
    ranks = processes.run(fit_low_rank, n, n)
    for rank in ranks:
        assert rank["most"] == 2
        assert len(rank["state_of"]) == 1
        assert sum(other["sums"] for other in ranks) == rank["expected"]


class Logs(Classifier):
    """Reduces its loss over all workers in each step, and notes what loggers would read."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(float(self.trainer.callback_metrics["loss"]))


def fit_logging(preset: str) -> list[float]:
    module = Logs("mlp", "adamw")
    trainer = make_trainer({"preset": preset, "stages": 3}, max_epochs=1)
    trainer.fit(module, train_data(module, NUM_BATCHES))
    return [*module.rates, float(trainer.callback_metrics["loss_epoch"])]


def test_values_that_a_step_reduces() -> None:
    """Worker 2 has the forward of its micro-batch while worker 0 runs its backward."""
    assert processes.run(fit_logging, 3, "cyclic_zero") == processes.run(
        fit_logging, 3, "cyclic_dp"
    )


class ChecksWithin(Plain):
    """Runs the blocks of each stage again in their backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.net[:2], x, use_reentrant=False)
        return checkpoint(self.net[2:], x, use_reentrant=False)


class TakesPart(Plain):
    """Gives one layer no gradient, so that its stage is complete when the backward has ended."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[1](self.net[0](x))
        y = self.net[2](x)
        return self.net[4](x + y.detach())


def train(kind: type[Plain], preset: str) -> dict[str, Tensor]:
    module, r = kind(), processes.here().rank
    data = DataLoader(Batches(vectors, [[2 * t + r] for t in range(4)]), batch_size=None)
    strategy = {"preset": preset, "stages": ["net.2"]}
    make_trainer(strategy, max_epochs=2).fit(module, data)
    return weights_of(module)


@pytest.mark.parametrize("kind", [ChecksWithin, TakesPart])
def test_backwards_that_go_other_ways(kind: type[Plain]) -> None:
    whole = processes.run(train, 2, kind, "cyclic_dp")
    for rank in processes.run(train, 2, kind, "cyclic_zero"):
        assert_same(rank, whole[0])


# ---------------------------------------------------------------------- refused by name


class ReadsGlue(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(p.square().sum() for p in self.parameters())


def attempt() -> str:
    module, r = ReadsGlue(), processes.here().rank
    data = DataLoader(Batches(vectors, [[2 * t + r] for t in range(4)]), batch_size=None)
    trainer = make_trainer({"preset": "cyclic_zero", "stages": ["net.2"]}, max_epochs=1)
    try:
        trainer.fit(module, data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_needs_parameters_that_are_gone_is_refused() -> None:
    texts = processes.run(attempt, 2, time_limit_s=40, after_failure_s=20)
    for text in texts:
        assert "is read on rank" in text, texts
    assert any(text.startswith(("StepError", "ConfigurationError")) for text in texts)


# ---------------------------------------------------------------------- weights from elsewhere


class Halves(Callback):
    """Loads other weights in the middle of a fit."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            whole = trainer.strategy.lightning_module_state_dict()
            halved = {"state_dict": {n: x * 0.5 for n, x in whole.items()}}
            trainer.strategy.load_model_state_dict(halved)


def load_within(preset: str, stages: int) -> dict[str, Tensor]:
    module, r = Plain(), processes.here().rank
    data = DataLoader(Batches(vectors, [[2 * t + r] for t in range(4)]), batch_size=None)
    strategy = {"preset": preset, "stages": stages}
    make_trainer(strategy, max_epochs=2, callbacks=[Halves()]).fit(module, data)
    return weights_of(module)


@pytest.mark.parametrize("stages", [2, 3])
def test_weights_that_are_loaded_within_a_fit(stages: int) -> None:
    whole = processes.run(load_within, 2, "cyclic_dp", stages)
    for rank in processes.run(load_within, 2, "cyclic_zero", stages):
        assert_same(rank, whole[0])
