"""What error feedback does around one update, stage by stage."""

from __future__ import annotations

import torch
from torch import nn

from lightning_cyclic.plan import Plan, make_plan
from lightning_cyclic.plugin.error_feedback import ErrorFeedback

LATE, FRESH = 0, 2  # stages of three, whose gradients are two updates old, and new


def plan_of() -> Plan:
    return make_plan("pipedream", num_stages=3, num_workers=3)


def weight(gradient: float | None = 1.0) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(2))
    p.grad = None if gradient is None else torch.full((2,), gradient)
    return p


def updated(made: ErrorFeedback, plan: Plan, j: int, p: nn.Parameter, by: float) -> float:
    with made.corrected(plan, {j: [p]}):
        p.data -= by
    return float(p.detach()[0])


def test_late_stages_are_corrected_and_fresh_ones_are_not() -> None:
    made, plan, late, fresh = ErrorFeedback(is_on=True), plan_of(), weight(), weight()
    steps = [(late, LATE), (fresh, FRESH)]
    assert [updated(made, plan, j, p, 1.0) for p, j in steps] == [-2.0, -1.0]
    assert [updated(made, plan, j, p, 4.0) for p, j in steps] == [-9.0, -5.0]  # 8 - 1 more
    assert made.state({"late": late, "fresh": fresh}).keys() == {"late"}


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    made, plan, p = ErrorFeedback(is_on=True), plan_of(), weight()
    updated(made, plan, LATE, p, 1.0)
    p.grad = None
    assert updated(made, plan, LATE, p, 0.0) == -2.0
    assert float(made.state({"p": p})["p"][0]) == 1.0


def test_nothing_is_done_unasked() -> None:
    made, p = ErrorFeedback(is_on=False), weight()
    assert updated(made, plan_of(), LATE, p, 1.0) == -1.0
    assert made.state({"p": p}) == {}
    made.put_state({"p": torch.ones(2)}, {"p": p})
    assert made.state({"p": p}) == {}


def test_what_is_remembered_goes_on_elsewhere() -> None:
    made, plan, p, q = ErrorFeedback(is_on=True), plan_of(), weight(), weight()
    updated(made, plan, LATE, p, 1.0)
    other = ErrorFeedback(is_on=True)
    other.put_state(made.state({"p": p}), {"p": q})
    q.data.copy_(p.data)
    assert updated(other, plan, LATE, q, 3.0) == updated(made, plan, LATE, p, 3.0) == -7.0
    other.put_state({}, {"p": q})
    assert other.state({"p": q}) == {}
