"""Import this last, before forks: it proves the plans that most tests run, once for all ranks.

It also keeps all that has been imported out of garbage collection. A collection writes into the
header of each object that it looks at; in a forked process every page that it writes to must be
copied first, and a preloaded heap has tens of thousands of pages.
"""

import gc
import sys
from contextlib import suppress
from functools import lru_cache
from itertools import product

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import PRESETS, make_plan
from lightning_cyclic.plan.presets import PLACEMENTS, WEIGHTS

# a user's process has few plans; these are some two hundred
make = sys.modules["lightning_cyclic.plan.make"]
make._proved = lru_cache(512)(make._proved.__wrapped__)  # type: ignore[attr-defined]

for preset, num_workers, num_stages in product(PRESETS, (2, 4), (1, 2, 4)):
    axes = PRESETS[preset]
    is_whole = PLACEMENTS[axes.placement].runs_whole_micro
    several = [1] if WEIGHTS[axes.weights].per_micro else [2, 4]
    for num_microbatches, buffers in product([None] if is_whole else several, [False, True]):
        relayed = range(num_stages) if buffers else ()
        with suppress(PlanError):
            make_plan(
                preset, num_stages=num_stages, num_workers=num_workers,
                num_microbatches=num_microbatches,
                relayed=relayed, relayed_until=relayed if is_whole else (),
            )  # fmt: skip

gc.collect()
gc.freeze()
