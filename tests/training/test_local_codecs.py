"""Codecs under local steps: what is encoded are differences of weights, each worker's its own."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cyclic import Dct, LocalSteps, PowerSgd, TopK
from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.codecs.choice import codec_of
from tests.harness.local_steps import LOST, RULES, assert_is, expected, fit
from tests.harness.rows import more
from tests.harness.runs import Result, saving, trained
from tests.harness.trainers import assert_same
from tests.modules.classifier import Classifier
from tests.training.test_compression import Net, own_batches

pytestmark = pytest.mark.multi

MAKE = partial(Classifier, "wide_mlp", "adamw")
DCT = Dct(density=0.05, threshold_every=2)
TOP = TopK(density=0.1)
POWER = PowerSgd(rank=2)


def coded(name: str, n: int, codec: Any, *, options: Any = None, **flags: Any) -> list[Result]:
    given = {"compress": codec} | (options or {})
    return fit(RULES[name][0], n, make=MAKE, more=given, **flags)


# ---------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("name", "n", "codec", "options"),
    [
        ("every 3", 2, TOP, {}), ("in turn", 4, DCT, {}), ("every 4", 2, "int8", {}),
        ("far in turn", 2, POWER, {"sharding": "optimizer"}),
        more("every 3", 4, TOP, {"sharding": "optimizer"}), more("each", 2, DCT, {}),
        more("every 3", 2, TOP, {"transport": "edges"}),
    ],
    ids=str,
)  # fmt: skip
def test_each_worker_encodes_its_differences_and_keeps_what_is_left(
    name: str, n: int, codec: Any, options: dict[str, Any]
) -> None:
    ranks = coded(name, n, codec, options=options)
    reference = expected(name, n, ranks[0].stage_of, make=MAKE, codec=codec_of(codec))
    assert_is(ranks, reference)
    plain = expected(name, n, ranks[0].stage_of, make=MAKE)
    weight = "net.3.weight"
    assert not torch.equal(reference.outer[-1][weight], plain.outer[-1][weight])


@pytest.mark.parametrize("codec", [TopK(density=1), more(Dct(density=1))], ids=str)
def test_at_density_1_bits_are_those_of_sums_that_travel(codec: Any) -> None:
    plain, whole = coded("every 3", 2, None), coded("every 3", 2, codec)
    for one, other in zip(plain, whole, strict=True):
        assert_same(other.weights, one.weights)
        assert other.found["losses"] == one.found["losses"]


def test_a_worker_that_is_alone_encodes_nothing() -> None:
    (plain,), (one,) = coded("every 4", 1, None), coded("every 4", 1, TOP)
    assert_same(one.weights, plain.weights)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("name", "step", "codec"),
    [("every 3", 4, TOP), ("in turn", 6, DCT), more("every 3", 6, POWER)],
    ids=str,
)
def test_a_run_goes_on_in_the_middle_of_a_period(
    name: str, step: int, codec: Any, tmp_path: Path
) -> None:
    whole = coded(name, 2, codec, **saving(tmp_path, every=step))
    file = tmp_path / f"step={step}.ckpt"
    again = coded(name, 2, codec, ckpt_path=file)
    for rank, other in zip(again, whole, strict=True):
        assert_same(rank.weights, other.weights)
    workers = torch.load(file, weights_only=True)["lightning_cyclic"]["codec"]["workers"]
    assert all("net.3.weight" in states for states in workers.values())


# ---------------------------------------------------------------------- bytes


def sent_of_differences(trainer: Any, module: Any) -> int:
    sent = Counter(trainer.strategy._training.transport.num_bytes)
    return sum(sent[x] for x in (Payload.S, Payload.T, Payload.H))


def bytes_per_step(preset: str, codec: Any, rule: Any = None) -> float:
    """Return what two workers send of gradients or differences in a step, of ten."""
    axes = {} if rule is None else {"weights": rule}
    options = {"preset": preset, "compress": codec, "stages": ["net.2", "net.4", "net.6"], **axes}
    ranks = trained(
        partial(Net, 512), options, 2, data=partial(own_batches, 2, 10),
        look=sent_of_differences, expects=LOST,
    )  # fmt: skip
    return sum(rank.found for rank in ranks) / 10


@pytest.mark.parametrize(("codec", "least"), [("int8", 19), (Dct(density=0.005), 350)], ids=str)
def test_few_bytes_of_few_steps(codec: Any, least: int) -> None:
    every_step = bytes_per_step("lockstep_dp", None)
    assert every_step / bytes_per_step("diloco", codec, LocalSteps(every=5)) > least
