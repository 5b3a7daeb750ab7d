"""cyclic_zero: the bits of cyclic_dp, by workers that hold what they use and no more."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.buffers import Layout
from tests.conformance.modules import LowRankLayers, Plain, vectors
from tests.harness.rows import more
from tests.harness.runs import Result, trained
from tests.harness.trainers import assert_same
from tests.modules.classifier import Classifier, micro_batches, one_each

pytestmark = pytest.mark.multi
NUM_BATCHES, NUM_EPOCHS = 4, 2
FEW = partial(one_each, vectors, NUM_BATCHES)


def noted(trainer: Any, module: Classifier) -> Any:
    return module.losses, module.rates


def classifier(
    strategy: dict[str, Any], n: int, net: str, optimizer: str = "sgd", num_batches: int = 5,
    **flags: Any,
) -> list[Result]:  # fmt: skip
    """Train a classifier, where the last step of an epoch may have fewer batches than others."""
    kind = {"gpt2": "tokens", "resnet": "images"}.get(net, "vectors")
    return trained(
        partial(Classifier, net, optimizer), strategy, n, valid=partial(micro_batches, kind, 2, 1),
        data=partial(micro_batches, kind, num_batches), **({"max_epochs": NUM_EPOCHS} | flags),
    )  # fmt: skip


def assert_alike(fit: Callable[[dict[str, Any]], list[Result]], **plan: Any) -> None:
    """Train with sharded weights and with replicas, and compare everything, bit by bit."""
    whole, apart = (fit({"preset": name, **plan}) for name in ("cyclic_dp", "cyclic_zero"))
    for one, other in zip(apart, whole, strict=True):
        assert_same(one.weights, other.weights)
        for what in ("losses", "metrics", "found", "global_step"):
            assert getattr(one, what) == getattr(other, what), what


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("n", "net", "optimizer", "rounds", "plan"),
    [
        (2, "gpt2", "adamw", 1, {"stages": 2}),  # a tied weight
        more(2, "batchnorm_mlp", "adamw", 1, {"stages": 4, "slack": 2}),
        (3, "batchnorm_mlp", "sgd", 1, {"stages": 3, "slack": 2}),
        more(3, "resnet", "sgd", 1, {"stages": 3}),
        more(4, "batchnorm_mlp", "sgd", 1, {"stages": 4, "slack": 2}),
        more(2, "gpt2", "adamw", 3, {"stages": 2}),
        more(2, "batchnorm_mlp", "adamw", 2, {"stages": 4, "slack": 2}),
        more(4, "mlp", "adamw", 2, {"stages": 4}),
        (2, "batchnorm_mlp", "adamw", 3, {"stages": 2, "transport": "edges"}),
    ],
)
def test_weights_losses_rates_and_metrics_are_those_of_cyclic_dp(
    n: int, net: str, optimizer: str, rounds: int, plan: dict[str, Any]
) -> None:
    flags = {"accumulate_grad_batches": rounds, "look": noted}
    assert_alike(lambda strategy: classifier(strategy, n, net, optimizer, **flags), **plan)


def test_gradients_that_are_clipped_by_the_norm_of_all_stages() -> None:
    flags = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 1}
    assert_alike(
        lambda strategy: classifier(strategy, 2, "batchnorm_mlp", "adamw", **flags),
        stages=2, clip_norm="global",  # updates meet at the begin of a step
    )  # fmt: skip


def test_numbers_of_batches_that_change_between_epochs() -> None:
    changing = GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})
    flags = {"max_epochs": 3, "callbacks": [changing], "num_batches": 4}
    assert_alike(lambda strategy: classifier(strategy, 2, "mlp", "adamw", **flags), stages=2)


class Logs(Classifier):
    """Reduces its loss over all workers in each step, and notes what loggers would read."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(float(self.trainer.callback_metrics["loss"]))


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


