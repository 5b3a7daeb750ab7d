"""Loaders go on behind the batch that a checkpoint was written behind, or it is said that not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tests.harness.processes import here
from tests.harness.rows import more
from tests.harness.runs import Result, run, saving, trained
from tests.harness.trainers import assert_same

pytestmark = pytest.mark.multi
ROWS, PER_EPOCH, EPOCHS = 16, 4, 3
WITHIN = PER_EPOCH + 2  # a step in the middle of the second epoch
PIPELINE = {"preset": "1f1b", "stages": ["net.2"], "num_microbatches": 2}
REPLICAS = {"preset": "cyclic_dp", "stages": 2}
WIDE = PIPELINE | {"replicas": 2}
EXPECTED = ["The checkpoint was written", "You're resuming from a checkpoint"]


# ---------------------------------------------------------------------- data


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Draws something for each row."""

    def __init__(self, num: int = ROWS) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return torch.randn(4) + k, torch.randn(1)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Has rows and no state."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (Rows()[k] for k in range(ROWS))


class Backwards(Sampler[int]):
    """Is nobody's but this test's."""

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(ROWS)))

    def __len__(self) -> int:
        return ROWS


class Batches:
    """Is no DataLoader."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(Rows(), 4))

    def __len__(self) -> int:
        return PER_EPOCH


def stateful(**options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = [(torch.randn(4) + k, torch.randn(1)) for k in range(ROWS)]  # it skips without reading
    return StatefulDataLoader(rows, 4, shuffle=True, **options)


def make_loader(kind: str) -> Any:
    """Make a loader; beforehand, rows may be drawn, which are the same in all runs."""
    options: dict[str, Any] = {}
    if kind.endswith("workers") or kind == "persistent":
        options = {"num_workers": 2, "multiprocessing_context": "fork"}
    if kind.startswith("stateful"):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return stateful(**options)
    if kind == "stream":
        return DataLoader(Stream(), 4)
    if kind == "sampler":
        return DataLoader(Rows(), 4, sampler=Backwards())
    if kind == "iterable":
        return Batches()
    if kind == "generator":
        options["generator"] = torch.Generator().manual_seed(3 + here().rank)
    if kind == "persistent":
        options["persistent_workers"] = True
    is_last = here().rank == here().num_ranks - 1
    fewer = kind == "fewer" or (kind == "fewer on the last" and is_last)
    return DataLoader(Rows(8 if fewer else ROWS), 4, shuffle=True, **options)


# ---------------------------------------------------------------------- runs


class Reader(LightningModule):
    """Notes its batches, and draws where hooks may.

    Args:
        start: the step with which it begins.
        asks: whether its optimizer asks for the number of steps, for which loaders are made.
        draws: whether hooks draw random numbers.
    """

    def __init__(self, start: int, asks: bool, draws: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.seen: list[list[float]] = []
        self.asks, self.draws = asks, draws
        torch.manual_seed(100 + 17 * start + 3 * here().rank)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def on_train_start(self) -> None:
        if self.draws:
            torch.randn(here().rank + 1)

    def on_train_epoch_start(self) -> None:
        if self.draws:
            torch.randn(2)

    def on_train_batch_start(self, batch: Any, *args: Any) -> None:
        self.seen.append(batch[0][:, 0].tolist())

    def configure_optimizers(self) -> Any:
        if self.asks:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def seen(trainer: Any, module: Reader) -> list[list[float]]:
    return module.seen


def train(
    strategy: Any, n: int, kind: str, start: int = 0, file: Path | None = None, *,
    asks: bool = False, draws: bool = True, how: Callable[..., list[Result]] = trained,
    **flags: Any,
) -> list[Result]:  # fmt: skip
    if kind.startswith("stateful"):
        pytest.importorskip("torchdata")
    return how(
        partial(Reader, start, asks, draws), strategy, n, data=partial(make_loader, kind),
        look=seen, expects=EXPECTED, max_epochs=EPOCHS, ckpt_path=file, **flags,
    )  # fmt: skip


class Written:
    """A run that wrote a file of every step, and was never stopped."""

    def __init__(self, folder: Path, strategy: Any, n: int, kind: str, **flags: Any) -> None:
        self.folder, self.given = folder, (strategy, n, kind)
        self.flags = flags
        self.ranks = train(*self.given, **saving(folder), **flags)

    def file(self, step: int) -> Path:
        return self.folder / f"step={step}.ckpt"

    def goes_on(self, step: int) -> list[Result]:
        """Compare a run that goes on with the one that was never stopped."""
        strategy, n, kind = self.given
        one_each = strategy is REPLICAS or n == 1
        reads = range(n) if one_each else range(1, n, 2)  # those of a pipeline's first stage
        resumed = train(strategy, n, kind, step, self.file(step), **self.flags)
        for r, (rank, expected) in enumerate(zip(resumed, self.ranks, strict=True)):
            assert_same(rank.weights, expected.weights)
            assert r not in reads or rank.found == expected.found[step:], f"rank {r}"
        return resumed


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Return replicas, or a pipeline, that trained on what a plain loader gives."""

    @cache
    def write(which: str) -> Written:
        strategy, n = {"replicas": (REPLICAS, 2), "pipeline": (PIPELINE, 1)}[which]
        return Written(tmp_path_factory.mktemp(which), strategy, n, "plain")

    return write


