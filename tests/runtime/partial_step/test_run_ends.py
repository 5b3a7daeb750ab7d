"""Steps run one stage at a time: what the end of a stage leaves behind of the user's."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_cyclic.runtime.partial_step.ghosts import Ghost
from lightning_cyclic.runtime.partial_step.tape import names
from tests.runtime.partial_step.hand import router_of, run_stage, run_stages
from tests.runtime.partial_step.rows import Row, X, check, step_of


class Contexts(Row):
    def forward(self, x):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            try:
                return self.b(self.a(x)).sum()
            except Exception:
                raise AssertionError("the end of a stage is no error") from None
            finally:
                self.seen.append(torch.zeros(2).sum())  # tidying up is no use of the stage's


def test_the_end_of_a_stage_leaves_the_users_contexts():
    model = Contexts()
    router = router_of(model, "b")
    _, output = run_stage(router, step_of(model), 0)
    assert output is None
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.overrides._get_current_function_mode() is None
    assert router.run is None
    assert float(model.seen[-1]) == 0


class Swallowing(Row):
    def forward(self, x):
        h = self.a(x)
        try:
            y = self.b(h)
        except BaseException:
            self.seen.append("caught")
            y = self.extra(self, h)
            self.seen.append("went on")
        return y.sum()


@pytest.mark.parametrize("again", [lambda m, h: m.b(h), lambda m, h: h + 1, lambda m, h: m.c(h)])
def test_code_that_catches_everything_does_not_go_on_behind_the_end(again):
    model = Swallowing()
    model.extra = again
    _, output = run_stage(router_of(model, "b"), step_of(model), 0)
    assert output is None
    assert model.seen == ["a", "caught"]


def test_an_error_of_the_users_comes_through_and_leaves_nothing():
    class Failing(Row):
        def forward(self, x):
            self.a(x)
            raise KeyError("mine")

    model = Failing()
    router = router_of(model, "b")
    with pytest.raises(KeyError, match="mine"):
        run_stage(router, step_of(model), 0)
    assert router.run is None
    assert torch.overrides._get_current_function_mode() is None
    assert "forward" not in vars(model.a)


def test_the_module_is_as_it_was_behind_the_opening():
    model = Row()
    model.metric = MeanMetric()
    model.b.forward = own = lambda x: x * 2
    model.metric.update = mine = model.metric.update
    before = {path: dict(vars(m)) for path, m in model.named_modules()}
    router = router_of(model, "b")
    with pytest.raises(KeyError), router.open():  # noqa: PT012
        assert "forward" in vars(model.a)
        assert model.b.forward is not own
        raise KeyError
    assert {path: dict(vars(m)) for path, m in model.named_modules()} == before
    assert model.b.forward is own
    assert model.metric.update is mine


def test_a_forward_of_the_instances_own_is_what_runs():
    model = Row()
    model.b.forward = lambda x: x * model.b.weight.sum()
    check(model, "b", "c")


def test_outside_a_run_an_open_module_computes_as_ever():
    model = Row()
    expected = model(X)
    with router_of(model, "b").open():
        assert torch.equal(model(X), expected)


def test_users_hooks_run_whether_a_unit_runs_or_not():
    model, seen = Row(), []
    model.a.register_forward_pre_hook(lambda m, args: seen.append("pre") or (args[0] * 2,))
    model.a.register_forward_hook(lambda m, args, out: seen.append(type(out)) or out * 3)
    router = router_of(model, "b")
    _, output = run_stages(router, step_of(model))
    assert seen == ["pre", torch.Tensor, "pre", Ghost]
    assert model.seen.count("a") == 1
    assert torch.equal(output, model(X))


def test_a_metric_is_updated_in_its_stage_only():
    class Measured(Row):
        def __init__(self):
            super().__init__()
            self.metric = MeanMetric()

        def forward(self, x):
            h = self.a(x)
            self.metric.update(h.detach())
            return self.b(h).sum()

    model = Measured()
    runs, _ = run_stages(router_of(model, "b"), step_of(model))
    assert model.metric.update_count == 1
    assert names(runs[0].record.tape) == ("a()", "detach", "metric.update()")


def test_ghosts_in_what_the_step_returns_are_filled():
    class Returning(Row):
        def forward(self, x):
            h = self.a(x)
            return {"loss": self.b(h).sum(), "features": [h]}

    model = Returning()
    _, output = run_stages(router_of(model, "b"), step_of(model))
    assert type(output["features"][0]) is torch.Tensor
    assert torch.equal(output["features"][0], model(X)["features"][0])
