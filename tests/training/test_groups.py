"""Groups: workers that run side by side, staggered as single workers would be.

Their bits are in test_parity.py, and in test_clipping.py over another transport.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_cyclic import CyclicStrategy, make_plan
from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plan import program_of
from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.plugin.checks import check_hosts_of_groups
from tests.harness.pipelines import Job, pipelines, prepare
from tests.harness.rows import more

NUM_STEPS = 4


class Sent(Callback):
    """Note what a rank has sent in a fit, by what it was."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        transport = trainer.strategy._training.transport
        self.messages, self.num_bytes = Counter(transport.messages), Counter(transport.num_bytes)


def fit_counting(job: Job, strategy: dict[str, Any]) -> dict[str, Any]:
    sent = Sent()
    run = prepare(job, strategy, [sent])
    run.trainer.fit(run.module, run.batches)
    made: Any = run.trainer.strategy
    sizes = Counter(dict.fromkeys(range(made.plan.num_stages), 0))
    for name, p in run.module.named_parameters():
        sizes[made.stage_of[name]] += p.numel() * p.element_size()
    num_tensors = len(list(run.module.parameters()))
    return {"sent": sent, "plan": made.plan, "sizes": sizes, "num_tensors": num_tensors}


LARGE = (Payload.S, Payload.T, Payload.H, Payload.P)


@pytest.mark.multi
@pytest.mark.parametrize("preset", ["cyclic_dp", more("cyclic_dp_v1")])
def test_messages_and_bytes_are_those_of_the_program(preset: str) -> None:
    job = Job(case="siamese", num_steps=NUM_STEPS, num_epochs=1)
    given = {"preset": preset, "stages": 4, "group_size": 2}
    ranks = pipelines(job, 4, function=fit_counting, **given)
    plan = ranks[0]["plan"]
    for rank, program in zip(ranks, program_of(plan).first(NUM_STEPS), strict=True):
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
    with pytest.raises(ConfigurationError, match=r"group_size=2 .* without num_microbatches"):
        CyclicStrategy("cyclic_dp", group_size=2, num_microbatches=4)
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
