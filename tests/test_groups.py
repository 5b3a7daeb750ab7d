"""Groups: workers that run side by side, staggered as single workers would be, bit by bit.

Runs are compared with the sequential reference, whose workers of a group read what one worker in
its place would; what it does not know (dtypes, several rounds) is compared with itself, over
another transport.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cyclic import CyclicStrategy, make_plan
from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.plugin.checks import check_hosts_of_groups
from tests.harness import processes
from tests.harness.trainers import assert_same, fit, make_trainer, train_data, weights_of
from tests.modules.classifier import Classifier
from tests.references.replicated import Reference

pytestmark = pytest.mark.multi
RULES = {
    "cyclic_dp": "freshest", "cyclic_dp_v1": "delayed", "cyclic_zero": "freshest",
    "lockstep_dp": "sync",
}  # fmt: skip
NUM_STEPS = 7


@pytest.mark.parametrize(
    ("n", "groups", "net", "preset", "stages"),
    [
        (2, 1, "resnet", "cyclic_dp", 4), (4, 2, "gpt2", "cyclic_dp", 4),
        (4, 2, "gpt2", "cyclic_dp_v1", 2), (4, 2, "resnet", "cyclic_zero", 4),
        (4, 2, "gpt2", "cyclic_zero", 4), (4, 1, "mlp", "lockstep_dp", 2),
    ],
)  # fmt: skip
def test_groups_have_the_bits_of_the_sequential_run(
    n: int, groups: int, net: str, preset: str, stages: int
) -> None:
    module = partial(Classifier, net, "adamw")
    strategy = {"preset": preset, "stages": stages, "group_size": n // groups}
    ranks = processes.run(fit, n, module, strategy, NUM_STEPS, {"val_check_interval": 3})
    run = Reference(rule=RULES[preset], n=n, groups=groups, slack=0, num_batches=NUM_STEPS)
    run.run(module(), ranks[0]["stage_of"]).compare(ranks)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rounds": ({}, {"accumulate_grad_batches": 2}),
    "clipped together": ({"clip_norm": "global"}, {"gradient_clip_val": 0.1}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_messages_without_names_bring_the_same_bits(name: str) -> None:
    strategy, trainer = OTHERS[name]
    module = partial(Classifier, "gpt2", "adamw")
    given = {"preset": "cyclic_dp", "stages": 4, "group_size": 2} | strategy
    named, others = (
        processes.run(fit, 4, module, given | {"transport": x}, 2 * NUM_STEPS, trainer)
        for x in ("named", "edges")
    )
    for mine, other in zip(named, others, strict=True):
        assert mine["losses"] == other["losses"]
        assert_same(other["weights"], mine["weights"], name)


def go_on(preset: str, folder: str) -> dict[str, Any]:
    """Train in groups, and on from the middle of the epoch in the same."""
    module = Classifier("resnet", "adamw")
    strategy = {"preset": preset, "stages": 4, "group_size": 2}
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    flags = {"max_epochs": 1, "callbacks": [saver], "enable_checkpointing": True}
    first = make_trainer(strategy, **flags)
    first.fit(module, train_data(module, NUM_STEPS))
    again = Classifier("resnet", "adamw")
    second = make_trainer(strategy, max_epochs=1)
    second.fit(again, train_data(again, NUM_STEPS), ckpt_path=f"{folder}/step=3.ckpt")
    assert second.global_step == NUM_STEPS
    assert second.strategy.plan.num_groups == 2  # type: ignore[attr-defined]
    return {"first": weights_of(module), "second": weights_of(again)}


def test_a_run_in_groups_goes_on(tmp_path: Path) -> None:
    for rank in processes.run(go_on, 4, "cyclic_dp", str(tmp_path)):
        assert_same(rank["second"], rank["first"])


class Sent(Callback):
    """Note what a rank has sent in a fit, by what it was."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        transport = trainer.strategy._training.transport
        self.messages, self.num_bytes = Counter(transport.messages), Counter(transport.num_bytes)


def fit_counting(strategy: dict[str, Any]) -> dict[str, Any]:
    module, sent = Classifier("mlp", "sgd"), Sent()
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[sent])
    trainer.fit(module, train_data(module, NUM_STEPS))
    made: Any = trainer.strategy
    sizes = Counter(dict.fromkeys(range(made.plan.num_stages), 0))
    for name, p in module.named_parameters():
        sizes[made.stage_of[name]] += p.numel() * p.element_size()
    num_tensors = len(list(module.parameters()))
    return {"sent": sent, "plan": made.plan, "sizes": sizes, "num_tensors": num_tensors}


LARGE = (Payload.S, Payload.T, Payload.H, Payload.P)


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1"])
def test_messages_and_bytes_are_those_of_the_program(preset: str) -> None:
    given = {"preset": preset, "stages": 4, "group_size": 2}
    ranks = processes.run(fit_counting, 4, given)
    plan = ranks[0]["plan"]
    for rank, program in zip(ranks, plan.program.first(NUM_STEPS), strict=True):
        sends = [a for a in program if a.kind is Kind.SEND and a.payload in LARGE]
        for payload in LARGE:
            of_it = [a for a in sends if a.payload is payload]
            assert rank["sent"].messages[payload] == len(of_it)
            least = sum(rank["sizes"][a.j] for a in of_it)
            most = least + len(of_it) * 512 * (rank["num_tensors"] + 1)
            assert least <= rank["sent"].num_bytes[payload] <= most
    hops = sum(rank["sent"].messages[Payload.S] for rank in ranks)
    assert hops == NUM_STEPS * 4  # each stage's sum, from one group to the other
    given_up = sum(rank["sent"].messages[Payload.H] for rank in ranks)
    assert given_up == NUM_STEPS * 4 * 2  # in each group, to who leads


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="group_size=0; allowed: whole numbers from 1 on"):
        CyclicStrategy("cyclic_dp", group_size=0)
    numbers: dict[str, Any] = {"num_stages": 4, "num_workers": 6}
    with pytest.raises(
        PlanError, match=r"group_size=4 with 6 workers; .* allowed: 1, 2, 3, 6; use group_size=3"
    ):
        make_plan("cyclic_dp", group_size=4, **numbers)
    with pytest.raises(PlanError, match=r"buffers that change .*\[1\].*accumulate_grad_batches=1"):
        make_plan("cyclic_dp", group_size=2, num_microbatches=12, relayed=[1], **numbers)


def test_groups_of_several_hosts_are_refused() -> None:
    plan = make_plan("cyclic_dp", num_stages=4, num_workers=4, group_size=2)
    check_hosts_of_groups(plan, ["a", "a", "b", "b"])
    with pytest.raises(
        ConfigurationError,
        match=r"group_size=2 with 4 ranks, but .*: 0 on a, 1 on b; allowed: .*group_size=1",
    ):
        check_hosts_of_groups(plan, ["a", "b", "b", "b"])


def test_a_number_of_groups_that_does_not_divide_the_ranks_is_refused_on_all_of_them() -> None:
    strategy = {"preset": "cyclic_dp", "stages": 4, "group_size": 3}
    with pytest.raises(processes.RanksFailedError) as failed:
        processes.run(fit, 2, partial(Classifier, "mlp", "sgd"), strategy, NUM_STEPS, {})
    assert str(failed.value).count("group_size=3 with 2 workers; all groups have as many") >= 2
