"""Steps run one stage at a time: what runs where, and what crosses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lightning_cyclic.runtime.partial_step.tape import names
from tests.runtime.partial_step.hand import router_of, run_stages
from tests.runtime.partial_step.rows import Layer, Row, X, check, step_of


def test_units_run_in_their_stage_only_and_glue_wherever_it_is_passed():
    model, by_stage = Row(), []
    runs, output = run_stages(
        router_of(model, "b", "c"), step_of(model), lambda _: by_stage.append(len(model.seen))
    )
    cut = [*by_stage, len(model.seen)]
    parts = [model.seen[cut[k] : cut[k + 1]] for k in range(3)]
    assert parts == [["a", "glue 1"], ["glue 1", "b", "glue 2"], ["glue 1", "glue 2", "c"]]
    assert torch.equal(output, model(X))
    assert [names(run.record.tape) for run in runs] == [
        ("a()", "relu", "add"),
        ("b()", "add"),
        (),  # nobody is told of the last
    ]
    assert [run.is_real for run in runs] == [True] * 3


def test_what_depends_on_the_batch_alone_is_real_everywhere():
    class Masked(Row):
        def forward(self, x):
            h = self.a(x)
            mask = x > 0
            count = int(mask.sum())
            assert type(mask) is torch.Tensor
            self.seen.append(count)
            return self.b(h[mask][:count]).sum() if count < 4 else self.b(h).sum()

    model = Masked()
    runs = check(model, "b")
    assert model.seen.count(4) == 3  # both stages, and the plain run
    assert not any(e.is_read for run in runs for e in run.record.tape)


def test_a_module_may_contain_the_beginning_of_a_stage():
    class Box(nn.Module):
        def __init__(self):
            super().__init__()
            self.row = Row()
            self.head = nn.Linear(1, 1)

        def forward(self, x):
            return self.head(self.row(x).reshape(1, 1)).sum()

    model = Box()
    router = router_of(model, "row.b", "row.c", split=["row"])
    _, output = run_stages(router, step_of(model))
    assert model.row.seen.count("a") == 1
    assert torch.equal(output, model(X))


def test_outputs_of_any_container_become_ghosts_and_aliases_stay():
    class Giving(Layer):
        def forward(self, x):
            return {"y": super().forward(x), "x": x, "n": 3}

    class Nested(Row):
        def __init__(self):
            super().__init__()
            self.a = Giving("a", self.seen)

        def forward(self, x):
            out = self.a(x)
            assert out["x"] is x
            return self.b(out["y"] * out["n"] + out["x"]).sum()

    check(Nested(), "b")


def test_what_crosses_is_what_the_code_still_holds():
    class Skip(Row):
        def forward(self, x):
            h = self.a(x)
            early = F.relu(h)
            del h
            late = self.b(early)
            return (self.c(late) + early).sum()

    runs = check(Skip(), "b", "c")
    assert set(runs[0].record.captured) == {(0, 1, 0)}
    assert set(runs[1].record.captured) == {(0, 1, 0), (1, 0, 0)}
    assert runs[1].used == {(0, 1, 0)}
    assert runs[2].used == {(0, 1, 0), (1, 0, 0)}


def test_only_what_was_used_counts_as_used():
    class Holding(Row):
        def forward(self, x):
            h = self.a(x)
            _unused, used = h + 1, h + 2
            return self.b(used).sum()

    runs = check(Holding(), "b")
    assert set(runs[0].record.captured) == {(0, 0, 0), (0, 1, 0), (0, 2, 0)}
    assert runs[1].used == {(0, 2, 0)}


def test_a_tensor_of_the_batch_that_a_stage_changed_crosses():
    class Changing(Row):
        def forward(self, x):
            x.add_(self.a(x).mean())
            x[0] = self.a(x)[1]
            return (self.b(x) + x).sum()

    runs = check(Changing(), "b")
    assert runs[0].record.tape[2].mutated == (0,)


def test_changes_in_place_of_what_came_are_passed_on():
    class InPlace(Row):
        def forward(self, x):
            h = self.a(x)
            g = self.b(h)
            h.mul_(2).add_(g)
            return (self.c(g) + h).sum()

    with torch.no_grad():
        check(InPlace(), "b", "c")
