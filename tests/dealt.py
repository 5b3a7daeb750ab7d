"""A user's script for torchrun, whose ranks say that they are on hosts dealt in turn.

python -m torch.distributed.run --nproc-per-node=4 tests/dealt.py OUT HOST,HOST,... WHO_DIES
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch

from lightning_cyclic.strategy import CyclicStrategy
from tests import launched


class Mortal(launched.Tiny):
    """Lets a rank die at the first attempt."""

    def on_train_start(self) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and os.environ["LOCAL_RANK"] == sys.argv[3]:
            os._exit(1)


def main(out: Path, hosts: str) -> None:
    rank = os.environ["RANK"]
    socket.gethostname = lambda: hosts.split(",")[int(rank)]  # type: ignore[assignment]
    launched.Tiny = Mortal  # type: ignore[misc]
    launched.fit(out, CyclicStrategy("cyclic_dp"), devices=1, num_nodes=4)
    print(f"launched as {rank}, rank {os.environ['RANK']}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
