"""What options for late gradients do around one update, stage by stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cyclic.plan import Plan, make_plan
from lightning_cyclic.plugin.late_gradients import Compensation

LATE, FRESH = 0, 2  # stages of three, whose gradients are two updates old, and new


def plan_of(warmup_steps: int = 0) -> Plan:
    return make_plan("pipedream", num_stages=3, num_workers=3, warmup_steps=warmup_steps)


def compensation(*, error_feedback: bool = False, lr_annealing_steps: int = 0) -> Compensation:
    chosen: Any = SimpleNamespace(
        error_feedback=error_feedback, lr_annealing_steps=lr_annealing_steps
    )
    return Compensation(chosen)


def weight(gradient: float | None = 1.0) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(2))
    p.grad = None if gradient is None else torch.full((2,), gradient)
    return p


def updated(made: Compensation, plan: Plan, t: int, j: int, p: nn.Parameter, by: float) -> float:
    with made.corrected(plan, t, {j: [p]}):
        p.data -= by
    return float(p.detach()[0])


def test_late_stages_are_corrected_and_fresh_ones_are_not() -> None:
    made, plan, late, fresh = compensation(error_feedback=True), plan_of(), weight(), weight()
    steps = [(late, LATE), (fresh, FRESH)]
    assert [updated(made, plan, 0, j, p, 1.0) for p, j in steps] == [-2.0, -1.0]
    assert [updated(made, plan, 1, j, p, 4.0) for p, j in steps] == [-9.0, -5.0]  # 8 - 1 more
    assert made.state({"late": late, "fresh": fresh}).keys() == {"late"}


def test_synchronous_steps_are_neither_corrected_nor_remembered() -> None:
    made, plan, p = compensation(error_feedback=True), plan_of(2), weight()
    assert updated(made, plan, 1, LATE, p, 1.0) == -1.0
    assert made.state({"p": p}) == {}
    assert updated(made, plan, 2, LATE, p, 1.0) == -3.0


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    made, plan, p = compensation(error_feedback=True), plan_of(), weight()
    updated(made, plan, 0, LATE, p, 1.0)
    p.grad = None
    assert updated(made, plan, 1, LATE, p, 0.0) == -2.0
    assert float(made.state({"p": p})["p"][0]) == 1.0


def test_nothing_is_done_unasked() -> None:
    made, p = compensation(), weight()
    assert updated(made, plan_of(), 0, LATE, p, 1.0) == -1.0
    assert made.state({"p": p}) == {}
    made.put_state({"p": torch.ones(2)}, {"p": p})
    assert made.state({"p": p}) == {}


def test_what_is_remembered_goes_on_elsewhere() -> None:
    made, plan, p, q = compensation(error_feedback=True), plan_of(), weight(), weight()
    updated(made, plan, 0, LATE, p, 1.0)
    other = compensation(error_feedback=True)
    other.put_state(made.state({"p": p}), {"p": q})
    q.data.copy_(p.data)
    assert updated(other, plan, 1, LATE, q, 3.0) == updated(made, plan, 1, LATE, p, 3.0) == -7.0
    other.put_state({}, {"p": q})
    assert other.state({"p": q}) == {}


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_learning_rates_rise_from_those_of_the_delay(lr: Any) -> None:
    made, plan, groups = compensation(lr_annealing_steps=4), plan_of(3), [{"lr": lr, "beta": 1}]
    late = [float(made.annealed(plan, t, LATE, groups)[0]["lr"]) for t in range(8)]
    fresh = [float(made.annealed(plan, t, FRESH, groups)[0]["lr"]) for t in range(8)]
    assert late[:4] == [0.5, 0.5, 0.5, 0.25]  # behind three synchronous steps, half
    assert late[3] < late[4] < late[5] < late[6] < late[7] == 0.5
    assert fresh == [0.5] * 8
    assert groups == [{"lr": lr, "beta": 1}]
    assert float(lr) == 0.5
