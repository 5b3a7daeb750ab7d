"""Ranks that end as a script does: by the end of its interpreter, with all that it tears down.

    python -m tests.scripts.exits 500     prints how many of 500 runs ended well, on two ranks each

A rank of :mod:`tests.harness.processes` leaves by ``os._exit``, which skips that. All are forked
from one process that has imported everything, so that a run takes a second.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from typing import Any

import lightning.pytorch  # noqa: F401  (before the first fork)
import torch

from lightning_cyclic.registration import make_strategy
from tests.harness.processes import free_port
from tests.scripts.launched import Tiny, Trainer

PRESETS = ["cyclic_dp", "1f1b", "pipedream_2bw", "cyclic_zero", "cyclic_mp", "lockstep_dp"]
NUM_RANKS = 2


def fit(preset: str, rank: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(NUM_RANKS),
        NODE_RANK=str(rank), LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    strategy: Any = make_strategy(preset)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, num_nodes=NUM_RANKS, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Tiny())


def main(num_runs: int) -> None:
    codes: Counter[tuple[str, int]] = Counter()
    for k in range(num_runs):
        preset, port, children = PRESETS[k % len(PRESETS)], free_port(), []
        for rank in range(NUM_RANKS):
            if (child := os.fork()) == 0:
                fit(preset, rank, port)
                return  # and out, like any script
            children.append(child)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        codes[preset, next(filter(None, ends), 0)] += 1
    well = sum(num for (_, code), num in codes.items() if code == 0)
    print(f"{well} of {num_runs} runs ended well")
    for (preset, code), num in sorted(codes.items()):
        print(f"  {preset}, exit code {code}: {num}")
    sys.exit(well != num_runs)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]))
