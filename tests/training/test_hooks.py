"""Hooks of a pipeline see the module as on a single device, or are refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cyclic.errors import CyclicError
from lightning_cyclic.registration import make_strategy
from tests.harness import processes
from tests.harness.rows import more
from tests.harness.runs import Result, run, trained
from tests.harness.trainers import assert_same, make_trainer
from tests.references.delayed import STAGES as CUTS
from tests.references.delayed import Chain
from tests.references.delayed import loader as steps

pytestmark = pytest.mark.multi

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
STAGES = {2: ["net.3"], 4: ["net.1", "net.3", "net.5"]}  # of as many ranks


class Net(LightningModule):
    """A module whose statistics and parameters lie in all stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(),
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4),
        )  # fmt: skip
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int, *rest: int) -> None:
        self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.1)


def summary(module: Net) -> list[Any]:
    """Return what hooks compute of a whole module."""
    was, module.training = module.training, False
    for m in module.modules():
        m.eval()
    with torch.no_grad():
        output = module(X).tolist()
    for m in module.modules():
        m.training = was
    return [
        output,
        [float(p.detach().norm()) for p in module.parameters()],
        [float(b.double().sum()) for b in module.buffers()],
    ]


class Epochs(Net):
    """Read itself in the hooks of epochs and of validation."""

    def on_train_epoch_end(self) -> None:
        self.seen.append(("train epoch", summary(self)))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen.append(("validation epoch", summary(self)))

    def on_train_end(self) -> None:
        self.seen.append(("train", summary(self)))


class Batches(Net):
    """Read itself behind each batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, summary(self)))


class Wholes(Net):
    """The same, where all ranks ask for the whole module."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with getattr(self.trainer.strategy, "whole", nullcontext)():
            self.seen.append((batch_idx, summary(self)))


class GoingBack(Net):
    """Take the weights of the first epoch again behind the second one, and read them."""

    def on_train_epoch_end(self) -> None:
        strategy = self.trainer.strategy
        if self.current_epoch == 0:
            state = strategy.lightning_module_state_dict()
            self.kept = {name: x.clone() for name, x in state.items()}
            return
        strategy.load_model_state_dict({"state_dict": self.kept})
        self.seen.append(summary(self))


class OnOneRank(Callback):
    """Read the module on a single rank, which the others know nothing of."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_validation_epoch_end(self, trainer: Any, pl_module: Net) -> None:
        if trainer.global_rank == self.rank and not trainer.sanity_checking:
            pl_module.seen.append(summary(pl_module))


def loader(seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, generator=generator)
    return DataLoader(TensorDataset(x, torch.arange(16) % 4), 4)


DATA = {"data": partial(loader, 1), "valid": partial(loader, 2), "val_check_interval": 2}


def seen_by(trainer: Any, module: Net) -> list[Any]:
    return module.seen


def train(
    kind: type[Net], strategy: dict[str, Any], n: int = 2, callbacks: Sequence[Callback] = (),
    how: Any = trained,
) -> list[Result]:  # fmt: skip
    """Train two epochs, with validation within each; note what hooks have seen."""
    flags = {"look": seen_by, "max_epochs": 2, "callbacks": callbacks}
    found: list[Result] = how(kind, strategy or "auto", n, **DATA, **flags)
    return found


def seen(*args: Any) -> list[Any]:
    """Return what the hooks of each rank have seen."""
    return [rank.found for rank in train(*args)]


@cache
def alone(kind: type[Net], rank_that_reads: int | None = None) -> Any:
    """Return what hooks see on a single device without a strategy."""
    callbacks = [] if rank_that_reads is None else [OnOneRank(rank_that_reads)]
    return seen(kind, {}, 1, callbacks)[0]


def staged(preset: str, num_ranks: int, **options: Any) -> dict[str, Any]:
    return {"preset": preset, "stages": STAGES[num_ranks], "num_microbatches": 1, **options}


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [(Epochs, 2), (Wholes, 2), more(Epochs, 4), more(Wholes, 4)]
)
def test_a_module_that_reads_itself_in_hooks_sees_all_its_weights(
    kind: type[Net], num_ranks: int
) -> None:
    assert len(alone(kind)) > 6
    for rank in seen(kind, staged("1f1b", num_ranks), num_ranks):
        assert rank == alone(kind)


def test_weights_that_were_loaded_in_a_hook_are_read() -> None:
    assert seen(GoingBack, staged("1f1b", 2)) == [alone(GoingBack)] * 2


@pytest.mark.parametrize("reader", [0, 1])
def test_one_rank_may_read_while_the_others_do_not(reader: int) -> None:
    ranks = seen(Net, staged("gpipe", 2), 2, [OnOneRank(reader)])
    assert ranks[reader] == alone(Net, 0) != []
    assert ranks[1 - reader] == []


@pytest.mark.parametrize("preset", ["cyclic_pipeline", more("pipedream_2bw")])
def test_steps_that_flow_into_each_other_are_at_an_end_where_epochs_are(preset: str) -> None:
    strategy = staged(preset, 2) | {"num_microbatches": 2}
    (one,) = seen(Epochs, strategy, 1)
    assert len({str(values) for _, values in one}) == 4
    assert seen(Epochs, strategy) == [one, one]


class Ahead(Net):
    """Read what another rank has while a step is under way."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[5 * self.trainer.global_rank].weight.abs()  # rank 0 has the last stage


