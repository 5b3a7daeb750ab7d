"""Steps run one stage at a time: what is refused, and how the error names it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_cyclic.errors import ConfigurationError, StepError
from tests.harness.runs import line_of
from tests.runtime.partial_step.hand import router_of, run_stage, run_stages
from tests.runtime.partial_step.rows import Layer, Row, X, step_of


class Reading(Row):
    def forward(self, x):
        h = self.a(x)
        if h.sum() > 100:  # the read
            h = h * 2
        return self.b(h).sum()


def test_a_value_of_an_earlier_stage_that_is_read_is_refused_with_its_line():
    model = Reading()
    with pytest.raises(StepError) as caught:
        run_stages(router_of(model, "b"), step_of(model))
    assert f"{line_of(type(model), 'the read')} reads a value of stage 0" in str(caught.value)
    assert "the worker of stage 1 does not have" in str(caught.value)


@pytest.mark.parametrize("read", [float, bool, torch.Tensor.item, torch.Tensor.tolist, int])
def test_ways_to_read_are_refused(read):
    class Reads(Row):
        def forward(self, x):
            h = self.a(x)
            read(h.sum())
            return self.b(h).sum()

    model = Reads()
    with torch.no_grad(), pytest.raises(StepError, match="reads a value of stage 0"):
        run_stages(router_of(model, "b"), step_of(model))


def test_a_value_of_the_own_stage_may_be_read():
    model = Reading()
    router = router_of(model, "a")
    _, output = run_stages(router, step_of(model))
    assert torch.equal(output, model(X))
    run, _ = run_stage(router_of(model, "b"), step_of(model), 0)
    assert [e.name for e in run.record.tape if e.is_read] == ["__bool__"]


class Turning(Row):
    def forward(self, x):
        h = self.a(x)
        if self.extra == "other":
            h = torch.sigmoid(h)  # other way
        if self.extra != "none":
            h = torch.relu(h)
        if self.extra == "more":
            h = torch.exp(h)  # one more
        return self.b(h).sum()


@pytest.mark.parametrize(
    ("extra", "line", "text"),
    [
        ("other", "other way", "sigmoid at {} where relu was"),
        ("more", "one more", "exp at {} where the stage's end was"),
    ],
)
def test_another_way_than_the_tape_is_refused_with_the_event(extra, line, text):
    model = Turning()
    router = router_of(model, "b")
    first, _ = run_stage(router, step_of(model), 0)
    model.extra = extra
    with pytest.raises(StepError) as caught:
        run_stage(router, step_of(model), 1, [first])
    assert text.format(line_of(type(model), line)) in str(caught.value)
    assert "the worker of stage 1 than on that of stage 0" in str(caught.value)


def test_a_tensor_that_was_not_sent_is_refused_with_the_line():
    class Late(Row):
        def forward(self, x):
            h = self.a(x)
            return (self.b(x) * h).sum()  # late use

    model = Late()
    router = router_of(model, "b")
    first, _ = run_stage(router, step_of(model), 0)
    with pytest.raises(StepError) as caught:
        run_stage(router, step_of(model), 1, [first], received={})
    assert f"a tensor of stage 0 is used at {line_of(type(model), 'late use')}" in str(
        caught.value
    )


class Ordered(Row):
    order = "abc"

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x.sum() if "c" in self.order else x


@pytest.mark.parametrize(
    ("order", "target", "text"),
    [
        ("acb", 0, r"stage 2 begins \('c', .*\) before stage 1"),
        ("a", 1, "stage 1 never began: 'b' was not called"),
        ("ab", 1, "stage 1 never ended: 'c' was not called"),
        (
            "aba",
            1,
            r"module 'a', whose parameters or buffers belong to stage \[0\], is called in stage 1",
        ),
    ],
)
def test_another_order_than_the_stages_is_refused(order, target, text):
    model = Ordered()
    router = router_of(model, "b", "c")
    first, _ = run_stage(router, step_of(model), 0)
    model.order = order
    with pytest.raises(StepError, match=text):
        run_stage(router, step_of(model), target, [first] if target else [])


def test_a_step_that_skips_a_batch_is_told_how_to():
    class Skipping(Row):
        def forward(self, x):
            return None if self.extra else super().forward(x)

    model = Skipping()
    router = router_of(model, "b", "c")
    first, _ = run_stage(router, step_of(model), 0)
    model.extra = True
    words = "the step returned None before 'b' was called, with which stage 1 begins; .* 0 . loss"
    for target, before in ((0, []), (1, [first])):
        with pytest.raises(StepError, match=words):
            run_stage(router, step_of(model), target, before)


def test_a_result_that_cannot_be_told_to_other_workers_is_refused():
    class Odd(Layer):
        def forward(self, x):
            return super().forward(x), iter(())

    class Giving(Row):
        def forward(self, x):
            return self.b(self.a(x)[0]).sum()

    model = Giving()
    model.a = Odd("a", model.seen)
    with pytest.raises(StepError, match=r"what a\(\) returned.* holds a builtins.tuple_it"):
        run_stages(router_of(model, "b"), step_of(model))


def test_torchscript_modules_are_refused():
    class Scripted(Row):
        def __init__(self):
            super().__init__()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("warnings.warn", lambda *_, **__: None)
                self.d = torch.jit.trace(nn.Linear(4, 4), X)

    with pytest.raises(ConfigurationError, match="'d' is a TorchScript module"):
        router_of(Scripted(), "b")


def test_a_way_that_lacks_the_last_event_is_refused():
    class Trailing(Row):
        def forward(self, x):
            h = self.a(x)
            if self.extra is None:
                torch.relu(h)
            return self.b(h).sum()

    model = Trailing()
    router = router_of(model, "b")
    first, _ = run_stage(router, step_of(model), 0)
    model.extra = "none"
    with pytest.raises(StepError, match="relu"):
        run_stage(router, step_of(model), 1, [first])
