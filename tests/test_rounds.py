"""Batches that are added up where weights are sharded: each is a round of the plan.

The bits are those of replicas, which add them up beside a plan of one round, so that one mechanism
is the other's oracle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as lc
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_cyclic.plan.actions import Payload
from tests import processes
from tests.conformance.harness import Batches
from tests.conformance.modules import CLASSES, SIZE, Plain, vectors
from tests.corpus import Classifier, assert_same, make_trainer, train_data, valid_data, weights_of
from tests.rows import in_turn, more

pytestmark = pytest.mark.multi
NUM_BATCHES, NUM_EPOCHS = 5, 2  # so that the last step of an epoch has fewer than the others


def fit(
    net: str, optimizer: str, strategy: dict[str, Any], flags: dict[str, Any],
    make: Callable[[], list[Callback]] = list,
) -> dict[str, Any]:  # fmt: skip
    module = Classifier(net, optimizer)
    trainer = make_trainer(strategy, **({"max_epochs": NUM_EPOCHS, "callbacks": make()} | flags))
    trainer.fit(module, train_data(module, NUM_BATCHES), valid_data(module))
    return {
        "weights": weights_of(module), "losses": module.losses, "rates": module.rates,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "global_step": trainer.global_step,
    }  # fmt: skip


def compare(n: int, net: str, optimizer: str, plan: dict[str, Any], *rest: Any) -> None:
    """Train with sharded weights and with replicas, and compare everything, bit by bit."""
    whole = processes.run(fit, n, net, optimizer, {"preset": "cyclic_dp", **plan}, *rest)
    apart = processes.run(fit, n, net, optimizer, {"preset": "cyclic_zero", **plan}, *rest)
    for one, other in zip(apart, whole, strict=True):
        assert_same(one.pop("weights"), other.pop("weights"))
        assert one == other


@pytest.mark.parametrize(
    ("n", "net", "optimizer", "slack", "stages", "rounds"),
    [
        more(2, "mlp", "sgd", 0, 2, 2),
        (2, "gpt2", "adamw", 0, 2, 3),  # a tied weight
        (2, "batchnorm_mlp", "adamw", 2, 4, 2),
        pytest.param(3, "resnet", "sgd", 0, 3, 2, marks=pytest.mark.exhaustive),
        pytest.param(3, "mlp", "adamw", 2, 6, 3, marks=pytest.mark.exhaustive),
        (4, "mlp", "adamw", 0, 4, 2),
        pytest.param(4, "batchnorm_mlp", "sgd", 0, 4, 3, marks=pytest.mark.exhaustive),
        pytest.param(4, "gpt2", "adamw", 2, 3, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_weights_losses_rates_and_metrics_are_those_of_cyclic_dp(
    n: int, net: str, optimizer: str, slack: int, stages: int, rounds: int
) -> None:
    plan = {"stages": stages, "slack": slack}
    compare(n, net, optimizer, plan, {"accumulate_grad_batches": rounds})


@pytest.mark.parametrize(
    ("n", "net", "stages", "rounds"),
    [
        (2, "batchnorm_mlp", 2, 2),  # updates meet at the begin of a step
        pytest.param(3, "mlp", 2, 2, marks=pytest.mark.exhaustive),
        more(4, "batchnorm_mlp", 4, 2),
    ],
)
def test_gradients_that_are_clipped_by_the_norm_of_all_stages(
    n: int, net: str, stages: int, rounds: int
) -> None:
    plan = {"stages": stages, "clip_norm": "global"}
    flags = {"accumulate_grad_batches": rounds, "gradient_clip_val": 0.05}
    compare(n, net, "adamw", plan, flags)


@pytest.mark.parametrize("transport", ["edges", more("host_staged")])
def test_transports_go_on_with_another_number_of_batches(transport: str) -> None:
    plan = {"stages": 2, "transport": transport}
    compare(2, "batchnorm_mlp", "adamw", plan, {"accumulate_grad_batches": 2})


def changing() -> list[Callback]:
    return [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]


@pytest.mark.parametrize(
    ("n", "net"),
    [(2, "batchnorm_mlp"), pytest.param(3, "mlp", marks=pytest.mark.exhaustive)],
)
def test_numbers_that_change_between_epochs(n: int, net: str) -> None:
    compare(n, net, "adamw", {"stages": n}, {"max_epochs": 3}, changing)


# ---------------------------------------------------------------------- what else there is


class Dropping(Plain):
    """Draws, logs a value that is reduced, and has BatchNorm in its second stage if it is asked.

    Args:
        normalises: whether it has.
    """

    def __init__(self, normalises: bool = False) -> None:
        self.normalises = normalises
        super().__init__()
        self.totals: list[float] = []

    def make_net(self) -> nn.Module:
        between = nn.BatchNorm1d(SIZE) if self.normalises else nn.Tanh()
        return nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.Dropout(0.3), nn.Linear(SIZE, SIZE), between,
            nn.Dropout(0.2), nn.Linear(SIZE, CLASSES),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.totals.append(float(self.trainer.callback_metrics["loss"]))


class Looks(Callback):
    """Meets all workers behind each step, and sees what validation finds."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            assert trainer.strategy.broadcast(trainer.global_step) == trainer.global_step

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen += [float(p.detach().double().sum()) for p in pl_module.parameters()]