class AllAhead(Net):
    """Ask for all weights while steps flow into each other."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with self.trainer.strategy.whole():  # test_hooks.py
            pass


class Behind(Net):
    """Look at gradients behind the backward."""

    def on_after_backward(self) -> None:
        assert all(p.grad is not None for p in self.parameters())


class Norms(Net):
    """Look at the gradients that are whole, and at weights beside them."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        names = {p: n for n, p in self.named_parameters()}
        updated = self.trainer.strategy.updated_parameters
        assert all(p.detach().isfinite().all() for p in updated)
        self.seen += [(names[p], p.grad.tolist()) for p in updated]


class InAStep(Net):
    """Read in one stage what another one has, in a step unlike the first."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.net[0].weight.square().sum() if self.trainer.global_step else loss


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Ahead, {}, "reads 'net.[05].weight' of stage [01], which rank [01] has and this rank"),
        (AllAhead, {"preset": "cyclic_pipeline"}, r"whole\(\) in the middle of a step; allowed:"),
        (Batches, {}, r"between steps; allowed: .* under `with trainer\.strategy\.whole\(\):`"),
        (
            Behind,
            {"preset": "cyclic_dp", "stages": 2, "num_microbatches": 2},
            "in on_after_backward, which under preset",
        ),
        (
            InAStep,
            {},
            "'net.0.weight' of stage 0, which rank 1 has and .* in the middle of a step",
        ),
    ],
)
def test_reads_that_cannot_be_right_are_refused_by_name(
    kind: type[Net], options: dict[str, Any], words: str
) -> None:
    ends = train(kind, staged("1f1b", 2) | options, how=run)
    assert any(re.search(words, end.text) and "test_hooks.py" in end.text for end in ends), ends
    for end in ends:
        assert end.error in ("ConfigurationError", "StepError", "PeerError"), end


def whole_gradients(preset: dict[str, Any], num_ranks: int) -> dict[str, list[Any]]:
    """Return the gradients that ranks have seen together, by parameter."""
    seen_of: dict[str, list[Any]] = {}
    for rank in seen(Norms, preset, num_ranks):
        for name, grad in rank:
            seen_of.setdefault(name, []).append(grad)
    return seen_of


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1", "lockstep_dp"])
def test_each_gradient_is_seen_once_and_whole_before_its_update(preset: str) -> None:
    shown = whole_gradients({"preset": preset, "stages": ["net.3"]}, 2)
    assert {n: len(grads) for n, grads in shown.items()} == {
        n: 8 for n, _ in Net().named_parameters()
    }


def test_a_pipeline_shows_each_gradient_on_its_rank() -> None:
    one = {"preset": "cyclic_pipeline", "stages": ["net.3"], "num_microbatches": 2}
    for shown in (whole_gradients(one, 1), whole_gradients(one, 2)):
        assert {n: len(grads) for n, grads in shown.items()} == {
            n: 8 for n, _ in Net().named_parameters()
        }


# ---------------------------------------------------------------------- changes between steps


class Changing(Net):
    """Change a weight behind the second batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            whole = getattr(self.trainer.strategy, "whole", nullcontext)
            with whole(), torch.no_grad():
                self.net[0].weight.mul_(0.5)


class Replacing(Net):
    """Put another parameter in the place of one behind an epoch."""

    def on_train_epoch_end(self) -> None:
        self.net[0].bias = nn.Parameter(torch.zeros(8))


class Exchanging(Net):
    """Validate with other weights, and take them back."""

    def on_validation_start(self) -> None:
        self.kept = [p.detach().clone() for p in self.parameters()]
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.5)

    def on_validation_end(self) -> None:
        with torch.no_grad():
            for p, kept in zip(self.parameters(), self.kept, strict=True):
                p.copy_(kept)


NOT_SYNC = [
    {"preset": "cyclic_dp", "stages": 2},
    {"preset": "lockstep_dp", "stages": 2},
    {"preset": "cyclic_pipeline", "stages": ["net.3"], "num_microbatches": 2},
]


