"""Be torchrun on one host, but with ranks that are forked and so have imported all.

python -m tests.harness.agent NUM_RANKS MAX_RESTARTS MODULE ARGUMENTS...
"""

from __future__ import annotations

import runpy
import signal
import sys
import uuid

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def be_script(module: str, *arguments: str) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a program would not have
        signal.signal(number, signal.SIG_DFL)  # the agent's handlers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(num_ranks: int, max_restarts: int, *script: str) -> None:
    config = LaunchConfig(  # as --standalone sets it
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, max_restarts=max_restarts,
        run_id=str(uuid.uuid4()), rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        start_method="fork", monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, be_script)(*script)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
