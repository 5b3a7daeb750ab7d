"""What Python reads of a batch is asked of it once, by whichever stage comes there first."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.partial_step.micro_batches import BatchCutter, BatchReads
from tests.harness import processes
from tests.harness.trainers import assert_same, make_trainer, weights_of
from tests.modules.blocks import Blocks, batches
from tests.runtime.partial_step.hand import replays_of, router_of, run_stage
from tests.runtime.partial_step.rows import Row, X

x, y, mask = torch.ones(8, 5), torch.ones(8), torch.ones(5, 5)


def test_what_is_copied_whole_is_said_once() -> None:
    said: list[str] = []
    cutter = BatchCutter(4, say=said.append)
    for batch in ({"x": x, "mask": mask, "y": y}, {"x": x[:6], "mask": mask, "y": y[:6]}):
        cutter.cut(batch)
    assert said == ["lightning_cyclic cuts batches into 4 micro-batches: cut: x, y; whole: mask"]
    assert cutter.report() == "\n".join(said)


def test_what_was_whole_stays_whole_with_as_many_rows_as_samples() -> None:
    cutter = BatchCutter(4)
    cutter.cut({"x": x, "mask": mask})
    for part in cutter.cut({"x": x[:5], "mask": mask}):
        assert part.batch["mask"] is mask


def test_plain_batches_are_not_spoken_of() -> None:
    said: list[str] = []
    cutter = BatchCutter(4, say=said.append)
    assert cutter.report() is None
    cutter.cut([x, y])
    assert said == []
    assert cutter.report() == (
        "lightning_cyclic cuts batches into 4 micro-batches: cut: batch[0], batch[1]"
    )


def test_the_hook_cuts_in_the_place_of_the_tensors() -> None:
    cutter = BatchCutter(2, lambda batch, num: [(batch[:3], 3), (batch[3:], 5)])
    assert [part.size for part in cutter.cut(x)] == [3, 5]
    plain = BatchCutter(2, lambda batch, num: list(batch.split(5)))
    assert [part.size for part in plain.cut(x)] == [5, 3]
    assert BatchCutter(1, lambda batch, num: 1 / 0).cut(x)[0].batch is x


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (None, "split_batch returned NoneType for 2 micro-batches; allowed: a list of 2"),
        ([], "split_batch returned 0 parts for 2"),
        ([x, x, x], "split_batch returned 3 parts for 2"),
        ([x, x], r"not clear: they have \[8, 8\] samples by their tensors, and the batch 8"),
        (["a", "b"], "not clear: .*return .*part, size"),
        ([(x, 3), (x, 0)], r"not clear: .*\[8, 8\]"),
        ([{"x": x, "z": torch.ones(3)}, x], r"not clear: .*z float32\[3\]; allowed: parts whose"),
    ],
    ids=str,
)
def test_what_a_hook_may_not_return_is_refused(parts: Any, said: str) -> None:
    with pytest.raises(StepError, match=said):
        BatchCutter(2, lambda batch, num: parts).cut(x)


class Waits(TorchDispatchMode):
    """Count numbers for which a host would wait."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Asking(Row):
    """Ask in the code before the first stage, between stages, and of what has been computed."""

    def forward(self, x):
        self.seen.append((x[0, 0].item(), bool((x > 2).any()), x[1].tolist()))
        h = self.a(x)
        if x.sum() > -1:
            h = self.b(h)
        if x.sum() > -1:
            h = self.c(h)
        return (h * float(h.max() < 9)).sum()


def run_all(model, reads):
    """Return how often a host would have waited, by stage, and what came out."""
    router, runs, waits, output = router_of(model, "b", "c"), [], [], None
    for target in range(3):
        with Waits() as counted:
            run, output = run_stage(router, partial(model, X.clone()), target, runs, reads=reads)
        runs.append(run)
        waits.append(counted.count)
    return waits, output


def test_each_stage_is_told_what_the_first_has_read():
    plain, model, remembering = Asking(), Asking(), Asking()
    expected = plain(X.clone())
    every, output = run_all(model, None)
    once, again = run_all(remembering, BatchReads())
    assert torch.equal(output, expected)
    assert torch.equal(again, expected)
    read = [x for x in plain.seen if isinstance(x, tuple)]
    assert [x for x in remembering.seen if isinstance(x, tuple)] == 3 * read
    assert every == [3, 4, 5]  # with one of the last stage's own result
    assert once == [3, 1, 1]


def test_regions_that_are_passed_are_watched_as_long_as_they_ask():
    """Ghosts alone would see the other events of a region, but not what is asked of the batch."""
    model, reads = Asking(), BatchReads()
    router, runs = router_of(model, "b", "c"), []
    for target in range(2):
        runs.append(run_stage(router, partial(model, X), target, runs, reads=reads)[0])
    replays = replays_of(router, runs[:1])
    for _ in range(3):
        with Waits() as waits:
            run_stage(router, partial(model, X), 1, runs[:1], replays=replays, reads=reads)
        assert waits.count == 0


class Reading(Blocks):
    def training_step(self, batch, batch_idx):
        if batch[0].sum() > 1e6:
            return None
        return super().training_step(batch, batch_idx)


class Masking(Blocks):
    """Ask another question where more rows are left, of which ghosts of another batch mislead."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        kept = x[:, 0] > 0
        h = self.net[0](x)[kept]
        if h.shape[0] > 1:
            scale = 2.0 if bool((x > 9).any()) else 1.0
        else:
            scale = 1.0 if bool((x < 9).any()) else 3.0
        return self.net[1:](torch.cat([h, h, -h])).square().mean() * scale


def rows():
    """Give micro-batches of which one or both rows are kept, in turn."""
    x = torch.randn(24, 8, 6, generator=torch.Generator().manual_seed(1))
    x[:, :, 0] = torch.tensor([1.0, 1, 1, -1, 1, 1, -1, 1])
    return DataLoader([(each, torch.zeros(8)) for each in x], batch_size=None)


def fit(remembers, module, loader):
    """Train on one device as on one where reading takes time."""
    made = count()
    if remembers:
        from lightning_cyclic.runtime.partial_step import batches

        usual = batches.Micro

        def micro(*args):
            next(made)
            return usual(*args[:4], BatchReads())

        batches.Micro = micro  # type: ignore[assignment,misc]
    module = module()
    trainer = make_trainer({"preset": "1f1b", "stages": 3, "num_microbatches": 4}, max_epochs=1)
    trainer.fit(module, loader())
    return weights_of(module), next(made)


@pytest.mark.multi
@pytest.mark.parametrize(("module", "loader"), [(Reading, partial(batches, 9)), (Masking, rows)])
def test_it_changes_no_bit(module, loader):
    for num_ranks in (1, 2):  # the second comes to a region first with what it has seen before
        every, once = (
            processes.run(fit, num_ranks, remembers, module, loader) for remembers in (False, True)
        )
        for (plain, none), (told, some) in zip(every, once, strict=True):
            assert none == 0 < some
            assert_same(plain, told)