def batches(num: int = 6) -> DataLoader[Any]:
    here = processes.here()
    groups = [[here.num_ranks * t + here.rank] for t in range(num)]
    return DataLoader(Batches(vectors, groups), batch_size=None)


FLAGS: dict[str, dict[str, Any]] = {
    "clipped by value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "clipped by stage": {"gradient_clip_val": 0.1, "clip_norm": "stage"},
    "clipped by all": {"gradient_clip_val": 0.1, "clip_norm": "global"},
    "validated in mid epoch": {"val_check_interval": 2},
    "max_steps": {"max_steps": 4, "max_epochs": -1},
    "averaged": {"averages": True},
}


def fit_dropping(preset: str, flags: dict[str, Any]) -> dict[str, Any]:
    looks, flags = Looks(), dict(flags)
    strategy = {"preset": preset, "stages": ["net.2"]}
    if clip := flags.pop("clip", None):
        strategy["clip"] = clip
    module = Dropping()
    callbacks: list[Callback] = [looks]
    if flags.pop("averages", False):
        callbacks.append(lc.EMAWeightAveraging(decay=0.5))
    trainer = make_trainer(
        strategy,
        **({"max_epochs": 2, "accumulate_grad_batches": 2, "callbacks": callbacks} | flags),
    )
    trainer.fit(module, batches(), batches(2))
    return {
        "weights": weights_of(module), "seen": looks.seen, "totals": module.totals,
        "global_step": trainer.global_step,
    }  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_draws_values_that_are_reduced_and_flags(name: str) -> None:
    if name == "averaged" and not hasattr(lc, "EMAWeightAveraging"):
        pytest.skip("from Lightning 2.6 on")
    whole = processes.run(fit_dropping, 2, "cyclic_dp", FLAGS[name], time_limit_s=40)
    apart = processes.run(fit_dropping, 2, "cyclic_zero", FLAGS[name], time_limit_s=40)
    for one, other in zip(apart, whole, strict=True):
        assert_same(one.pop("weights"), other.pop("weights"))
        assert one == other
        assert one["seen"]


class Resumable(DataLoader[Any]):
    """Goes on in the middle of an epoch, as Lightning lets loaders that have a state."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        begin = self.at
        for k, batch in enumerate(super().__iter__()):
            if k >= begin:
                self.at = k + 1
                yield batch
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


LATE: dict[str, Any] = {"slack": 2}
CLIPPED: dict[str, Any] = {"clip_norm": "global"}  # waits for norms of all behind each step


def go_on(preset: str, plan: dict[str, Any], folder: str, resumed: bool) -> dict[str, Any]:
    module = Dropping(normalises=True)
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = make_trainer(
        {"preset": preset, "stages": ["net.2"]} | plan, max_epochs=2, callbacks=[saver],
        enable_checkpointing=True, accumulate_grad_batches=2,
        gradient_clip_val=0.1 if "clip" in plan else None,
    )  # fmt: skip
    # of three steps of an epoch, the last has one batch
    data = Resumable(batches(5).dataset, batch_size=None)
    trainer.fit(module, data, ckpt_path=str(Path(folder, "step=2.ckpt")) if resumed else None)
    return weights_of(module)


@pytest.mark.parametrize(
    ("n", "wrote", "reads", "plan"),
    [
        (2, "cyclic_dp", "cyclic_zero", LATE),
        (2, "cyclic_zero", "cyclic_dp", LATE),
        pytest.param(2, "cyclic_zero", "cyclic_zero", LATE, marks=pytest.mark.exhaustive),
        pytest.param(2, "cyclic_dp", "cyclic_zero", CLIPPED, marks=pytest.mark.exhaustive),
        pytest.param(3, "cyclic_zero", "cyclic_dp", CLIPPED, marks=pytest.mark.exhaustive),
    ],
)
def test_each_goes_on_from_checkpoints_of_the_other(
    n: int, wrote: str, reads: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    unbroken = processes.run(go_on, n, wrote, plan, str(tmp_path), False, time_limit_s=40)
    for rank in processes.run(go_on, n, reads, plan, str(tmp_path), True, time_limit_s=40):
        assert_same(rank, unbroken[0])


class Counts(Callback):
    """Note what has been sent, and of which stages there are gradients, behind each batch."""

    def __init__(self) -> None:
        self.sent: list[Counter[Payload]] = []
        self.held: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        training = trainer.strategy._training
        self.sent.append(Counter(training.transport.messages))
        engine = training._session.engine
        self.held.append(0 if engine is None else len(engine._grads._own))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_batch_end(trainer)


def count(rounds: int) -> tuple[list[dict[Payload, int]], list[int]]:
    module, counts, n = Classifier("mlp", "sgd"), Counts(), processes.here().num_ranks
    trainer = make_trainer(
        {"preset": "cyclic_zero", "stages": n}, max_epochs=1, callbacks=[counts],
        accumulate_grad_batches=rounds,
    )  # fmt: skip
    trainer.fit(module, train_data(module, 4 * rounds))
    return [dict(x) for x in counts.sent], counts.held


@pytest.mark.parametrize(("n", "rounds"), [(2, 3), (4, 2)])
def test_messages_are_as_many_as_derived(n: int, rounds: int) -> None:
    """In a step r times 2 N (N - 1) of a stage's parameters, N - 1 gradients of each stage."""
    ranks = processes.run(count, n, rounds)
    a, b = 2 * rounds - 1, 3 * rounds - 1  # the last batches of two steps
    fetched = sum(sent[b].get(Payload.P, 0) - sent[a].get(Payload.P, 0) for sent, _ in ranks)
    assert fetched == rounds * 2 * n * (n - 1)
    each = [sent[b].get(Payload.P, 0) - sent[a].get(Payload.P, 0) for sent, _ in ranks]
    assert each == [rounds * 2 * (n - 1)] * n
    last = [sent[-1] for sent, _ in ranks]  # lanes may be behind until then
    assert [x.get(Payload.H, 0) for x in last] == [4 * (n - 1)] * n
    for _, held in ranks:  # until the last round, the gradients of all stages stay
        assert held[2 * rounds : 3 * rounds - 1] == [n] * (rounds - 1)