# ---------------------------------------------------------------------- that go on


@pytest.mark.parametrize(
    ("strategy", "n", "kind"),
    [
        more(PIPELINE, 2, "plain"), (REPLICAS, 2, "plain"), more(PIPELINE, 2, "plain workers"),
        more(REPLICAS, 2, "plain workers"), more(WIDE, 4, "plain"), (PIPELINE, 2, "generator"),
        more(REPLICAS, 2, "generator"), more(PIPELINE, 2, "stateful"),
        (REPLICAS, 2, "stateful workers"),
    ],
    ids=lambda x: str(x)[:28],
)  # fmt: skip
def test_loaders_go_on_in_mid_epoch(
    strategy: dict[str, Any], n: int, kind: str, tmp_path: Path
) -> None:
    resumed = Written(tmp_path, strategy, n, kind).goes_on(WITHIN)
    assert not any("was written" in text for rank in resumed for text in rank.warned)


@pytest.mark.parametrize(
    ("strategy", "n", "kind"),
    [
        more(PIPELINE, 2, "generator"), more(PIPELINE, 2, "stateful"), (REPLICAS, 2, "plain"),
        more(PIPELINE | {"preset": "cyclic_mp"}, 2, "plain"),
        more(PIPELINE | {"preset": "pipedream_2bw"}, 2, "plain"), (PIPELINE, 1, "plain"),
    ],
)  # fmt: skip
def test_and_at_its_end(strategy: dict[str, Any], n: int, kind: str, tmp_path: Path) -> None:
    Written(tmp_path, strategy, n, kind, draws=False).goes_on(PER_EPOCH)


@pytest.mark.parametrize("kind", ["plain", more("stateful")])
def test_loaders_that_were_made_early_go_on_too(kind: str, tmp_path: Path) -> None:
    Written(tmp_path, PIPELINE, 2, kind, asks=True).goes_on(2)


@pytest.mark.parametrize("start", [PER_EPOCH, more(WITHIN)])
def test_orders_that_lightning_deals_are_those_of_their_epoch(start: int, tmp_path: Path) -> None:
    """Lightning tells samplers their epoch when loaders' workers have begun with the first's."""
    flags: dict[str, Any] = {"draws": start != PER_EPOCH, "use_distributed_sampler": True}
    Written(tmp_path, REPLICAS, 2, "plain workers", **flags).goes_on(start)


# ---------------------------------------------------------------------- that do not


@pytest.mark.parametrize(
    ("kind", "n", "text"),
    [
        more("stream", 1, "an IterableDataset (Stream) has no state"),
        ("sampler", 2, "a sampler has no state (Backwards)"),
        ("iterable", 1, "Batches, which is no DataLoader, has no state"),
        ("persistent", 1, "persistent_workers=True"),
    ],
)
def test_other_loaders_go_on_as_lightnings_do_which_is_said_once(
    kind: str, n: int, text: str, tmp_path: Path
) -> None:
    written = Written(tmp_path, PIPELINE, n, kind)
    resumed = train(PIPELINE, n, kind, 3, written.file(3))
    assert_said(resumed, text, "behind batch 3 of an epoch", "StatefulDataLoader")
    skipped = 0 if kind == "stream" else 3  # whose length Lightning does not know
    assert len(resumed[-1].found) == EPOCHS * PER_EPOCH - skipped


def assert_said(ranks: list[Result], *texts: str) -> None:
    (said,) = [x for x in ranks[0].warned if "behind batch" in x]
    for text in texts:
        assert text in said


def test_a_loader_that_has_fewer_batches_begins_anew(plain: Callable[[str], Written]) -> None:
    resumed = train(PIPELINE, 1, "fewer", 3, plain("pipeline").file(3))
    texts = "the training loader has 2", "behind batch 3 of an epoch", "StatefulDataLoader"
    assert_said(resumed, *texts)


def test_other_ranks_than_wrote_the_file_are_named(plain: Callable[[str], Written]) -> None:
    file = plain("replicas").file(WITHIN)
    resumed = train({"preset": "lockstep_dp"}, 3, "plain", WITHIN, file)
    assert_said(resumed, "by 2 ranks with loaders of their own; this", "behind batch 2")


def test_a_file_that_says_nothing_of_loaders_is_named(tmp_path: Path) -> None:
    written = Written(tmp_path, "auto", 1, "plain")
    resumed = train(PIPELINE, 2, "plain", WITHIN, written.file(WITHIN))
    assert_said(resumed, "does not say where the training loader was", "behind batch 2")


@pytest.mark.parametrize(
    ("strategy", "n", "start"), [more(PIPELINE, 2, 0), (WIDE, 4, 0), (REPLICAS, 2, 2)]
)
def test_numbers_of_batches_that_differ_are_refused(
    strategy: dict[str, Any], n: int, start: int, plain: Callable[[str], Written]
) -> None:
    file = plain("replicas").file(start) if start else None
    ends = train(strategy, n, "fewer on the last", start, file, how=run)
    assert "ConfigurationError" in {end.error for end in ends}
    for end in ends:
        assert "ranks have different numbers of train" in end.text
