"""Chunks: a stage's sums and parameters travel in K messages, with the bits of one.

Runs are compared with the sequential reference, which knows neither messages nor chunks; and of
what others than it tell apart (shards, dtypes on the wire, several rounds), with the run whose
messages are whole.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.simulate import Network, best_chunks
from lightning_cyclic.strategy import CyclicStrategy
from tests import processes
from tests.corpus import (
    Classifier,
    Reference,
    assert_same,
    fit,
    make_trainer,
    train_data,
    weights_of,
)
from tests.rows import chosen

pytestmark = pytest.mark.multi
RULES = {"cyclic_dp": "freshest", "cyclic_dp_v1": "delayed", "lockstep_dp": "sync"}
NUM_STEPS = 7
ALL = [
    (n, net, preset, stages, chunks)
    for n in (2, 4)
    for net in ("mlp", "resnet", "gpt2")
    for preset in RULES
    for stages in (2, 4, 8)
    for chunks in (3, 16)
]
ALWAYS = {
    (2, "resnet", "cyclic_dp", 2, 16), (2, "gpt2", "cyclic_dp_v1", 8, 3),
    (4, "gpt2", "cyclic_dp", 4, 3), (4, "resnet", "cyclic_dp_v1", 4, 16),
    (4, "mlp", "lockstep_dp", 2, 3),
}  # fmt: skip


@pytest.mark.parametrize(("n", "net", "preset", "stages", "chunks"), chosen(ALL, ALWAYS))
def test_chunks_have_the_bits_of_the_sequential_run(
    n: int, net: str, preset: str, stages: int, chunks: int
) -> None:
    module = partial(Classifier, net, "adamw")
    strategy = {"preset": preset, "stages": stages, "chunks": chunks}
    ranks = processes.run(fit, n, module, strategy, NUM_STEPS, {"val_check_interval": 3})
    run = Reference(rule=RULES[preset], n=n, slack=0, num_batches=NUM_STEPS)
    run.run(module(), ranks[0]["stage_of"]).compare(ranks)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sharded": ({"preset": "cyclic_zero"}, {}),
    "half on the wire": ({"wire_dtype": "bf16"}, {}),
    "half, sharded": ({"preset": "cyclic_zero", "wire_dtype": "bf16"}, {}),
    "half weights": ({}, {"precision": "bf16-true"}),
    "half weights, sharded": ({"preset": "cyclic_zero"}, {"precision": "bf16-true"}),
    "rounds": ({}, {"accumulate_grad_batches": 2}),
    "rounds, sharded": ({"preset": "cyclic_zero"}, {"accumulate_grad_batches": 2}),
    "clipped together": ({"clip": "global"}, {"gradient_clip_val": 0.1}),
    "no names": ({"transport": "edges"}, {}),
    "no names, sharded": ({"preset": "cyclic_zero", "transport": "edges"}, {}),
}


OTHERS_ALWAYS = {
    (name, "resnet")
    for name in (
        "sharded", "half, sharded"  # clipped together: test_groups.py
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "net"), chosen([(x, y) for x in OTHERS for y in ("resnet", "gpt2")], OTHERS_ALWAYS)
)
def test_chunks_have_the_bits_of_whole_messages(name: str, net: str) -> None:
    strategy, trainer = OTHERS[name]
    module = partial(Classifier, net, "adamw")
    given = {"preset": "cyclic_dp", "stages": 4} | strategy
    whole, cut = (
        processes.run(fit, 3, module, given | {"chunks": chunks}, 2 * NUM_STEPS, trainer)
        for chunks in (1, 5)
    )
    for mine, other in zip(whole, cut, strict=True):
        assert mine["losses"] == other["losses"]
        assert_same(other["weights"], mine["weights"], name)


def go_on(preset: str, chunks: tuple[int, int], folder: str) -> dict[str, Any]:
    """Train with a number of chunks, and on from the middle of the epoch with another."""
    module, strategy = Classifier("resnet", "adamw"), {"preset": preset, "stages": 4}
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    flags = {"max_epochs": 1, "callbacks": [saver], "enable_checkpointing": True}
    first = make_trainer(strategy | {"chunks": chunks[0]}, **flags)
    first.fit(module, train_data(module, NUM_STEPS))
    assert first.strategy.plan.chunks == chunks[0]  # type: ignore[attr-defined]
    again = Classifier("resnet", "adamw")
    second = make_trainer(strategy | {"chunks": chunks[1]}, max_epochs=1)
    second.fit(again, train_data(again, NUM_STEPS), ckpt_path=f"{folder}/step=3.ckpt")
    assert second.global_step == NUM_STEPS
    assert second.strategy.plan.chunks == chunks[1]  # type: ignore[attr-defined]
    return {"first": weights_of(module), "second": weights_of(again)}


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1", "cyclic_zero"])
def test_a_run_goes_on_with_another_number_of_chunks(preset: str, tmp_path: Path) -> None:
    for rank in processes.run(go_on, 2, preset, (3, 5), str(tmp_path)):
        assert_same(rank["second"], rank["first"])


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PlanError, match="chunks=0; allowed: whole numbers from 1 on"):
        CyclicStrategy("cyclic_dp", chunks=0)
    with pytest.raises(PlanError, match="chunks=2 does not fit placement 'pipelined'"):
        CyclicStrategy("1f1b", chunks=2)


def test_more_chunks_than_there_is_are_refused_on_every_rank() -> None:
    strategy = {"preset": "cyclic_dp", "stages": 4, "chunks": 1_000_000}
    with pytest.raises(processes.RanksFailedError) as failed:
        processes.run(fit, 2, partial(Classifier, "mlp", "sgd"), strategy, NUM_STEPS, {})
    text = r"chunks=1000000, but stage 0 has no more to send than fits in \d+; allowed"
    assert len(re.findall(text, str(failed.value))) >= 2
    assert "ConfigurationError" in str(failed.value)


def test_auto_asks_the_network_that_is_given() -> None:
    slow = {"chunks": "auto", "bandwidth": "1Gbit/s", "latency": "50us"}
    module = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])

    def chunks(num_workers: int, may_cut: bool = True, **given: Any) -> object:
        options = CyclicStrategy(**given)._chosen
        known = dataclasses.replace(options, num_workers=num_workers)
        return known.with_chunks(module, may_cut=may_cut).plan(4, num_workers=num_workers).chunks

    cyclic = {"preset": "cyclic_dp", "stages": 4} | slow
    assert chunks(2, **cyclic) == 1
    assert chunks(32, **cyclic) == best_chunks(32, 4, 4 * 1024 * 1025 * 4, Network(
        latency_s=50e-6, bandwidth_bytes_per_s=1.25e8
    ))  # fmt: skip
    assert chunks(32, **cyclic) > 4
    assert chunks(32, may_cut=False, **cyclic) == 1
    assert chunks(32, preset="cyclic_dp", stages=4, chunks=7) == 7
    assert chunks(4, preset="1f1b", chunks="auto") == 1
    assert chunks(32, **cyclic | {"preset": "cyclic_zero"}) == 1  # owners are sent to, by all
    module.requires_grad_(False)
    assert chunks(32, **cyclic) == 1
    with pytest.raises(ConfigurationError, match="chunks 'all' is unknown; allowed: auto"):
        CyclicStrategy("cyclic_dp", chunks="all")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="is of no use with placement 'shared'"):
        CyclicStrategy("cyclic_mp", chunks="auto", bandwidth="1Gbit/s")
