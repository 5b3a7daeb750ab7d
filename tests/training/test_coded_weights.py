"""Codecs of new weights: what versions add to the ones before, and what they lack."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_cyclic import CyclicStrategy, Dct, PowerSgd, TopK
from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.codecs.choice import codec_of
from lightning_cyclic.runtime.codecs.weights import weight_codec_of
from tests.harness.rows import more
from tests.harness.runs import run, saving
from tests.harness.trainers import assert_same
from tests.references.scaled import precision
from tests.training.test_compression import (
    NUM_STEPS,
    STAGES,
    Bytes,
    Net,
    differ,
    fit,
    micro_batches,
    own_batches,
)

pytestmark = pytest.mark.multi

TOP = TopK(density=0.1)
BOTH = {"gradients": TOP, "weights": TOP}
INT8 = {"weights": "int8"}


def by_rule(n: int, compress: dict[str, Any]) -> dict[str, Tensor]:
    """Train by the rule of lockstep_dp: versions that all have, and what they lack."""
    module, left = Net(), dict[Any, Any]()
    of_gradients, of_weights = codec_of(compress.get("gradients")), compress["weights"]
    of_weights = weight_codec_of(of_weights)
    optimizer, named = module.configure_optimizers(), dict(module.named_parameters())
    lacks = {name: torch.zeros_like(p) for name, p in named.items()}
    for step in micro_batches(n):
        sums: dict[str, Tensor] = {}
        for i in range(n):
            optimizer.zero_grad()
            loss = module.loss(*step[i])
            torch.autograd.backward(loss, torch.ones_like(loss) / n)
            for name, p in named.items():
                assert p.grad is not None
                grad = p.grad.clone()
                if of_gradients is not None and of_gradients.takes(grad):
                    sent = of_gradients.encode(grad, left.setdefault((i, name), {}))
                    grad = of_gradients.decode(sent, torch.empty_like(p, device="meta"))
                sums[name] = sums[name] + grad if name in sums else grad
        versions = {name: p.detach().clone() for name, p in named.items()}
        for name, p in named.items():
            p.grad = sums[name]
            p.data.add_(lacks[name])
        optimizer.step()
        for name, p in named.items():
            if of_weights.takes(p):
                exact, version = p.detach().clone(), versions[name]
                sent = of_weights.encode(exact - version, {})
                p.data.copy_(version + of_weights.decode(sent, torch.empty_like(p, device="meta")))
                lacks[name] = exact - p.detach()
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize(
    ("n", "compress"), [(2, BOTH), (4, INT8), more(2, INT8), more(4, BOTH)], ids=str
)
def test_all_add_what_owners_send(n: int, compress: dict[str, Any]) -> None:
    expected = by_rule(n, compress)
    for rank in fit("lockstep_dp", n, compress):
        assert_same(rank.weights, expected)
    uncoded = fit("lockstep_dp", n, compress | {"weights": None})
    assert differ(uncoded[0].weights, expected)


@pytest.mark.parametrize(
    ("preset", "n", "compress"),
    [
        ("lockstep_dp", 2, BOTH),
        ("cyclic_dp", 2, BOTH),
        ("cyclic_dp", 4, INT8),
        ("cyclic_dp_v1", 2, INT8),
        more("cyclic_dp", 4, BOTH),
        more("cyclic_dp_v1", 4, BOTH),
        more("lockstep_dp", 4, INT8),
    ],
    ids=str,
)
def test_processes_have_the_bits_of_one(preset: str, n: int, compress: dict[str, Any]) -> None:
    (one,) = fit(preset, n, compress, 1)
    for rank in fit(preset, n, compress):
        assert_same(rank.weights, one.weights)


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (4, {"group_size": 2}),
        (2, {"sharding": "optimizer"}),
        more(2, {"slack": 2}),
    ],
    ids=["groups", "sharded optimizer", "slack"],
)
def test_all_workers_have_the_same_versions(n: int, options: dict[str, Any]) -> None:
    first, *others = fit("cyclic_dp", n, BOTH, options=options)
    for rank in others:
        assert_same(rank.weights, first.weights)
    assert differ(
        fit("cyclic_dp", n, {"gradients": TOP}, options=options)[0].weights, first.weights
    )


def test_versions_of_bfloat16_have_the_bits_of_one_process() -> None:
    (one,) = fit("cyclic_dp", 2, INT8, 1, precision="bf16-true")
    for rank in fit("cyclic_dp", 2, INT8, precision="bf16-true"):
        assert_same(rank.weights, one.weights)


def test_a_folder_has_what_weights_lack(tmp_path: Path) -> None:
    folders = {"save_distributed_checkpoint": True}
    whole = fit("cyclic_dp", 2, INT8, max_epochs=2, options=folders, **saving(tmp_path))
    file = tmp_path / "step=3.ckpt"
    again = fit("cyclic_dp", 2, INT8, ckpt_path=file, max_epochs=2, options=folders)
    for rank, expected in zip(again, whole, strict=True):
        assert_same(rank.weights, expected.weights)


class Zeroing(Callback):
    """Changes weights between steps."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == NUM_STEPS - 1:
            pl_module.net[0].weight.data.zero_()


