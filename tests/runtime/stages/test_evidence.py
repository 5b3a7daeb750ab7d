from dataclasses import replace

from lightning_cyclic.runtime.stages.evidence import quietest

from .scripts import Writer

QUIET = [("layer", 3, 1, 1), ("box", [("layer", 2, 1, 1), ("layer", 4, 1, 1)]), ("layer", 1, 1, 1)]


def delayed(seen, tick, ns):
    """Return the same run with a delay before a tick."""
    calls = tuple(
        replace(
            c,
            begin_ns=c.begin_ns + (ns if c.begin >= tick else 0),
            end_ns=c.end_ns + (ns if c.end >= tick else 0),
        )
        for c in seen.calls
    )
    return replace(seen, calls=calls, duration_ns=seen.duration_ns + ns)


def test_delays_of_single_runs_do_not_count():
    quiet = Writer(QUIET).survey()
    assert quietest([quiet]) == quiet
    noisy = [delayed(quiet, tick, 100) for tick in (1, 5, 9, quiet.end + 1)]
    assert quietest(noisy) == quiet


def test_delays_of_all_runs_count():
    slow = delayed(Writer(QUIET).survey(), 5, 7)
    assert quietest([slow, slow]) == slow


def test_runs_that_went_another_way_do_not_count():
    first, other = Writer(QUIET).survey(), Writer([("layer", 0, 1, 1)]).survey()
    assert quietest([first, other]) == first
