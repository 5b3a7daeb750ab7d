"""Loaders go on behind the batch that a checkpoint was written behind, or it is said that not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tests.harness import processes
from tests.harness.processes import here
from tests.harness.rows import in_turn, more
from tests.harness.trainers import assert_same, make_trainer, weights_of

pytestmark = pytest.mark.multi
ROWS, PER_EPOCH, EPOCHS = 24, 6, 3
PIPELINE = {"preset": "1f1b", "stages": ["net.2"], "num_microbatches": 2}
REPLICAS = {"preset": "cyclic_dp", "stages": 2}
WIDE = PIPELINE | {"replicas": 2}


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Draws something for each row."""

    def __len__(self) -> int:
        return ROWS

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


def stateful(**options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = [(torch.randn(4) + k, torch.randn(1)) for k in range(ROWS)]  # it skips without reading
    return StatefulDataLoader(rows, 4, shuffle=True, **options)


def make_loader(kind: str) -> Any:
    options: dict[str, Any] = {"batch_size": 4}
    if kind.endswith("workers"):
        options |= {"num_workers": 2, "multiprocessing_context": "fork"}
    if kind.startswith("stateful"):
        options.pop("batch_size")
        return stateful(**options)
    if kind == "stream":
        return DataLoader(Stream(), **options)
    if kind == "sampler":
        return DataLoader(Rows(), sampler=Backwards(), **options)
    if kind == "iterable":
        return list_of_batches()
    if kind == "generator":
        options["generator"] = torch.Generator().manual_seed(3 + here().rank)
    if kind == "persistent":
        options |= {"num_workers": 1, "multiprocessing_context": "fork"}
        options["persistent_workers"] = True
    return DataLoader(Rows(), shuffle=True, **options)


def list_of_batches() -> Any:
    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return iter(DataLoader(Rows(), 4))

        def __len__(self) -> int:
            return PER_EPOCH

    return Batches()


class Reader(LightningModule):
    """Notes its batches, and draws where hooks may.

    Args:
        asks: whether its optimizer asks for the number of steps, for which loaders are made.
        draws: whether hooks draw random numbers.
    """

    def __init__(self, asks: bool, draws: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.seen: list[list[float]] = []
        self.asks, self.draws = asks, draws

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


def fit(
    strategy: Any, kind: str, folder: str, start: int, flags: dict[str, Any]
) -> dict[str, Any]:
    asks, limit = flags.pop("asks", False), flags.pop("rows", None)
    module = Reader(asks, flags.pop("draws", True))
    torch.manual_seed(100 + 17 * start + 3 * here().rank)
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = make_trainer(
        strategy, max_epochs=EPOCHS, callbacks=[saver], enable_checkpointing=True, **flags
    )
    path = str(Path(folder, f"step={start}.ckpt")) if start else None
    seed = torch.get_rng_state()
    torch.manual_seed(5)  # of rows that are made beforehand
    data = make_loader(kind)
    torch.set_rng_state(seed)
    if limit is not None:
        data = DataLoader(torch.utils.data.Subset(Rows(), range(limit)), 4, shuffle=True)
    with warnings.catch_warnings(record=True) as caught:
        for text in ("The checkpoint was written", "You're resuming from a checkpoint"):
            warnings.filterwarnings("always", message=text)
        trainer.fit(module, data, ckpt_path=path)
    said = [str(each.message) for each in caught]
    return {"weights": weights_of(module), "seen": module.seen, "said": said}


def reads(strategy: dict[str, Any], num_ranks: int) -> list[int]:
    """Return the ranks whose loaders count: of a pipeline that of its first stage."""
    one_each = strategy is REPLICAS or num_ranks == 1
    return list(range(num_ranks)) if one_each else list(range(1, num_ranks, 2))


ROWS_OF_TESTS = [
    more(PIPELINE, 2, "plain"), (REPLICAS, 2, "plain"), more(PIPELINE, 2, "plain workers"),
    more(REPLICAS, 2, "plain workers"), (WIDE, 4, "plain"), (PIPELINE, 2, "generator"),
    more(REPLICAS, 2, "generator"), more(PIPELINE, 2, "stateful"),
    (REPLICAS, 2, "stateful workers"),
]  # fmt: skip


def go_on(
    strategy: dict[str, Any], n: int, kind: str, folder: Path, start: int, **flags: Any
) -> list[dict[str, Any]]:
    """Return a run that goes on, when it has been compared with one that was never stopped."""
    whole = processes.run(fit, n, strategy, kind, str(folder), 0, dict(flags))
    resumed = processes.run(fit, n, strategy, kind, str(folder), start, dict(flags))
    for rank in reads(strategy, n):
        assert resumed[rank]["seen"] == whole[rank]["seen"][start:], f"rank {rank}"
    for rank, expected in zip(resumed, whole, strict=True):
        assert_same(rank["weights"], expected["weights"])
    return resumed


@pytest.mark.parametrize(("strategy", "n", "kind"), ROWS_OF_TESTS, ids=lambda x: str(x)[:28])
def test_loaders_go_on_in_mid_epoch(
    strategy: dict[str, Any], n: int, kind: str, tmp_path: Path
) -> None:
    if kind.startswith("stateful"):
        pytest.importorskip("torchdata")
    resumed = go_on(strategy, n, kind, tmp_path, PER_EPOCH + 2)
    assert not any("was written" in text for rank in resumed for text in rank["said"])


@pytest.mark.parametrize(
    ("strategy", "n", "kind"),
    [
        more(PIPELINE, 2, "generator"), (PIPELINE, 2, "stateful"), (REPLICAS, 2, "plain"),
        more(PIPELINE | {"preset": "cyclic_mp"}, 2, "plain"),
        (PIPELINE | {"preset": "pipedream_2bw"}, 2, "plain"), (PIPELINE, 1, "plain"),
    ],
)  # fmt: skip
def test_and_at_its_end(strategy: dict[str, Any], n: int, kind: str, tmp_path: Path) -> None:
    if kind == "stateful":
        pytest.importorskip("torchdata")
    go_on(strategy, n, kind, tmp_path, PER_EPOCH, draws=False)


@pytest.mark.parametrize("kind", ["plain", more("stateful")])
def test_loaders_that_were_made_early_go_on_too(kind: str, tmp_path: Path) -> None:
    if kind == "stateful":
        pytest.importorskip("torchdata")
    go_on(PIPELINE, 2, kind, tmp_path, 2, asks=True)


@pytest.mark.parametrize("start", [PER_EPOCH, PER_EPOCH + 2])
def test_orders_that_lightning_deals_are_those_of_their_epoch(start: int, tmp_path: Path) -> None:
    """Lightning tells samplers their epoch when loaders' workers have begun with the first's."""
    flags: dict[str, Any] = {"use_distributed_sampler": True}
    go_on(REPLICAS, 2, "plain workers", tmp_path, start, draws=start != PER_EPOCH, **flags)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        more("stream", "an IterableDataset (Stream) has no state"),
        ("sampler", "a sampler has no state (Backwards)"),
        ("iterable", "Batches, which is no DataLoader, has no state"),
        ("persistent", "persistent_workers=True"),
        ("fewer", "the training loader has 3"),
    ],
)
def test_other_loaders_go_on_as_lightnings_do_which_is_said_once(
    kind: str, text: str, tmp_path: Path
) -> None:
    processes.run(fit, 2, PIPELINE, kind, str(tmp_path), 0, {})
    flags = {"rows": 12} if kind == "fewer" else {}
    resumed = processes.run(fit, 2, PIPELINE, kind, str(tmp_path), 4, flags)
    (said,) = [x for x in resumed[0]["said"] if "was written" in x]
    assert text in said
    assert "behind batch 4 of an epoch" in said
    assert "StatefulDataLoader" in said
    assert kind == "fewer" or len(resumed[1]["seen"]) == EPOCHS * PER_EPOCH - 4


