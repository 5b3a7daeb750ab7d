"""Fits of local steps, and what each rank is to have behind them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

from lightning_cyclic import LocalSteps
from tests.harness.runs import Result, trained
from tests.harness.trainers import assert_same, weights_of
from tests.modules.classifier import Classifier, micro_batches
from tests.references.local_steps import LocalReference

NUM_STEPS = 8
MODULE = ("batchnorm_mlp", "adamw")
MAKE = partial(Classifier, *MODULE)
STAGES = ["net.3", "net.6"]  # that begin stages 1 and 2
LOST = ["Training ended"]  # steps that are in no outer weights
RULES: dict[str, tuple[LocalSteps, dict[int, list[int]]]] = {
    "every 3": (LocalSteps(every=3), {2: [0, 1, 2]}),
    "every 4": (LocalSteps(every=4), {3: [0, 1, 2]}),
    "each": (LocalSteps(every=1, outer_lr=0.5, outer_momentum=0.0), {0: [0, 1, 2]}),
    "in turn": (LocalSteps(every=4, in_turn=True), {1: [0], 2: [1], 3: [2]}),
    "far in turn": (LocalSteps(every=7, in_turn=True), {2: [0], 4: [1], 6: [2]}),
    "two at once": (LocalSteps(every=2, in_turn=True), {0: [0], 1: [1, 2]}),
    "late": (LocalSteps(every=3, delay=2), {2: [0, 1, 2]}),
    "late in turn": (LocalSteps(every=4, in_turn=True, delay=1), {1: [0], 2: [1], 3: [2]}),
    "later in turn": (
        LocalSteps(every=3, in_turn=True, delay=2, mixing=0.25),
        {0: [0], 1: [1], 2: [2]},
    ),
    "late, all outer": (LocalSteps(every=3, delay=1, mixing=0.0), {2: [0, 1, 2]}),
}


class Looks(Callback):
    """Note what validation looks at, and what has been sent."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.messages: Counter[Any] = Counter()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.append(weights_of(module))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.messages = Counter(trainer.strategy._training.transport.messages)


def looked_at(trainer: Any, module: Classifier) -> dict[str, Any]:
    (looks,) = [c for c in trainer.callbacks if isinstance(c, Looks)]
    found = {"losses": module.losses, "seen": looks.seen, "messages": looks.messages}
    return found | {"plan": trainer.strategy.plan}


def fit(rule: Any, n: int, **flags: Any) -> list[Result]:
    strategy = {"preset": "diloco", "weights": rule, "stages": STAGES} | flags.pop("more", {})
    callbacks = [Looks(), *flags.pop("callbacks", ())]
    data = flags.pop("data", partial(micro_batches, "vectors", NUM_STEPS))
    return trained(
        flags.pop("make", MAKE), strategy, n, look=flags.pop("look", looked_at), data=data,
        callbacks=callbacks, expects=[*LOST, *flags.pop("expects", ())], **flags,
    )  # fmt: skip


def expected(
    name: str, n: int, stage_of: dict[str, int], make: Any = MAKE, **numbers: Any
) -> LocalReference:
    rule, moments = RULES[name]
    given = {"lr": rule.outer_lr, "momentum": rule.outer_momentum, "delay": rule.delay}
    given |= {"mixing": rule.mixing} | numbers
    reference = LocalReference(
        n=n, num_steps=NUM_STEPS, every=rule.every, moments=moments, **given
    )
    return reference.run(make(), stage_of)


def assert_is(ranks: list[Result], reference: LocalReference, steps: int = NUM_STEPS) -> None:
    """Compare what ranks have with a reference, bit by bit; each has buffers of its own."""
    for w, rank in enumerate(ranks):
        assert rank.found["losses"] == reference.losses[w][-steps:]
        assert_same(rank.weights, reference.outer[-1] | reference.buffers[w], f"rank {w}")
