"""The stream of a worker is its program, whatever its length, cut at batches."""

from dataclasses import replace

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.plan.lower import blocking
from lightning_cyclic.runtime.partial_step.stream import Stream

PLANS = [
    ("pipedream_2bw", 3, 3, 4), ("pipedream_2bw", 4, 2, 4), ("cyclic_pipeline", 4, 4, 3),
    ("cyclic_pipeline", 4, 4, 8), ("cyclic_pipeline", 3, 1, 2), ("pipedream", 4, 4, 1),
    ("pipedream", 4, 2, 1), ("pipedream", 4, 1, 1), ("pipeoptim", 2, 2, 1),
    ("pipedream_2bw", 3, 3, 4, 1), ("pipedream", 4, 2, 1, 5), ("cyclic_mp", 3, 4, 4, 3),
    ("cyclic_mp", 2, 3, 3, 8),
]  # fmt: skip


def program(plan, worker, num_steps):
    program = blocking(replace(plan, num_steps=num_steps))[worker]
    return [a for a in program if a.payload is not Payload.D]  # given with the batch


@pytest.fixture(params=PLANS, ids=lambda n: "-".join(map(str, n)))
def plan(request):
    preset, num_stages, num_workers, num_micro, *warm_up = request.param
    return make_plan(
        preset, num_stages=num_stages, num_workers=num_workers, num_micro=num_micro,
        warmup_steps=sum(warm_up),
    )  # fmt: skip


def test_blocks_are_the_program_cut_before_the_first_action_of_each_step(plan):
    for worker in range(plan.num_workers):
        stream = Stream(plan, worker)
        whole = program(plan, worker, 30)
        blocks = [stream.block(t) for t in range(22)]
        actions = [a for block in blocks for a in block]
        assert actions == whole[: len(actions)]
        assert [a.s for a in actions] == [a.s for a in whole[: len(actions)]]
        firsts = enumerate(blocks) if plan.placement != "shared" else ()  # who also hand on P
        assert all(max(a.t for a in block) == block[0].t == t for t, block in firsts)


def test_blocks_and_the_rest_are_the_program_that_ends_there(plan):
    for worker in range(plan.num_workers):
        stream = Stream(plan, worker)
        done = []
        for t in range(16):
            done += stream.block(t)
            assert done + stream.rest(t) == program(plan, worker, t + 1)
