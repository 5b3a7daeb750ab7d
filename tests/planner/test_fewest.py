import pytest

from lightning_cyclic.planner import ModelProfile, Problem, UnitProfile
from lightning_cyclic.planner.fewest import compared, fewest_stages, step_parts
from lightning_cyclic.simulate import Network


def problem(sparsity, memory_bytes=5.5e6, presets=("1f1b", "gpipe")):
    units = tuple(
        UnitProfile(
            name=f"h.{k}", forward_s=0.01, backward_s=0.02, param_bytes=1e6,
            activation_bytes=1e3, crossing_bytes=1e5,
        )
        for k in range(4)
    )  # fmt: skip
    return Problem(
        profiles=(ModelProfile(name="net", micro_size=1, units=units),),
        num_workers=4,
        memory_bytes=memory_bytes,
        batch_size=16,
        network=Network(bandwidth_bytes_per_s=1e8),
        presets=presets,
        remats=(False,),
        sparsity=sparsity,
    )


def test_pruning_needs_fewer_stages():
    # dense: 4 bytes of a stage's per byte of weights, of 4 MB; compressed: 1.5 (32-true)
    dense, sparse = (fewest_stages(problem(s)).fit.candidate for s in (None, 0.9))
    assert (dense.num_stages, sparse.num_stages) == (4, 2)


@pytest.mark.parametrize("sparsity", [None, 0.9])
def test_parts_add_up_to_the_step(sparsity):
    asked = problem(sparsity)
    plan = fewest_stages(asked)
    parts = step_parts(plan, asked)
    each = parts.compute_s, parts.bubble_s, parts.point_to_point_s, parts.collective_s
    assert sum(each) == pytest.approx(plan.step_s)
    assert parts.compute_s == pytest.approx(16 * 0.12 / 4)
    assert (parts.collective_s > 0) == (plan.fit.candidate.width > 1)


def test_both_choices_are_shown():
    text = compared(problem(0.9))
    assert [line.split()[:1] for line in text.splitlines()[2:]] == [
        ["dense"],
        ["sparse"],
        ["gain"],
    ]


def test_below_break_even_is_said_by_name():
    assert "sparsity=0.1 is below break-even" in compared(problem(0.1, 1e9))
    assert "break-even" not in compared(problem(0.5, 1e9))


def test_where_nothing_fits():
    assert "none fits" in compared(problem(0.9, 1e4))
