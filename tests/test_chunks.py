"""Chunks: a stage's sums and parameters travel in K messages, with the bits of one.

Runs are compared with the sequential reference, which knows neither messages nor chunks; and of
what others than it tell apart (shards, dtypes on the wire, several rounds), with the run whose
messages are whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests import processes
from tests.corpus import Classifier, Reference, assert_same, fit

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
MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("n", "net", "preset", "stages", "chunks"),
    [pytest.param(*row, marks=() if row in ALWAYS else MORE) for row in ALL],
)
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
    "handed on": ({"preset": "weipipe"}, {}),
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


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("net", ["resnet", pytest.param("gpt2", marks=MORE)])
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
