"""versions writes what the plan's rule says into each cell."""

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.passes.versions import Cell, versions


def test_forward_and_backward_get_their_versions():
    plan = make_plan("pipeoptim", num_stages=3, num_workers=3)
    cells = [Cell(Kind.F, 5, 0, 0, 11), Cell(Kind.B, 5, 0, 0, 16)]
    assert [(str(a), a.s) for a in versions(plan, cells)] == [("0F0@3#5", 11), ("0B0@5#5", 16)]


def test_it_is_lazy():
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2)

    def cells():
        yield Cell(Kind.F, 0, 0, 0, 0)
        raise AssertionError("asked for a second cell")

    assert str(next(versions(plan, cells()))) == "0F0@0#0"
