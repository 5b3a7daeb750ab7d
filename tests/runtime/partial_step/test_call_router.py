"""The call router: which calls are routed, and what is left behind."""

from __future__ import annotations

from torch import nn

from tests.runtime.partial_step.hand import router_of, run_stage
from tests.runtime.partial_step.rows import Layer, Row, step_of


class Nested(Row):
    """Call a block, and then a layer within it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(Layer("inner", self.seen))

    def forward(self, x):
        y = self.a(x)
        return self.b(self.a[0](y)).sum()


def test_a_forward_that_is_replaced_between_two_steps_is_what_runs_and_stays():
    model = Nested()
    router, step = router_of(model, "b"), step_of(model)
    run_stage(router, step, 0)
    assert model.seen == ["inner", "inner"]
    model.seen.clear()
    model.a.forward = mine = lambda x: model.seen.append("mine") or x * 2
    run, _ = run_stage(router, step, 0)
    assert model.seen == ["mine", "inner"]
    assert [event.name for event in run.record.tape] == ["a()", "a.0()"]
    assert model.a.forward is mine
    assert "forward" not in vars(model.a[0])
    del model.a.forward
    model.seen.clear()
    run_stage(router, step, 0)
    assert model.seen == ["inner", "inner"]
    assert "forward" not in vars(model.a)
