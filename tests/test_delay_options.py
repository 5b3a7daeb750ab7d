"""Options for old gradients end with the bits of their rules, in any number of processes.

One case by hand: pytest tests/test_delay_options.py -k "feedback and adamw"
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cyclic import ConfigurationError
from lightning_cyclic.strategy import CyclicStrategy
from tests import delayed_chain, processes, sequential
from tests.corpus import Classifier, MicroBatches, assert_same, loss_of
from tests.corpus import fit as fit_replicas
from tests.delayed_chain import Chain, fit

pytestmark = pytest.mark.multi

RULES = {
    "pipedream_2bw": "delayed", "cyclic_pipeline": "freshest", "pipedream": "stashed",
    "cyclic_mp": "freshest",
}  # fmt: skip
NUM_STEPS = 11


def run(
    num_ranks: int,
    make: Any,
    strategy: dict[str, Any],
    saved: tuple[str, int] | None = None,
    **flags: Any,
) -> list[dict[str, Tensor]]:
    function = partial(fit, make, strategy, NUM_STEPS, saved, **flags)
    return processes.run(function, num_ranks, time_limit_s=90.0)


def assert_follows(
    preset: str,
    num_ranks: int,
    make: Any,
    saved: tuple[str, int] | None = None,
    flags: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Compare every rank with the rule, and see that the options make a difference."""
    m = 1 if RULES[preset] == "stashed" else 4
    strategy = {"preset": preset, "num_micro": m} | options
    ranks = run(num_ranks, make, strategy, saved, **(flags or {}))
    follow = partial(delayed_chain.sequential, make, RULES[preset], m, NUM_STEPS)
    (expected,) = processes.run(partial(follow, **options), 1)
    (without,) = processes.run(follow, 1)
    for r, weights in enumerate(ranks):
        assert_same(weights, expected, f"rank {r}")
    name = "layers.0.weight"
    assert not torch.equal(expected[name], without[name])


# ---------------------------------------------------------------------- error feedback


@pytest.mark.parametrize(
    ("preset", "num_ranks", "optimizer"),
    [("pipedream_2bw", 1, "sgd"), ("pipedream_2bw", 2, "adamw"), ("cyclic_pipeline", 2, "sgd"),
     ("pipedream", 1, "adamw"), ("pipedream", 4, "sgd"), ("cyclic_mp", 2, "sgd")],
)  # fmt: skip
def test_error_feedback(preset: str, num_ranks: int, optimizer: str) -> None:
    make = partial(Chain, optimizer, "sawtooth")
    assert_follows(preset, num_ranks, make, error_feedback=True)


@pytest.mark.parametrize(("preset", "num_ranks"), [("pipedream_2bw", 2), ("pipedream", 1)])
def test_error_feedback_goes_on_from_a_checkpoint(
    preset: str, num_ranks: int, tmp_path: Any
) -> None:
    make = partial(Chain, "adamw", "sawtooth")
    assert_follows(preset, num_ranks, make, (str(tmp_path), 4), error_feedback=True)


def follow_replicas(num_workers: int, num_steps: int, stage_of: dict[str, int]) -> Any:
    """Train by the rule of cyclic_dp_v1 with error feedback."""
    torch.set_num_threads(1)
    module = Classifier("mlp", "sgd")
    named = dict(module.named_parameters())
    stages: list[Any] = [[] for _ in range(1 + max(stage_of.values()))]
    for n, p in named.items():
        stages[stage_of[n]].append(p)
    data = MicroBatches("vectors", num_workers * num_steps)
    before: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}

    def note() -> None:
        before.update({n: p.detach().clone() for n, p in named.items()})

    def correct(t: int) -> None:
        for n, p in named.items():
            update = before[n] - p.detach()
            p.data = p.data - (update - last.get(n, torch.zeros_like(update)))
            last[n] = update

    sequential.train(
        module, stages, module.configure_optimizers(),
        lambda _, t, i: loss_of(module.net, data[t * num_workers + i]),
        rule="delayed", num_workers=num_workers, num_steps=num_steps, before_update=note,
        after_update=correct,
    )  # fmt: skip
    return {n: x.detach().clone() for n, x in module.state_dict().items()}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_error_feedback_of_replicas(num_workers: int) -> None:
    strategy = {"preset": "cyclic_dp_v1", "stages": 3, "error_feedback": True}
    make = partial(Classifier, "mlp", "sgd")
    ranks = processes.run(fit_replicas, num_workers, make, strategy, 9, {"val_check_interval": 4})
    stage_of = ranks[0]["stage_of"]
    (expected,) = processes.run(follow_replicas, 1, num_workers, 9, stage_of)
    for rank in ranks:
        assert_same(rank["weights"], expected)


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("preset", "options", "text"),
    [
        (
            "1f1b",
            {"error_feedback": True},
            "error_feedback=True is of no use with weights",
        ),
        ("gpipe", {"error_feedback": 1}, r"error_feedback=1; allowed: True or False"),
        ("lockstep_dp", {"error_feedback": True}, r"'sync' \(preset 'lockstep_dp'\)"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    preset: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        CyclicStrategy(preset, **options)
    assert "allowed: " in str(caught.value)
    assert "use CyclicStrategy(" in str(caught.value)
