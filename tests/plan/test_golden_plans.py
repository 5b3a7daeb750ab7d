"""What plans compute, and what the simulator says of them, is what it was at f251310.

The pinned files are never written anew. Programs have more in them since (start signals, norms,
copies of buffers at a flush, ADD, TELL, lanes), receives are posted earlier, and what a worker
passes on goes as soon as it has come. Nothing else may differ but what is listed, with its reason.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from lightning_cyclic.plan.actions import Action, Kind, Lane, Payload, Program
from tests.golden import grid as golden_plans
from tests.golden.grid import COLUMNS, FOLDER, grid
from tests.harness.programs import from_text
from tests.harness.rows import more

# owners add the gradients that each worker sends them (H); then sums went round, and a total to
# the owner (S, T). Messages and bytes that the worker with the most sends in a step, then -> now
ADDED_BY_OWNERS = {
    "cyclic_zero-s2-n2": ((4, 0.6), (3, 0.45)),
    "cyclic_zero-s8-n2": ((16, 0.6), (12, 0.45)),
    "cyclic_zero-s3-n3": ((7, 0.7), (6, 0.6)),
    "cyclic_zero-s4-n4": ((10, 0.75), (9, 0.675)),
    "cyclic_zero-s8-n3": ((20, 0.75), (17, 0.6375)),
}
OF_SUMS = frozenset({Payload.S, Payload.T, Payload.H})
PINNED = frozenset(Payload(x) for x in "AGSTPRWVDL")
# the stages of one worker that are due at one place are updated there together, in one call of
# the optimizer; with a flush, or where an owner reads late, that is when its step ends
UPDATES_TOGETHER = {
    "cyclic_dp-s8-n2", "cyclic_dp-s8-n3", "cyclic_dp-s8-n2-slack100", "cyclic_zero-s8-n2",
    "cyclic_zero-s8-n3", "cyclic_dp_v1-s2-n2", "cyclic_dp_v1-s8-n2", "cyclic_dp_v1-s3-n3",
    "cyclic_dp_v1-s4-n4", "cyclic_dp_v1-s8-n3", "cyclic_dp_v1-s4-n4-relayed0_2",
    "cyclic_dp_v1-s4-n4-shardingoptimizer", "gpipe-s4-n2", "1f1b-s4-n2",
    "1f1b-s3-n1-placementsingle-num_micro3", "cyclic_dp-s3-n1-placementsingle-num_micro3",
    "cyclic_dp_v1-s3-n1-placementsingle-num_micro3",
}  # fmt: skip
# one worker alone runs one step after the other: it has a batch per step, and updates in between
ONE_STEP_AFTER_THE_OTHER = {
    "cyclic_dp-s3-n1-placementsingle-num_micro3", "cyclic_dp_v1-s3-n1-placementsingle-num_micro3"
}  # fmt: skip
# step time and bubble then -> now: versions are passed on as soon as they come, as the runtime did
# and the programs did not say; where buffers are relayed, parameters queue behind them
PASSED_ON_EARLIER = {
    "cyclic_dp-s4-n4-relayed0_2": (1.014666666666666, 1.0167499999999992),
    "cyclic_dp_v1-s8-n3": (1.0018333333333291, 1.0),
    "lockstep_dp-s4-n4": (1.5866666666666647, 1.3829999999999991),
    "lockstep_dp-s4-n4-relayed0_2": (1.5493333333333346, 1.3913333333333333),
    "cyclic_dp-s4-n4-slack2": (1.011416666666665, 1.0),
}

# step time then -> now: parameters for one use leave when the worker that has them comes to their
# send, and their receiver has room, as the runtime has it; the simulator sent them at once
SENT_WHEN_REACHED = {
    "cyclic_zero-s2-n2": (1.0000000000000004, 1.1540000000000012),
    "cyclic_zero-s8-n2": (0.9999999999999996, 1.199833333333336),
    "cyclic_zero-s3-n3": (0.9999999999999982, 1.3039999999999972),
    "cyclic_zero-s4-n4": (1.0204166666666667, 1.3079999999999972),
    "cyclic_zero-s8-n3": (0.9999999999999984, 1.2726666666666682),
}
OTHER_STEP_TIMES = PASSED_ON_EARLIER | SENT_WHEN_REACHED


def pinned(program: Program) -> list[Action]:
    """Return what was in programs then, as it was written."""
    kept = (a for a in program if a.kind not in (Kind.ADD, Kind.TELL))
    kept = (a for a in kept if a.payload is None or a.payload in PINNED)
    # parameters that are fetched for one use name its micro-batch now
    return [replace(a, lane=Lane.MAIN, i=None if a.payload is Payload.P else a.i) for a in kept]


def without_last_round(name: str, program: list[Action], num_steps: int) -> Counter[Action]:
    """Count actions, but for buffers behind the last step: a flush copies them with C now."""
    left_out = OF_SUMS if name in ADDED_BY_OWNERS else ()
    kept = (a for a in program if a.payload not in left_out)
    return Counter(a for a in kept if a.payload is not Payload.R or a.t < num_steps)


# more sizes of what others have in one
MORE = ("-s2-n2", "-s8-n3", "-s3-n3", "-s4-n2")
NAMES = [more(name) if name.endswith(MORE) else name for name in grid()]


@pytest.mark.parametrize("name", NAMES)
def test_program(name: str) -> None:
    then = from_text((FOLDER / "programs" / f"{name}.csv").read_text())
    now = from_text(golden_plans.program_of(name))
    assert len(then) == len(now)
    for before, after in zip(map(pinned, then), map(pinned, now), strict=True):
        assert without_last_round(name, before, 3) == without_last_round(name, after, 3)
        compute = [[a for a in x if a.kind in (Kind.F, Kind.B)] for x in (before, after)]
        if name in ONE_STEP_AFTER_THE_OTHER:
            assert sorted(compute[0], key=lambda a: a.t) == compute[1]
        else:
            assert compute[0] == compute[1]
        if name not in UPDATES_TOGETHER:
            work = (*(Kind.F, Kind.B), Kind.UPDATE)
            assert [a for a in before if a.kind in work] == [a for a in after if a.kind in work]


def test_the_list_of_updates_has_no_other_in_it() -> None:
    for name in UPDATES_TOGETHER:
        then = from_text((FOLDER / "programs" / f"{name}.csv").read_text())
        now = from_text(golden_plans.program_of(name))
        work = (Kind.F, Kind.B, Kind.UPDATE)
        assert any(
            [a for a in pinned(x) if a.kind in work] != [a for a in pinned(y) if a.kind in work]
            for x, y in zip(then, now, strict=True)
        ), name


@cache
def expected() -> dict[str, list[str]]:
    """Return the pinned figures of each plan."""
    with (FOLDER / "figures.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    return {name: numbers for name, *numbers in rows}


def test_all_of_the_grid_have_figures() -> None:
    assert list(expected()) == list(grid())


@pytest.mark.parametrize("name", NAMES)
def test_figures(name: str) -> None:
    given = dict(zip(COLUMNS[1:], map(float, golden_plans.figures_of(name)), strict=True))
    then = dict(zip(COLUMNS[1:], map(float, expected()[name]), strict=True))
    if name in OTHER_STEP_TIMES:
        before, after = OTHER_STEP_TIMES[name]
        assert then.pop("step_s") == before
        assert given.pop("step_s") == pytest.approx(after, rel=1e-12)
        del then["bubble"], given["bubble"]
    if name in ADDED_BY_OWNERS:
        before, after = ADDED_BY_OWNERS[name]
        columns = "sent_messages", "sent_bytes"
        assert tuple(then.pop(x) for x in columns) == pytest.approx(before)
        assert tuple(given.pop(x) for x in columns) == pytest.approx(after)
    # the last digits of sums of floats depend on their order, which start signals change
    assert given == pytest.approx(then, rel=1e-12, abs=1e-12)