@pytest.mark.parametrize(
    ("strategy", "n", "then", "num_then", "text"),
    [
        (REPLICAS, 2, {"preset": "lockstep_dp"}, 4, "by 2 ranks with loaders of their own; this"),
        ("auto", 1, PIPELINE, 2, "does not say where the training loader was"),
    ],
)
def test_other_ranks_than_wrote_the_file_are_named(
    strategy: Any, n: int, then: Any, num_then: int, text: str, tmp_path: Path
) -> None:
    processes.run(fit, n, strategy, "plain", str(tmp_path), 0, {})
    resumed = processes.run(fit, num_then, then, "plain", str(tmp_path), 8, {})
    (said,) = [x for x in resumed[0]["said"] if "behind batch 2" in x]
    assert text in said


def fit_counts(strategy: Any, folder: str, start: int, num_rows: list[int]) -> None:
    fit(strategy, "plain", folder, start, {"rows": num_rows[here().rank]})


@pytest.mark.parametrize(
    ("start", "strategy", "n"), in_turn([0, 2], [(REPLICAS, 2), (PIPELINE, 2), (WIDE, 4)])
)
def test_numbers_of_batches_that_differ_are_refused(
    strategy: dict[str, Any], n: int, start: int, tmp_path: Path
) -> None:
    if start:
        processes.run(fit, n, strategy, "plain", str(tmp_path), 0, {})
    rows = [ROWS] * (n - 1) + [ROWS - 4]
    with pytest.raises(processes.RanksFailedError, match="ranks have different numbers of train"):
        processes.run(fit_counts, n, strategy, str(tmp_path), start, rows)
