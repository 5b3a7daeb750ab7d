"""Batches that only their user can cut: the examples of docs/batches.md train, bit by bit.

Each example's plain run accumulates the very parts that split_batch makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.pipeline_session import split_hook
from tests.harness import processes
from tests.harness.rows import more
from tests.harness.runs import run
from tests.harness.trainers import assert_same, make_trainer

pytestmark = pytest.mark.multi
PAGE = Path(__file__).parents[2] / "docs" / "batches.md"
NUM_STEPS = 3


class Example(LightningModule):
    """A module of one of the page's examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class Graphs(Example):
    stages = ("second",)

    def __init__(self) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.first, self.second = GCNConv(4, 8), GCNConv(8, 8)
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        x = self.first(batch.x, batch.edge_index).relu()
        x = self.second(x, batch.edge_index).relu()
        x = global_mean_pool(x, batch.batch, batch.num_graphs)
        return F.cross_entropy(self.head(x), batch.y)

    @staticmethod
    def batch(g: torch.Generator) -> Any:
        from torch_geometric.data import Batch, Data

        graphs = []
        for n in (3, 5, 4, 6):
            edges = torch.randint(0, n, (2, 3 * n), generator=g)
            y = torch.randint(0, 3, (1,), generator=g)
            graphs.append(Data(x=torch.randn(n, 4, generator=g), edge_index=edges, y=y))
        return Batch.from_data_list(graphs)


class Detection(Example):
    stages = ("net.2",)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        found = self.net(torch.stack(images)).mean((2, 3))
        wanted = torch.stack([target["boxes"].mean(0) for target in targets])
        return F.mse_loss(found, wanted)

    @staticmethod
    def batch(g: torch.Generator) -> Any:
        samples = [
            (torch.randn(3, 6, 6, generator=g), {"boxes": torch.rand(n, 4, generator=g)})
            for n in (1, 2, 4, 3)
        ]
        return tuple(zip(*samples, strict=True))


class TimeMajor(Example):
    stages = ("head",)

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 5), nn.Linear(5, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.rnn(x)[0]).flatten(0, 1), y.flatten())

    @staticmethod
    def batch(g: torch.Generator) -> Any:
        return torch.randn(6, 4, 3, generator=g), torch.randint(0, 2, (6, 4), generator=g)


class Padded(Example):
    """Counts its padding, so that it matters how much there is."""

    stages = ("head",)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.embed(batch["tokens"]).mean(1)).square().mean()

    @staticmethod
    def batch(g: torch.Generator) -> Any:
        lengths = torch.tensor([3, 7, 2, 6])
        tokens = torch.randint(1, 9, (4, 7), generator=g)
        return {"tokens": tokens * (torch.arange(7) < lengths[:, None]), "lengths": lengths}


EXAMPLES: list[type[Any]] = [Graphs, Detection, TimeMajor, Padded]


def hook_of(example: type[Any]) -> Callable[..., Any]:
    """Return what the page has for an example."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.M | re.S)
    assert len(blocks) == len(EXAMPLES)
    names: dict[str, Any] = {"torch": torch}
    exec(blocks[EXAMPLES.index(example)], names)
    return names["split_batch"]  # type: ignore[no-any-return]


def batches_of(example: type[Any]) -> list[Any]:
    g = torch.Generator().manual_seed(3)
    return [example.batch(g) for _ in range(NUM_STEPS)]


class Data(LightningDataModule):
    """Gives the batches of an example, in parts if a hook is given, or has the hook.

    Args:
        example: whose they are.
        where: "parts", whether "data" has the hook, or neither.
    """

    def __init__(self, example: type[Any], where: str = "") -> None:
        super().__init__()
        self.batches, hook = batches_of(example), hook_of(example)
        if where == "parts":
            self.batches = [part for b in self.batches for part, size in hook(None, b, 2)]
        elif where == "data":
            self.split_batch = partial(hook, self)

    def train_dataloader(self) -> Any:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


def with_hook(example: type[Any]) -> Any:
    """Return an example's module that cuts its batches."""
    example.split_batch = hook_of(example)
    return example()