def test_what_a_callback_changes_on_one_device_counts() -> None:
    (one,) = fit("lockstep_dp", 2, INT8, 1, callbacks=[Zeroing()])
    assert one.weights["net.0.weight"].abs().max() < 0.05  # but for one update


@pytest.mark.parametrize("preset", ["cyclic_dp", more("lockstep_dp"), more("cyclic_dp_v1")])
def test_at_density_1_weights_are_those_of_whole_ones_but_for_rounding(preset: str) -> None:
    """Of a version and a difference to it the sum is rounded."""
    plain, coded = (fit(preset, 2, x) for x in (None, {"weights": TopK(density=1)}))
    for one, other in zip(plain, coded, strict=True):
        for name, x in one.weights.items():
            torch.testing.assert_close(other.weights[name], x, rtol=1e-5, atol=1e-6)


def compared(trainer: Any, module: Any) -> int:
    steps: int = trainer.strategy.steps_compared
    return steps


def test_steps_of_one_device_are_compared_with_plain_ones() -> None:
    (one,) = fit("lockstep_dp", 2, BOTH, 1, look=compared, options={"verify": 2})
    assert one.found == 2


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_stop_anywhere_and_go_on_with_the_same_bits(num_ranks: int, tmp_path: Path) -> None:
    """Checkpoints end what is under way: versions come behind a flush, too."""
    whole = fit("cyclic_dp", 2, BOTH, num_ranks, max_epochs=2, **saving(tmp_path))
    for step in (1, 3, NUM_STEPS + 1):
        file = tmp_path / f"step={step}.ckpt"
        again = fit("cyclic_dp", 2, BOTH, num_ranks, ckpt_path=file, max_epochs=2)
        for rank, expected in zip(again, whole, strict=True):
            assert_same(rank.weights, expected.weights, f"from step {step}")


def test_what_weights_lack_is_dropped_where_it_is_of_no_use(tmp_path: Path) -> None:
    fit("lockstep_dp", 2, INT8, **saving(tmp_path, every=3))
    file = tmp_path / "step=3.ckpt"
    saved = torch.load(file, weights_only=True)
    left = saved["lightning_cyclic"]["left_of_weights"]
    assert left.keys() == {"net.0.weight", "net.2.weight", "net.4.weight"}
    assert all(x.any() for x in left.values())
    expects = ["The checkpoint ", "Be aware that when using"]
    ranks = fit("lockstep_dp", 2, None, ckpt_path=file, max_epochs=2, expects=expects)
    assert [text for text in ranks[0].warned if "changes of weights" in text]


class Freezing(Callback):
    """Freezes a layer for the second of three epochs."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[2].requires_grad_(trainer.current_epoch != 1)


def test_what_is_frozen_stays_as_all_have_it() -> None:
    flags: dict[str, Any] = {"callbacks": [Freezing()], "max_epochs": 3}
    (one,) = fit("lockstep_dp", 2, BOTH, 1, **flags)
    for rank in fit("lockstep_dp", 2, BOTH, **flags):
        assert_same(rank.weights, one.weights)


def weight_bytes(trainer: Any, module: Any) -> list[int]:
    (noted,) = (c for c in trainer.callbacks if isinstance(c, Bytes))
    return [x[Payload.P] for x in noted.sent]


def test_few_bytes_of_new_weights_are_sent() -> None:
    def sent(compress: Any) -> float:
        ranks = fit(
            "lockstep_dp", 2, compress, make=partial(Net, 512), look=weight_bytes,
            callbacks=[Bytes()],
        )  # fmt: skip
        return sum(rank.found[4] - rank.found[2] for rank in ranks) / 2

    plain, coded = sent(None), sent({"weights": TopK(density=0.005)})
    assert plain > 4 * 296_100
    assert plain > 50 * coded > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compress": {"weights": Dct(density=0.1)}}, r"Dct\(.*keeps what it leaves out.*TopK"),
        ({"compress": {"weights": PowerSgd(rank=2)}}, "keeps what it leaves out"),
        ({"compress": {"weights": "bf16"}}, "for 'weights' of 'int8'"),
        ({"compress": {"buffers": "int8"}}, "a mapping of these for 'gradients'"),
        ({"preset": "cyclic_zero"}, "do not all have the weights"),
        ({"preset": "diloco"}, "do not all have the weights"),
        ({"memory_limit_bytes": 10**9, "disk": "/tmp"}, "does not count what is kept of weights"),
    ],
)
def test_what_does_not_take_it(options: dict[str, Any], says: str) -> None:
    given = {"preset": "lockstep_dp", "compress": INT8, "stages": STAGES} | options
    with pytest.raises((ConfigurationError, PlanError), match=says):
        CyclicStrategy(**given)


def test_a_loss_scale_is_refused() -> None:
    strategy = {"preset": "lockstep_dp", "compress": INT8, "stages": STAGES}
    for end in run(Net, strategy, 2, data=partial(own_batches, 2), plugins=[precision()]):
        assert re.search(r"by whose loss scale updates are left out", end.text), end.text
