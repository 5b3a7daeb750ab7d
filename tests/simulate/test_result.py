import pytest

from lightning_cyclic.plan.actions import parse
from lightning_cyclic.simulate import Event, Lane
from lightning_cyclic.simulate.result import steady_window, summarise


def compute(worker, text, start_s, end_s):
    return Event(worker, Lane.COMPUTE, parse(text), start_s, end_s)


def test_the_first_and_last_steps_do_not_count():
    # Steps end at 10, 14, 18, 19; the window is from the end of step 1 to that of step 2.
    ends = [10.0, 14.0, 18.0, 19.0]
    events = [compute(0, f"0F0@0#{t}", end - 1, end) for t, end in enumerate(ends)]
    result = summarise(events, 1)
    assert result.step_s == 4.0
    assert result.bubble == (0.75,)
    assert result.makespan_s == 19.0
    assert (result.busy_s, result.idle_s) == ((4.0,), (15.0,))


def test_the_slowest_worker_sets_the_step():
    events = [compute(w, f"0F0@0#{t}", t * (w + 1), (t + 1) * (w + 1))
              for w in range(2) for t in range(2)]  # fmt: skip
    result = summarise(events, 2)
    assert result.step_s == 2.0
    assert result.bubble == (0.5, 0.0)


def test_a_message_behind_the_last_compute_counts_to_the_makespan():
    message = Event(0, Lane.SEND, parse("0SEND_T>1#0"), 1.0, 5.0)
    result = summarise([compute(0, "0B0@0#0", 0.0, 1.0), message], 1)
    assert (result.makespan_s, result.step_s) == (5.0, 1.0)


@pytest.mark.parametrize(
    ("num_steps", "window"), [(1, (-1, 0)), (2, (0, 1)), (3, (1, 2)), (4, (1, 2)), (12, (5, 10))]
)
def test_windows(num_steps, window):
    assert steady_window(num_steps) == window
