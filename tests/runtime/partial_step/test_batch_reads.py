"""What Python reads of a batch is asked of it once, by whichever stage comes there first."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_cyclic.runtime.partial_step.micro_batches import BatchReads
from tests import processes
from tests.corpus import assert_same, make_trainer, weights_of
from tests.runtime.partial_step.hand import replays_of, router_of, run_stage
from tests.runtime.partial_step.rows import Row, X
from tests.test_synchronisation import Net, data


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


def test_answers_are_known_by_their_place_and_their_question():
    reads, asked = BatchReads(), count()
    assert reads.read(0, 0, "item", lambda: next(asked)) == 0
    assert reads.read(0, 0, "item", lambda: next(asked)) == 0
    assert reads.read(0, 1, "item", lambda: next(asked)) == 1
    assert reads.read(1, 0, "item", lambda: next(asked)) == 2
    assert reads.read(0, 0, "__bool__", lambda: next(asked)) == 3  # another path
    assert reads.read(0, 2, "tolist", lambda: [next(asked)]) == [4]
    assert reads.read(0, 2, "tolist", lambda: [next(asked)]) == [5]


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


class Reading(Net):
    def training_step(self, batch, batch_idx):
        if batch[0].sum() > 1e6:
            return None
        return super().training_step(batch, batch_idx)


class Masking(Net):
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
        from lightning_cyclic.runtime.partial_step import session

        usual = session.Micro

        def micro(*args):
            next(made)
            return usual(*args[:4], BatchReads())

        session.Micro = micro  # type: ignore[assignment,misc]
    module = module()
    trainer = make_trainer({"preset": "1f1b", "stages": 3, "num_microbatches": 4}, max_epochs=1)
    trainer.fit(module, loader())
    return weights_of(module), next(made)


@pytest.mark.multi
@pytest.mark.parametrize(("module", "loader"), [(Reading, data), (Masking, rows)])
def test_it_changes_no_bit(module, loader):
    for num_ranks in (1, 2):  # the second comes to a region first with what it has seen before
        every, once = (
            processes.run(fit, num_ranks, remembers, module, loader) for remembers in (False, True)
        )
        for (plain, none), (told, some) in zip(every, once, strict=True):
            assert none == 0 < some
            assert_same(plain, told)