class Halved(Plain):
    """Loads other weights in the middle of a fit."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            whole = self.trainer.strategy.lightning_module_state_dict()
            halved = {"state_dict": {n: x * 0.5 for n, x in whole.items()}}
            self.trainer.strategy.load_model_state_dict(halved)


def test_values_that_a_step_reduces() -> None:
    """Worker 2 has the forward of its micro-batch while worker 0 runs its backward."""
    data = partial(micro_batches, "vectors", NUM_BATCHES)
    assert_alike(lambda x: trained(Logs, x, 3, data=data, look=noted), stages=3)


@pytest.mark.parametrize(
    ("make", "stages"), [(ChecksWithin, ["net.2"]), (TakesPart, ["net.2"]), (Halved, 3)]
)
def test_steps_and_epochs_that_go_other_ways(make: type[LightningModule], stages: Any) -> None:
    assert_alike(lambda x: trained(make, x, data=FEW, max_epochs=2), stages=stages)


# ---------------------------------------------------------------------- what a worker holds


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
        self.expected = 0  # bytes of gradients of trained parameters

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
        named, of = dict(pl_module.named_parameters()), trainer.strategy.stage_of
        state = trainer.optimizers[0].state
        self.state_of = {of[n] for n, p in named.items() if p in state}
        stages: dict[int, list[Tensor]] = {}
        for n, p in named.items():
            if p.requires_grad:
                stages.setdefault(of[n], []).append(p)
        sizes = [Layout(ps, torch.device("cpu")).num_bytes for ps in stages.values()]
        steps = trainer.global_step
        self.expected = steps * (trainer.world_size - 1) * sum(sizes)


def watched(trainer: Any, module: nn.Module) -> dict[str, Any]:
    (watch,) = (c for c in trainer.callbacks if isinstance(c, Watch))
    names = ("most", "sent", "bytes", "held", "state_of", "expected")
    return {name: getattr(watch, name) for name in names}


WATCHED = {"look": watched, "callbacks": [Watch()]}


@pytest.mark.parametrize("n", [more(2), 3, more(4)])
def test_a_worker_holds_its_stage_and_the_one_in_use(n: int) -> None:
    ranks = classifier({"preset": "cyclic_zero", "stages": n}, n, "mlp", "adamw", 4, **WATCHED)
    for r, rank in enumerate(ranks):
        assert rank.found["most"] == 2
        assert rank.found["state_of"] == {n - 1 - r}


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

    @staticmethod
    def of(trainer: Any, module: nn.Module) -> Any:
        (updates,) = (c for c in trainer.callbacks if isinstance(c, Updates))
        return updates.stages, updates.are_gone


@pytest.mark.parametrize("clip", ["stage", "global"])
def test_gradients_of_a_stage_are_gone_before_the_next_is_updated(clip: str) -> None:
    """Else all of them would be there beside copies of what others still read."""
    ranks = trained(
        partial(Classifier, "mlp"), {"preset": "cyclic_zero", "stages": 6, "clip_norm": clip},
        data=partial(micro_batches, "vectors", NUM_BATCHES), gradient_clip_val=0.1,
        callbacks=[Updates()], look=Updates.of,
    )  # fmt: skip
    for rank, owned in zip(ranks, [{3, 4, 5}, {0, 1, 2}], strict=True):
        stages, are_gone = rank.found
        assert are_gone
        if clip == "stage":
            assert stages == [{j} for j in sorted(owned)] * NUM_BATCHES
        else:  # by the norm of all
            assert stages == [owned] * NUM_BATCHES


@pytest.mark.parametrize(("n", "rounds"), [(2, 1), (3, 2), more(4, 1), more(2, 3), more(4, 2)])
def test_messages_are_as_many_as_derived(n: int, rounds: int) -> None:
    """In a step r times 2 N (N - 1) of a stage's parameters, and N - 1 gradients of each."""
    flags = {"accumulate_grad_batches": rounds, "num_batches": NUM_BATCHES * rounds}
    ranks = classifier({"preset": "cyclic_zero", "stages": n}, n, "mlp", **flags, **WATCHED)
    # the last batches of steps between which no flush lies
    a, b = (NUM_BATCHES + 2) * rounds - 1, (NUM_BATCHES + 3) * rounds - 1

    def between(what: str, payload: Payload) -> list[int]:
        each = (rank.found[what] for rank in ranks)
        return [counts[b].get(payload, 0) - counts[a].get(payload, 0) for counts in each]

    assert sum(between("sent", Payload.P)) == rounds * 2 * n * (n - 1)
    assert rounds == 1 or between("sent", Payload.P) == [rounds * 2 * (n - 1)] * n
    last = [rank.found["sent"][-1] for rank in ranks]  # lanes may be behind until then
    of_gradients = [x.get(Payload.H, 0) for x in last]  # each worker's, but of its own stage
    assert of_gradients == [NUM_EPOCHS * NUM_BATCHES * (n - 1)] * n
    assert not any(x.get(p, 0) for x in last for p in (Payload.S, Payload.T))
    elements = sum(x.numel() for x in ranks[0].weights.values())
    least = rounds * 2 * (n - 1) * elements * 4
    heads = 2 * n * (n - 1) * 512 + (2 * (n - 1) + 1) * len(ranks[0].weights) * 512
    assert least <= sum(between("bytes", Payload.P)) <= least + rounds * heads
    for rank in ranks:  # until the last round, the gradients of all stages stay
        assert rank.found["held"][2 * rounds : 3 * rounds - 1] == [n] * (rounds - 1)


@pytest.mark.parametrize("n", [more(2), 3])
def test_what_is_frozen_lies_with_owners_and_is_in_no_sum(n: int) -> None:
    strategy = {"preset": "cyclic_zero", "stages": ["net.2", "net.4"][: n - 1]}
    ranks = trained(LowRankLayers, strategy, n, data=FEW, max_epochs=2, **WATCHED)
    sums = sum(rank.found["bytes"][-1].get(Payload.H, 0) for rank in ranks)
    for rank in ranks:
        assert rank.found["most"] == 2
        assert len(rank.found["state_of"]) == 1
        assert sums == rank.found["expected"]
