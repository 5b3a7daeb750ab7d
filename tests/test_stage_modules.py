"""Modules with habits of their own, in stages: heads that later steps use, hooks, moves."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.data import DataLoader

from tests.harness import processes
from tests.harness.trainers import assert_same, make_trainer, weights_of

pytestmark = pytest.mark.multi
NUM_MICRO, NUM_STEPS = 4, 4


class Base(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["x"], batch["task"]), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Heads(Base):
    """Has a head for each task, of which the first batches use one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        norm = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 9))
        self.heads = nn.ModuleList([nn.Linear(4, 9), norm])
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(4, 9, [2, 5], div_value=1.0)

    def forward(self, x: Tensor, task: int) -> Tensor:
        x = self.net(x)
        return self.heads[task](x) + 0.1 * self.loss.log_prob(x)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if batch["task"]:
            return super().training_step(batch, batch_idx)
        x = self.net(batch["x"])
        some = torch.zeros_like(batch["y"])  # the first cluster alone
        return F.cross_entropy(self.heads[0](x), batch["y"]) + self.loss(x, some).loss


class Aside(Base):
    """Calls in later steps what is defined beside the first module, behind the third."""

    def __init__(self, *, behind: bool = False) -> None:
        super().__init__()
        made = {name: nn.Linear(4, 4) for name in ("a", "b", "aside", "c")}
        made["d"] = nn.Linear(4, 9)
        order = ("a", "b", "c", "aside", "d") if behind else tuple(made)
        for name in order:
            self.add_module(name, made[name])

    def forward(self, x: Tensor, task: int) -> Tensor:
        x = self.c(self.b(self.a(x)))
        return self.d(self.aside(x) if task else x)


class Behind(Aside):
    def __init__(self) -> None:
        super().__init__(behind=True)


class Hooked(Base):
    """Has layers whose hooks make their weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(4, 4) for _ in range(4)]
        for layer in layers[1:3]:
            prune.l1_unstructured(layer, "weight", 0.5)  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.net = nn.Sequential(*layers, weight_norm(nn.Linear(4, 4)))
        self.net.append(spectral_norm(nn.Linear(4, 4)))  # changes buffers, too
        self.last = parametrizations.weight_norm(nn.Linear(4, 9))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.last(self.net(x).tanh())


class Noting(Base):
    """Has a layer whose hook notes its input for the first time in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 9))
        self.net[1].register_forward_pre_hook(self.note)

    def note(self, layer: nn.Module, given: tuple[Tensor]) -> None:
        layer.given = given[0].detach()

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.net(x)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.head = self.head.to(torch.float32)
        return x + self.head(x)


class Moving(Base):
    """Moves its modules to where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.second = nn.Linear(4, 4), Router(), Router()
        self.last = nn.Linear(4, 9)

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.last(self.second(self.router(self.first(x))))


class Short(Base):
    """Has two places for stages."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 9)

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.head(self.cell(x[:, None])[0][:, 0])


class Shortest(Short):
    """Has one."""

    def __init__(self) -> None:
        super().__init__()
        del self.cell

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.head(x)


def micro_batches() -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(3, 4, generator=g), "y": torch.randint(9, (3,), generator=g),
         "task": int(k // NUM_MICRO in (1, 3))}
        for k in range(NUM_STEPS * NUM_MICRO)
    ]  # fmt: skip


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {n: torch.cat([p[n] for p in parts]) for n in ("x", "y")} | {"task": parts[0]["task"]}


def fit(make: Any, strategy: Any) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    module, data, flags = make(), micro_batches(), {"accumulate_grad_batches": NUM_MICRO}
    if strategy != "auto":
        data = [joined(data[t : t + NUM_MICRO]) for t in range(0, len(data), NUM_MICRO)]
        strategy, flags = {"num_microbatches": NUM_MICRO, **strategy}, {}
    trainer = make_trainer(strategy, max_epochs=1, **flags)
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return weights_of(module)


@cache
def plain(make: Any) -> dict[str, Tensor]:
    return processes.run(fit, 1, make, "auto")[0]


@pytest.mark.parametrize(
    ("make", "num_ranks", "strategy"),
    [
        (Heads, 2, {"preset": "1f1b", "stages": ["net.2"]}),
        (Heads, 1, {"preset": "gpipe", "stages": ["net.1", "net.3"]}),
        (Aside, 1, {"preset": "1f1b", "stages": ["b"]}),
        (Behind, 1, {"preset": "1f1b", "stages": ["c"]}),
        (Hooked, 2, {"preset": "1f1b", "stages": ["net.1"]}),
        (
            Hooked,
            1,
            {
                "preset": "1f1b",
                "stages": ["net.2", "net.4", "last"],
                "activation_checkpointing": "always",
            },
        ),
        (
            Hooked,
            1,
            {
                "preset": "1f1b",
                "stages": ["net.2", "net.4", "last"],
                "activation_checkpointing": "never",
            },
        ),
        (Moving, 2, {"preset": "1f1b"}),
        (Moving, 1, {"preset": "gpipe", "stages": 3}),
        (Short, 1, {"preset": "lockstep_dp"}),
        (Shortest, 1, {"preset": "gpipe"}),
    ],
    ids=str,
)
def test_it_trains_with_the_bits_of_one_device(
    make: Any, num_ranks: int, strategy: dict[str, Any]
) -> None:
    for weights in processes.run(fit, num_ranks, make, strategy):
        assert_same(weights, plain(make))


def noted(strategy: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    module, data = Noting(), [joined(micro_batches()[:NUM_MICRO])]
    trainer = make_trainer({"num_microbatches": NUM_MICRO, **strategy}, max_epochs=1)
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return vars(module.net[1]).get("given")


def test_what_a_hook_notes_is_only_where_the_layer_is() -> None:
    last, first = processes.run(noted, 2, {"preset": "1f1b", "stages": ["net.2"]})
    assert first.shape == (3, 4)  # on the rank of stage 0, of the last micro-batch
    assert last is None


def test_what_later_steps_use_elsewhere_is_named() -> None:
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(fit, 1, Aside, {"preset": "1f1b", "stages": ["c"]})
    text = str(caught.value)
    assert "module 'aside', whose parameters or buffers belong to stage [0], is called" in text
    assert "it was not used in the first micro-batch" in text
    assert "it went with 'b.bias', which is defined beside it" in text
    assert "begin stage 1 at 'b' or before" in text  # as the test above does, and as Behind


def test_one_device_has_as_many_stages_as_there_are_places() -> None:
    def fitted(make: Any, **given: Any) -> dict[str, Tensor]:
        return processes.run(fit, 1, make, {"preset": "cyclic_dp", **given})[0]

    assert_same(fitted(Short), fitted(Short, stages=2))
    assert_same(fitted(Shortest), fitted(Shortest, stages=1))


def test_too_many_processes_for_the_places_are_refused_once_and_for_all() -> None:
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(fit, 2, Shortest, {"preset": "1f1b", "stages": 2})
    assert (
        "2 processes with preset '1f1b' need 2 stages, but Shortest can be cut into one stage at "
        "most; allowed: no more processes than stages; use Trainer(devices=1)"
    ) in str(caught.value)
