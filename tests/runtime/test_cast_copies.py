"""Low-precision copies of weights: how many are alive, and the bits of plain autocast."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.cast_copies import CastCopies, cast_of
from tests.harness import processes
from tests.harness.trainers import assert_same, make_trainer, weights_of

WIDTH = 17
RUNS = ("cyclic_dp", "cyclic_zero")


class Alive(TorchDispatchMode):
    """Count the copies of weights that are alive: of which tensors of one shape were made."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default and made.dtype is torch.bfloat16
        if is_copy and made.shape == (WIDTH, WIDTH):
            self._copies.append(StorageWeakRef(made.untyped_storage()))
        return made

    @property
    def count(self) -> int:
        return len({x.cdata for x in self._copies if not x.expired()})


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        yield


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def losses(net: nn.Module, copies: CastCopies | None) -> list[Tensor]:
    found = []
    for k in range(4):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(k))
        with autocast():
            if copies is None:
                found.append(net(x).float().square().mean())
            else:
                with copies.shared():
                    found.append(net(x).float().square().mean())
    return found


@pytest.mark.parametrize(("shares", "expected"), [(True, 2), (False, 8)])
def test_graphs_of_many_micro_batches_hold_one_copy_of_each_weight(
    shares: bool, expected: int
) -> None:
    net = layers()  # whose first weight no gradient goes through
    with Alive() as alive:
        made = losses(net, CastCopies() if shares else None)
        assert alive.count == expected
        for loss in made:
            loss.backward()
        made.clear()
        del loss
        assert alive.count == 0


def test_gradients_have_the_bits_of_graphs_with_copies_of_their_own() -> None:
    apart, shared = layers(), layers()
    for loss in losses(apart, None):
        loss.backward()
    for loss in losses(shared, CastCopies()):
        loss.backward()
    for p, q in zip(apart.parameters(), shared.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_weight_that_has_changed_is_another() -> None:
    net, copies = layers(), CastCopies()
    with Alive() as alive:
        before = losses(net, copies)
        with torch.no_grad():
            net[1].weight.mul_(2)
        after = losses(net, copies)
        assert alive.count == 3  # two of the one, one of the other
    assert before[0] != after[0]


def test_functions_that_take_no_hooks_are_refused_by_name() -> None:
    net, x = layers(), torch.ones(2, WIDTH)
    with (
        pytest.raises(StepError, match=r"under autocast .*use precision='bf16-true'"),
        CastCopies().shared(),
        autocast(),
    ):
        torch.func.grad(lambda y: net(y).float().sum())(x)
    with pytest.raises(RuntimeError, match="^own$"), CastCopies().shared():
        raise RuntimeError("own")


def test_nothing_is_known_of_weights_that_are_gone() -> None:
    copies = CastCopies()
    for _ in range(3):  # as versions come and go
        for loss in losses(layers(), copies):
            loss.backward()
        del loss
        gc.collect()
        assert not copies._known


def test_what_is_no_copy_of_a_parameter() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    assert cast_of(weight) is None
    assert cast_of(torch.randn(3, 3).bfloat16()) is None
    assert cast_of((2 * weight).bfloat16()) is None
    assert cast_of(weight.bfloat16() + 1) is None
    copy = weight.bfloat16()
    for x in (copy, copy.t(), copy[1:]):
        found = cast_of(x)
        assert found is not None
        assert found.parameter is weight
        assert found.copy is copy


# ---------------------------------------------------------------------- runs


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.alive = Alive()
        self.most: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch).float(), batch)
        self.most.append(self.alive.count)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def fit(strategy: Any, rows: int, accumulate: int = 1) -> dict[str, Any]:
    module, g = Net(), torch.Generator().manual_seed(3)
    batches = [torch.randn(rows, WIDTH, generator=g) for _ in range(6 * accumulate)]
    trainer = make_trainer(
        strategy, max_epochs=1, precision="bf16-mixed", accumulate_grad_batches=accumulate
    )
    with module.alive:
        trainer.fit(module, DataLoader(batches, batch_size=None))
    return {
        "weights": weights_of(module),
        "most": max(module.most[len(module.most) // 2 :], default=0),
    }


@pytest.mark.multi
@pytest.mark.parametrize(("preset", "versions"), [("gpipe", 1), ("1f1b", 1), ("pipedream_2bw", 2)])
def test_a_pipeline_holds_one_copy_for_each_version(preset: str, versions: int) -> None:
    strategy = {"preset": preset, "stages": 2, "num_microbatches": 4, "verify": False}
    alone, *_ = processes.run(fit, 1, strategy, 8)
    # of four weights, whichever micro-batches are under way; the first is not looked at
    assert 0 < alone["most"] <= 3 * versions
    for rank in processes.run(fit, 2, strategy, 8):
        assert_same(rank["weights"], alone["weights"])


@pytest.mark.multi
def test_sharded_weights_leave_no_copy_behind() -> None:
    """Each worker has two stages of four: none of the other's is alive where the loss is."""
    ranks = {p: processes.run(fit, 2, {"preset": p, "stages": 4}, 8) for p in RUNS}
    assert [rank["most"] for rank in ranks["cyclic_dp"]] == [3, 3]
    for rank, whole in zip(ranks["cyclic_zero"], ranks["cyclic_dp"], strict=True):
        assert rank["most"] <= 2
        assert_same(rank["weights"], whole["weights"])
