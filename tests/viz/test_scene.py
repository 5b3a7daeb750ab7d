"""The scene: where cells, updates and messages lie."""

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import PRESETS, make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.viz.scene import Arrow, Scene, scene
from lightning_cyclic.viz.text import draw


def of(preset, n=2, **numbers) -> Scene:
    return scene(make_plan(preset, num_stages=n, num_workers=n, **{"num_steps": 1, **numbers}))


def places(arrows: tuple[Arrow, ...], *payloads: str) -> set[tuple[str, int, int, int, int]]:
    return {
        (str(a.action).partition("#")[0], a.x, a.w, a.end_x, a.end_w)
        for a in arrows
        if a.action.payload in payloads
    }


def test_messages_go_from_behind_their_compute_to_their_first_reader():
    # slot   0   1   2   3   4   5
    # w0   0F0 0F1   . 0B0   . 0B1
    # w1     . 1F0 1B0 1F1 1B1   .
    seen = of("1f1b")
    assert places(seen.arrows, "A") == {
        ("1SEND_A0>1", 1, 0, 1, 1),
        ("1SEND_A1>1", 2, 0, 3, 1),
    }
    assert places(seen.arrows, "G") == {
        ("0SEND_G0>0", 3, 1, 3, 0),
        ("0SEND_G1>0", 5, 1, 5, 0),
    }
    assert places(seen.arrows, "D") == {("1SEND_D>1", 0, 0, 1, 1)}  # before any compute


def test_sums_end_behind_the_backward_and_weights_begin_with_their_update():
    # slot   0   1   2   3   4   5   6   7   8   9
    # w0   0F0 1F0 1B0 0B0 0F0 1F0 ...
    # w1     .   . 0F1 1F1 1B1 0B1 0F1 1F1 ...
    seen = of("cyclic_dp", num_steps=3)
    sums, weights = places(seen.arrows, "S"), places(seen.arrows, "P")
    assert {a for a in sums if a[0] == "1SEND_S0>1"} == {
        ("1SEND_S0>1", 3, 0, 5, 1),
        ("1SEND_S0>1", 7, 0, 9, 1),
        ("1SEND_S0>1", 11, 0, 13, 1),
    }
    assert {("1SEND_P@1>1", 5, 0, 7, 1), ("0SEND_P@1>0", 6, 1, 8, 0)} <= weights
    made = {(mark.x, mark.w, str(mark.action)) for mark in seen.updates}
    assert {(5, 0, "1UPDATE@1#0"), (6, 1, "0UPDATE@1#0")} <= made


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("n", [2, 4])
def test_what_is_seen_is_what_the_text_says_and_no_message_goes_back_in_time(preset, n):
    seen = of(preset, n, num_steps=3)
    drawn = draw(seen.plan).replace("+", " ").split()
    cells = [f"{c.action.j}{c.action.kind}{c.action.i}@{c.action.v}" for c in seen.cells]
    assert sorted(cells) == sorted(text for text in drawn if "@" in text)
    assert all(arrow.x <= arrow.end_x for arrow in seen.arrows)
    assert len(seen.updates) == 3 * seen.plan.num_stages
    assert len(seen.arrows) > 0


def test_cells_of_one_slot_share_it_in_the_order_in_which_they_run():
    seen = scene(make_plan("cyclic_mp", num_stages=4, num_workers=2, num_steps=2))
    slot = [c for c in seen.cells if c.w == 0 and c.action.s == 6]
    assert [(c.x, c.width, c.action.kind) for c in slot] == [
        (6.0, 0.5, Kind.F),
        (6.5, 0.5, Kind.B),
    ]
    by_worker = [[c.x for c in seen.cells if c.w == w] for w in range(2)]
    assert all(len(set(xs)) == len(xs) for xs in by_worker)


def test_where_steps_begin():
    seen = of("cyclic_dp", num_steps=2)
    assert [tuple(begin) for begin in seen.begins] == [(0, 0, 0), (4, 0, 1), (2, 1, 0), (6, 1, 1)]


def test_a_later_slot_to_begin_with():
    plan = make_plan("1f1b", num_stages=2, num_workers=2, num_steps=2)
    seen = scene(plan, 6)
    assert seen.slots == range(6, 12)
    assert {cell.action.t for cell in seen.cells} == {1}
    assert {arrow.action.t for arrow in seen.arrows} == {1}
    assert [begin.t for begin in seen.begins] == [1, 1]
    with pytest.raises(PlanError, match="nothing happens from slot 12 on; allowed: slots of"):
        scene(plan, 12)


def test_what_nobody_could_read_is_refused_before_any_program_is_made():
    with pytest.raises(PlanError, match="1000 workers over 2000 slots .* allowed: up to 32"):
        of("1f1b", 1000, num_micro=1)
    with pytest.raises(PlanError, match="2 workers over 300 slots .* allowed: .* 256 slots"):
        of("1f1b", num_steps=50)
