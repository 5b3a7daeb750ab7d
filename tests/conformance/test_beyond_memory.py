"""Every row of the matrix once more, as a module that no rank may have as a whole.

Each rank makes its own stages alone, and has at most nine tenths of the bytes of all parameters;
what comes of it are the bits of the same run with ranks that have everything.
"""

from __future__ import annotations

import pytest

from tests import processes
from tests.conformance.cases import CASES
from tests.conformance.harness import NUM_WORKERS, fit, same

pytestmark = pytest.mark.multi

PRESETS = ["cyclic_zero", "1f1b", "pipedream_2bw", "cyclic_mp"]
ALWAYS = {  # what has gone wrong before, or nearly did; the others with -m exhaustive
    "tied": ["cyclic_zero", "1f1b"],
    "metrics": ["cyclic_zero"],
    "statistics": ["cyclic_zero"],
    "thawing": ["cyclic_zero"],
    "validated in mid epoch": ["cyclic_zero", "cyclic_mp"],
}

REFUSED = {  # under cyclic_zero, by name: test_deferred.py
    "averaged weights", "stochastic averages",  # which no rank could average
    "direct forward",  # of which one stage has nearly all
    "64-true",  # which has twice as many bytes as are counted here
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        pytest.param(
            name, preset,
            marks=[] if preset in ALWAYS.get(name, ()) else [pytest.mark.exhaustive],
        )
        for name, case in CASES.items()
        for preset in PRESETS
        if preset not in case.refused and not (preset == "cyclic_zero" and name in REFUSED)
    ],
)  # fmt: skip
def test_a_row_beyond_memory(name: str, preset: str) -> None:
    whole, apart = (
        processes.run(fit, NUM_WORKERS, name, preset, {}, preset, share) for share in (1, 0.9)
    )
    for r, (one, other) in enumerate(zip(whole, apart, strict=True)):
        assert one["weights"]
        for key, value in one.items():
            assert same(other[key], value), f"rank {r}: {key}: {other[key]} != {value}"
