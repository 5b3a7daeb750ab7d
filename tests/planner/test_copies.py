import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.planner import Stages, memory
from lightning_cyclic.planner.copies import Counter, steps_to_count
from lightning_cyclic.simulate.memory import KINDS
from tests.harness.rows import more


def counted(preset, num_stages, of_each, replicas, *, remat, slack=0, tied=()):
    """Count on the plan's own program, of all replicas."""
    plan = make_plan(
        preset,
        num_stages=num_stages,
        num_workers=num_stages * replicas,
        num_microbatches=of_each * replicas,
        num_steps=steps_to_count(num_stages, of_each),
        slack=slack,
        replicas=replicas,
        tied=tied,
        proved=False,  # tests/plan has proofs; here its memory is counted
    )
    workers = memory(plan, Stages.alike(num_stages).costs(), remat=remat, state_per_param=1)
    homes = [plan.axes.placement.workers_of(j) for j in range(num_stages)]
    return [
        [tuple(getattr(workers[home[q]], kind) for kind in KINDS) for home in homes]
        for q in range(replicas)
    ]


def whole(copies, replicas):
    """Repeat what stands for several replicas."""
    return [copies[0 if q == 0 else -1 if q == replicas - 1 else 1] for q in range(replicas)]


RULES = [
    "cyclic_pipeline", "gpipe", "1f1b", "pipedream", "pipedream_2bw", "pipeoptim", "spectrain",
]  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "slack"),  # rules that predict know no slack
    [
        *(more(x, 0) if x == "spectrain" else (x, 0) for x in RULES),
        ("pipedream_2bw", 3),
        *(more(x, 3) for x in ("1f1b", "cyclic_pipeline", "gpipe", "pipedream")),
    ],
)
def test_copies_are_those_of_the_plans_own_program(preset, slack):
    counter = Counter(slack, 1)
    compared = 0
    for num_stages, of_each in [(1, 2), (2, 9), (4, 3), (4, 12), (7, 6), (9, 9)]:
        try:
            expected = counted(preset, num_stages, of_each, 1, remat=False, slack=slack)
        except PlanError:  # as few micro-batches do not do for this rule
            continue
        assert counter.copies(preset, num_stages, of_each, 1, remat=False) == expected
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize(
    "preset", [pytest.param("gpipe", marks=pytest.mark.exhaustive), "1f1b", "pipedream_2bw"]
)
@pytest.mark.parametrize(
    ("replicas", "remat"),
    [
        more(2, False),
        (2, True),
        pytest.param(3, False, marks=pytest.mark.exhaustive),
        pytest.param(3, True, marks=pytest.mark.exhaustive),
        pytest.param(5, False, marks=pytest.mark.exhaustive),
        pytest.param(5, True, marks=pytest.mark.exhaustive),
    ],
)
def test_replicas_between_the_first_and_the_last_are_alike(preset, replicas, remat):
    counter = Counter(0, 1)
    for num_stages, of_each in [(1, 1), (1, 6), (2, 2), (3, 7), (7, 10)]:
        expected = counted(preset, num_stages, of_each, replicas, remat=remat)
        found = counter.copies(preset, num_stages, of_each, replicas, remat=remat)
        assert whole(found, replicas) == expected


def test_many_stages_are_counted_on_programs_of_few():
    counter = Counter(0, 1)
    (copies,) = counter.copies("1f1b", 64, 256, 1, remat=False)
    activations = [row[KINDS.index("activations")] for row in copies]
    assert activations == list(range(64, 0, -1))
    assert max(key[1] for key in counter._counted) == 6
    (copies,) = counter.copies("1f1b", 64, 64, 1, remat=False)
    assert [row[KINDS.index("activations")] for row in copies] == list(range(64, 0, -1))
    assert max(key[1] for key in counter._counted) == 7
    (copies,) = counter.copies("gpipe", 64, 256, 1, remat=False)
    assert {row[KINDS.index("activations")] for row in copies} == {256}


def test_why_none_can_be_counted():
    with pytest.raises(PlanError, match="num_microbatches=2 with num_stages=8"):
        Counter(0, 1).copies("pipedream_2bw", 8, 2, 1, remat=False)