@pytest.mark.parametrize(
    "strategy", [NOT_SYNC[0], more(NOT_SYNC[1]), NOT_SYNC[2]], ids=lambda s: s["preset"]
)
def test_a_parameter_that_is_replaced_is_refused(strategy: dict[str, Any]) -> None:
    words = "'net.0.bias' was replaced, added or removed|not in the LightningModule"
    ends = train(Replacing, strategy, how=run)
    assert any(re.search(words, end.text) for end in ends), ends
    assert all(end.error for end in ends)


@pytest.mark.parametrize("strategy", NOT_SYNC[::2], ids=lambda s: s["preset"])
def test_weights_that_are_exchanged_for_validation_alone_are_no_change(
    strategy: dict[str, Any],
) -> None:
    for one, other in zip(train(Exchanging, strategy), train(Net, strategy), strict=True):
        assert_same(one.weights, other.weights)


class Casting(Net):
    """Move modules, and give weights their own values, wherever a module may: nothing changes."""

    def same(self) -> None:
        self.net[0].to(self.dtype)
        self.net[3].to(self.device)
        self.net[3].float()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.same()
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.same()

    def on_after_backward(self) -> None:
        self.same()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.same()


@pytest.mark.parametrize(
    "strategy", [NOT_SYNC[0], more(NOT_SYNC[1]), NOT_SYNC[2]], ids=lambda s: s["preset"]
)
def test_a_change_that_changes_nothing_is_none(strategy: dict[str, Any]) -> None:
    for one, other in zip(train(Casting, strategy), train(Net, strategy), strict=True):
        assert_same(one.weights, other.weights)


@pytest.mark.parametrize("kind", [Changing, Exchanging, Casting])
def test_pipelines_with_a_flush_take_changes_over(kind: type[Net]) -> None:
    (plain,) = train(kind, {}, 1)
    for rank in train(kind, staged("1f1b", 2)):
        assert_same(rank.weights, plain.weights)


# ---------------------------------------------------------------------- loaders of other lengths


def refused(kind: str) -> str:
    """Give ranks loaders of other lengths, and return the error."""
    module, rank = Net(), processes.here().rank
    trainer = make_trainer(make_strategy(**staged("1f1b", 2)), max_epochs=1)
    odd = DataLoader(loader(2).dataset, 4 if rank else 2)
    module.test_step = module.predict_step = lambda batch, *rest: module(batch[0]).sum()
    entry = partial(getattr(trainer, kind, trainer.fit), module, odd)
    if kind == "validation":
        entry = partial(trainer.fit, module, loader(1), [loader(2), odd])
    with pytest.raises(CyclicError) as caught:
        entry()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["validation", "test", more("predict")])
def test_loaders_of_other_lengths_are_refused_before_their_first_batch(kind: str) -> None:
    numbers = ["[4.0, 8.0]", "[4.0, 4.0]"] if kind == "validation" else ["[8.0]", "[4.0]"]
    for error in processes.run(refused, 2, kind):
        assert error.startswith(
            f"ranks have different numbers of {kind} batches (rank 0: {numbers[0]}, rank 1: "
            f"{numbers[1]}); allowed: the same everywhere"
        )


# ---------------------------------------------------------------------- how often


class Counts(Chain):
    """Counts the calls of its training_step where nobody takes care of it."""

    calls: ClassVar[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls.append(batch_idx)
        return super().training_step(batch, batch_idx)


def calls(trainer: Any, module: Any) -> list[int]:
    """Return how often training_step is called for each of three batches."""
    return [Counts.calls.count(k) for k in range(3)]


@pytest.mark.parametrize(
    ("preset", "num_ranks", "num_microbatches", "num"),
    [
        ("cyclic_dp", 2, 2, 1),
        ("cyclic_zero", 2, 2, 1),
        ("1f1b", 2, 3, 3 * 2),
        ("cyclic_pipeline", 2, 3, 3 * 2),
        ("cyclic_dp", 1, 3, 3 * 4),
    ],
)
def test_training_step_is_called_as_often_as_the_page_says(
    preset: str, num_ranks: int, num_microbatches: int, num: int
) -> None:
    strategy = {"preset": preset, "num_microbatches": num_microbatches, "stages": CUTS}
    data = partial(steps, num_microbatches, 3)
    ranks = [rank.found for rank in trained(Counts, strategy, num_ranks, data=data, look=calls)]
    # in the first step, on rank 0: survey, what is saved, comparison
    once_more = (num > 1) * (2 + num_microbatches)
    assert ranks == [[num + (once_more if r == 0 else 0), num, num] for r in range(num_ranks)]
