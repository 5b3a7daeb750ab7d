"""sync reads version t whatever exists."""

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.weights import Sync


def test_reads_the_step():
    assert [Sync().forward(t, newest=0) for t in range(4)] == [0, 1, 2, 3]


def test_keeps_one_version():
    plan = make_plan("1f1b", num_stages=4, num_workers=4, num_microbatches=6)
    assert [plan.depth(j) for j in range(4)] == [1, 1, 1, 1]
