"""What a plan's stages run again for a limit: what a run would choose, and what that keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_cyclic import make_plan
from lightning_cyclic.planner import Problem, search
from lightning_cyclic.planner.fit import Fitter
from lightning_cyclic.planner.rematerialisation import best_schedule, rooms
from lightning_cyclic.planner.reruns import least_limit, reruns, units_of
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.simulate.memory import memory, steps_to_count

from .profiles import candidate, profile_of, unit

STATE = 2.0
UNITS = [
    unit(f"h.{k}", forward_s=1.0 + k % 3, backward_s=2.0, param_bytes=10, crossing_bytes=7,
         activation_bytes=90 + 10 * (k % 4))
    for k in range(16)
]  # fmt: skip
PLANS = [
    ("1f1b", 4, 4, 1), ("gpipe", 2, 2, 1), ("interleaved_1f1b", 4, 2, 1), ("zb_v", 4, 2, 1),
    ("pipedream_2bw", 4, 4, 1), ("cyclic_mp", 2, 2, 1), ("1f1b", 2, 4, 2),
]  # fmt: skip


def made(preset, num_stages, num_workers, replicas):
    plan = make_plan(
        preset, num_stages=num_stages, num_workers=num_workers, num_microbatches=num_stages * 2,
        replicas=replicas,
    )  # fmt: skip
    plan = replace(plan, num_steps=steps_to_count(num_stages, num_stages * 2 // replicas))
    each = 16 // num_stages
    units = [
        units_of(UNITS[n : n + each], UNITS[n + each] if n + each < 16 else None)
        for n in range(0, 16, each)
    ]
    return plan, units, Stages.of(profile_of(UNITS), range(0, 16, each)).costs()


def test_a_unit_gives_what_enters_the_next_and_the_last_of_all_gives_nothing():
    sizes = [unit(f"h.{k}", activation_bytes=100, crossing_bytes=k) for k in range(4)]
    assert [u.output_bytes for u in units_of(sizes[:2], sizes[2])] == [1, 2]
    assert [u.output_bytes for u in units_of(sizes[2:], None)] == [3, 0]
    assert {u.kept_bytes for u in units_of(sizes, None)} == {100}


@pytest.mark.parametrize(("preset", "num_stages", "num_workers", "replicas"), PLANS)
def test_less_memory_takes_more_time_and_every_limit_is_kept(
    preset, num_stages, num_workers, replicas
):
    plan, units, costs = made(preset, num_stages, num_workers, replicas)
    whole = max(m.total for m in memory(plan, costs, remat=False, state_per_param=STATE))
    least = least_limit(plan, units, costs, state_per_param=STATE)
    assert reruns(plan, units, costs, least - 1, state_per_param=STATE) is None
    before = None
    for part in range(9):
        limit = least + (whole + 200 - least) * part // 8
        found = reruns(plan, units, costs, limit, state_per_param=STATE)
        assert max(m.total for m in found.memory) <= limit
        if before is not None:
            assert all(a <= b for a, b in zip(found.again_s, before, strict=True))
        before = found.again_s
    first = reruns(plan, units, costs, least, state_per_param=STATE)
    assert sum(first.again_s) > 0


@pytest.mark.parametrize(("preset", "num_stages", "num_workers", "replicas"), PLANS)
def test_a_run_with_the_limit_that_is_written_has_room_for_the_same(
    preset, num_stages, num_workers, replicas
):
    plan, units, costs = made(preset, num_stages, num_workers, replicas)
    limit = least_limit(plan, units, costs, state_per_param=STATE) + 150
    found = reruns(plan, units, costs, limit, state_per_param=STATE)
    sizes = list(map(int, costs.param_bytes))
    again_s = [0.0] * num_stages
    for of_worker in rooms(plan, sizes, found.limit_bytes, STATE):
        for j, room in of_worker.items():
            chosen = best_schedule(
                units[j], room.bytes - room.at_once * 7,
                at_once=room.at_once, most_steps=32,
            )  # fmt: skip
            again_s[j] = max(again_s[j], chosen.again_s)
    assert tuple(again_s) == found.again_s


def problem(**changes):
    given = {
        "profiles": (profile_of(UNITS, micro_size=4),), "num_workers": 2, "memory_bytes": 1e9,
        "presets": ("1f1b",), "batch_size": 32,
    }  # fmt: skip
    return Problem(**(given | changes))


def test_the_planner_chooses_it_where_it_is_the_fastest_that_fits():
    roomy = search(problem())
    assert {plan.fit.candidate.checkpointing for plan in roomy.plans} == {"never", "always"}
    asked = candidate("1f1b", num_stages=2, num_microbatches=8)
    fitter = Fitter(problem())
    never, always, optimal = (
        replace(asked, checkpointing=how, micro_size=4) for how in ("never", "always", "optimal")
    )
    most, least = fitter.fit(never).memory_bytes, fitter.least(optimal).memory_bytes
    assert least < fitter.least(always).memory_bytes < most
    between = search(problem(memory_bytes=(most + least) // 2))
    best = between.plans[0]
    assert best.fit.candidate.checkpointing == "optimal"
    assert 0 < sum(best.fit.stages.again_s) < sum(best.fit.stages.forward_s)
    without = search(problem(memory_bytes=(most + least) // 2, checkpointing=("never", "always")))
    assert roomy.plans[0].step_s < best.step_s < without.plans[0].step_s
