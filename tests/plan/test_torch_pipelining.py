"""GPipe and 1F1B are, action by action, the schedules of torch.distributed.pipelining.

Torch says in two ways what a rank does: it prints a ``pipeline_order``, and it runs. Both are
compared as text (``0F0 0F1 0B0 ...``), rank by rank. The order that it prints has no idle slots;
so slots are compared after each action of torch's orders was started as soon as it can.
"""

from collections import deque
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.plan.actions import Kind

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
GRID = [
    (num_stages, num_microbatches)
    for num_stages in range(1, 7)
    for num_microbatches in range(1, 10)
]

every_schedule = pytest.mark.parametrize("preset", SCHEDULES)
every_size = pytest.mark.parametrize(("num_stages", "num_microbatches"), GRID)

prints = pytest.mark.skipif(
    not hasattr(ScheduleGPipe, "_get_pipeline_order"), reason="this torch prints no order"
)


class Logging:
    """Stand in for a stage: note what is asked of it, exchange nothing."""

    def __init__(self, stage_index, num_stages):
        self.stage_index, self.num_stages = stage_index, num_stages
        self.is_last = stage_index == num_stages - 1
        self.log = []

    def forward_one_chunk(self, i, *_args, **_kwargs):
        self.log.append(f"{self.stage_index}F{i}")

    def backward_one_chunk(self, i, **_kwargs):
        self.log.append(f"{self.stage_index}B{i}")

    def no_messages(self, _i):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def nothing(self, _number):
        pass

    perform_reduce_grad = scale_grads = nothing  # at the end of a step, by version of torch


def schedule_of(preset, stage, num_microbatches):
    """Make torch's schedule, also of fewer micro-batches than stages.

    Only the constructor of 1F1B refuses these; what runs has a case for them.
    """
    cls = SCHEDULES[preset]
    if preset == "gpipe" or num_microbatches >= stage.num_stages:
        return cls(stage, num_microbatches)
    with pytest.raises(ValueError, match="greater than"):
        cls(stage, num_microbatches)
    schedule = cls.__new__(cls)
    PipelineScheduleSingle.__init__(schedule, stage, num_microbatches)
    return schedule


def run_by_torch(preset, num_stages, num_microbatches):
    """List what each rank runs in torch, as text."""
    ranks = []
    for j in range(num_stages):
        stage = Logging(j, num_stages)
        schedule = schedule_of(preset, stage, num_microbatches)
        schedule._initialize_stage = lambda *_args, **_kwargs: None
        schedule._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
        ranks.append(stage.log)
    return ranks


def printed_by_torch(preset, num_stages, num_microbatches):
    """List what each rank runs in torch's own ``pipeline_order``, as text."""
    stage = SimpleNamespace(stage_index=0, num_stages=num_stages)
    order = SCHEDULES[preset](stage, num_microbatches).pipeline_order
    texts = [[str(a) for a in order[j] if a is not None] for j in range(num_stages)]
    return [[text for text in rank if "REDUCE_GRAD" not in text] for rank in texts]


def ours(preset, num_stages, num_microbatches, **numbers):
    """Return the plan and, for each worker, its F and B as text."""
    plan = make_plan(
        preset, num_stages=num_stages, num_microbatches=num_microbatches, num_steps=1,
        proved=False,
        **({"num_workers": num_stages} | numbers),
    )  # fmt: skip
    kinds = (Kind.F, Kind.B)
    return plan, [
        [f"{a.j}{a.kind}{a.i}" for a in program if a.kind in kinds]
        for program in programs_of(plan)
    ]


def needed_by(text, num_stages):
    """Name what an action takes from the neighbouring stage, or None."""
    j, kind, i = int(text[0]), text[1], text[2:]
    j_other = j - 1 if kind == "F" else j + 1
    return f"{j_other}{kind}{i}" if 0 <= j_other < num_stages else None


def as_soon_as_possible(ranks):
    """Give the slot of each action if ranks keep their order and wait for nothing else."""
    slots, slot = {}, 0
    queues = [deque(order) for order in ranks]
    while any(queues):
        ready = [q for q in queues if q and needed_by(q[0], len(ranks)) in (None, *slots)]
        assert ready, "ranks wait for each other"
        slots |= {queue.popleft(): slot for queue in ready}
        slot += 1
    return slots


@every_schedule
@every_size
def test_every_worker_runs_what_torch_runs(preset, num_stages, num_microbatches):
    assert ours(preset, num_stages, num_microbatches)[1] == run_by_torch(
        preset, num_stages, num_microbatches
    )


@prints
@every_size
def test_every_worker_runs_what_torch_prints_of_gpipe(num_stages, num_microbatches):
    printed = printed_by_torch("gpipe", num_stages, num_microbatches)
    assert ours("gpipe", num_stages, num_microbatches)[1] == printed


@prints
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(s, m) for s, m in GRID if s <= m])
def test_every_worker_runs_what_torch_prints_of_1f1b(num_stages, num_microbatches):
    *workers, last = ours("1f1b", num_stages, num_microbatches)[1]
    *ranks, last_rank = printed_by_torch("1f1b", num_stages, num_microbatches)
    assert workers == ranks
    # torch 2.13 counts the forwards of the last rank from 1; what it runs there is tested above
    counted_from_1 = [f"{last_rank[0][0]}F{i}" for i in range(1, num_microbatches + 1)]
    assert last_rank[1::2] == last[1::2]
    assert last_rank[::2] in (last[::2], counted_from_1)


@every_schedule
@every_size
def test_every_action_has_the_earliest_slot_that_torchs_order_allows(
    preset, num_stages, num_microbatches
):
    plan, _ = ours(preset, num_stages, num_microbatches)
    slots = {f"{a.j}{a.kind}{a.i}": s for s, _, a in plan.timetable}
    assert slots == as_soon_as_possible(run_by_torch(preset, num_stages, num_microbatches))


@every_schedule
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 3), (3, 5), (4, 4)])
def test_every_replica_of_a_wide_pipeline_runs_what_torch_runs(
    preset, num_stages, num_microbatches
):
    _, workers = ours(
        preset, num_stages, 2 * num_microbatches, num_workers=2 * num_stages, replicas=2
    )
    for replica in range(2):
        own = workers[replica * num_stages : (replica + 1) * num_stages]
        local = [[f"{text[:2]}{int(text[2:]) // 2}" for text in program] for program in own]
        assert {int(text[2:]) % 2 for program in own for text in program} == {replica}
        assert local == run_by_torch(preset, num_stages, num_microbatches)


def test_the_comparison_can_fail():
    assert ours("gpipe", 3, 4)[1] != run_by_torch("1f1b", 3, 4)
    assert as_soon_as_possible([["0F0", "0B0"], ["1F0", "1B0"]]) == {
        "0F0": 0, "1F0": 1, "1B0": 2, "0B0": 3,
    }  # fmt: skip