def strategy_of(stages: Any) -> dict[str, Any]:
    return {"preset": "1f1b", "num_microbatches": 2, "stages": stages}


@cache
def plainly(example: type[Any]) -> dict[str, Tensor]:
    flags = {"max_epochs": 2, "accumulate_grad_batches": 2}
    return run(example, "auto", 1, data=partial(Data, example, "parts"), **flags)[0].weights


@pytest.mark.parametrize(
    ("example", "num_ranks", "where"),
    [*((example, 2, "module") for example in EXAMPLES),
     *(more(example, 1, "module") for example in EXAMPLES), (TimeMajor, 1, "data")],
)  # fmt: skip
def test_examples_of_the_page_train_as_on_one_device(
    example: type[Any], num_ranks: int, where: str
) -> None:
    make = partial(with_hook, example) if where == "module" else example
    data, strategy = partial(Data, example, where), strategy_of(list(example.stages))
    for cut in run(make, strategy, num_ranks, data=data, max_epochs=2):
        assert not cut.error, cut.text
        assert cut.global_step == 2 * NUM_STEPS
        assert_same(cut.weights, plainly(example))


def report_of(example: type[Any]) -> str:
    trainer = make_trainer(strategy_of(list(example.stages)), max_epochs=1)
    trainer.fit(with_hook(example), Data(example))
    return trainer.strategy.report()  # type: ignore[attr-defined]


def test_the_report_says_that_the_hook_cuts_batches() -> None:
    assert "split_batch cuts batches into 2" in processes.run(report_of, 1, TimeMajor)[0]


def test_the_hook_of_the_module_wins_and_must_be_callable() -> None:
    class Has:
        def __init__(self, hook: Any) -> None:
            self.split_batch = hook

    first, second = (lambda batch, num: [batch]), (lambda batch, num: [])
    assert split_hook(Has(first), Has(second)) is first
    assert split_hook(TimeMajor(), Has(second)) is second
    assert split_hook(TimeMajor(), None) is None
    with pytest.raises(ConfigurationError, match=r"Has.split_batch is of type int; allowed: a"):
        split_hook(Has(3), None)


# ---------------------------------------------------------------------- without the hook


def test_graphs_are_refused_without_the_hook() -> None:
    (end,) = run(Graphs, strategy_of(2), 1, data=partial(Data, Graphs))
    assert end.error == "StepError"
    assert "x'] float32[18, 4]" in end.text
    assert "edge_index'] int64[2, 54]" in end.text
    assert "DataBatch; allowed: " in end.text


@pytest.mark.parametrize(("num_ranks", "stages"), [more(1, 1), (1, 2), (2, 2)])
def test_layers_that_would_take_samples_for_time_steps_are_refused(
    num_ranks: int, stages: int
) -> None:
    said = "rnn, GRU without batch_first, was given [3, 4, 3] for a micro-batch of 3 samples"
    ends = run(TimeMajor, strategy_of(stages), num_ranks, data=partial(Data, TimeMajor))
    assert all(end.error == "StepError" and end.text.startswith(said) for end in ends)


class Transposed(TimeMajor):
    """Has batches first, and turns them for a layer that has time first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([each.transpose(0, 1) for each in batch], batch_idx)

    @staticmethod
    def batch(g: torch.Generator) -> Any:
        return tuple(each.transpose(0, 1) for each in TimeMajor.batch(g))


def transposed() -> DataLoader[Any]:
    return DataLoader(batches_of(Transposed), batch_size=None)  # type: ignore[arg-type]


def test_a_batch_that_is_turned_for_its_layer_trains() -> None:
    (end,) = run(Transposed, strategy_of(["head"]), 1, data=transposed)
    assert end.global_step == NUM_STEPS