# ---------------------------------------------------------------------- refused by name


class Stream(IterableDataset[Any]):
    """Batches whose number is not known before they end.

    Args:
        num: of them.
    """

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[Any]:
        here = processes.here()
        return (vectors(here.num_ranks * t + here.rank) for t in range(self.num))


class Stops(Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, out: Any, batch: Any, k: int
    ) -> None:
        trainer.should_stop = k == 2


class Saves(Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, out: Any, batch: Any, k: int
    ) -> None:
        if k == 2:
            trainer.save_checkpoint("never.ckpt")


class Skips(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


class Widens(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.accumulate_grad_batches = 3


def attempt(preset: str, what: str) -> str:
    module = {"skips": Skips, "widens": Widens}.get(what, Plain)()
    made = {"stops": [Stops()], "saves": [Saves()]}.get(what, [])
    own = processes.here().rank + 2 if what == "differs" else 2
    length = {"no length": 6, "short": 5}.get(what)
    data = batches() if length is None else DataLoader(Stream(length), batch_size=None)
    more = {"val_check_interval": 3} if what == "validates" else {}
    more |= {"limit_train_batches": 6} if what == "short" else {}
    more |= {"max_time": "00:01:00:00"} if what == "is timed" else {}
    trainer = make_trainer(
        {"preset": preset, "stages": ["net.2"]}, max_epochs=1, callbacks=made,
        accumulate_grad_batches=own, num_sanity_val_steps=0, **more,
    )  # fmt: skip
    try:
        trainer.fit(module, data, batches(2) if what == "validates" else None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{trainer.global_step} steps"


MIDDLE = "StepError: validation, a checkpoint or the end of an epoch came behind 1 of the batches"
PLANNED = "but it was to have 2"


@pytest.mark.parametrize(
    ("preset", "what", "said"),
    [
        *in_turn(("cyclic_dp", "cyclic_zero"),
                 [(x, MIDDLE) for x in ("validates", "stops", "saves", "skips", "short")]),
        *((name, "is timed", "StepError: broadcast waits for all workers, but was called behind")
          for name in ("cyclic_dp", "cyclic_zero")),
        ("cyclic_zero", "no length", "ConfigurationError: accumulate_grad_batches"),
        ("cyclic_zero", "widens", PLANNED),
        ("cyclic_zero", "differs", "ranks have different accumulate_grad_batches"),
        ("cyclic_dp", "no length", "3 steps"),
    ],
)  # fmt: skip
def test_what_nobody_can_know_or_leave_in_its_middle(preset: str, what: str, said: str) -> None:
    texts = processes.run(attempt, 2, preset, what, time_limit_s=40, after_failure_s=20)
    assert any(text.startswith(said) or said in text for text in texts), texts
    if "steps" not in said:  # who is not the first to say so has heard of it
        assert all("Error: " in text for text in texts), texts
