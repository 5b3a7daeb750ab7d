"""A pytest plugin that runs Lightning's own tests on another strategy; docs/figures.md says how.

Wherever a test leaves ``strategy="auto"`` and has one CPU device, the Trainer gets the strategy
that UPSTREAM_STRATEGY names ("cyclic_dp", "gpipe", "ddp", ...) instead of SingleDeviceStrategy.
UPSTREAM_STAGES and UPSTREAM_NUM_MICRO, where set, are its ``stages`` and ``num_microbatches``.
"""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_cyclic.registration import make_strategy

_NAME = os.environ.get("UPSTREAM_STRATEGY", "cyclic_dp")
_choose_strategy = _AcceleratorConnector._choose_strategy


def _chosen(connector: Any) -> Strategy | str:
    choice = _choose_strategy(connector)
    on_cpu = isinstance(choice, SingleDeviceStrategy) and choice.root_device.type == "cpu"
    if not on_cpu or _NAME == "auto":
        return choice
    return DDPStrategy() if _NAME == "ddp" else make_strategy(_NAME, **_options())


def _options() -> dict[str, Any]:
    options: dict[str, Any] = {}
    if stages := os.environ.get("UPSTREAM_STAGES"):
        options["stages"] = int(stages) if stages.isdigit() else stages
    if num_microbatches := os.environ.get("UPSTREAM_NUM_MICRO"):
        options["num_microbatches"] = int(num_microbatches)
    return options


def pytest_configure(config: Any) -> None:
    """Put the strategy in place of "auto"."""
    setattr(_AcceleratorConnector, "_choose_strategy", _chosen)  # noqa: B010
    # every test joins the thread that watches child processes, which sleeps five seconds
    _ChildProcessObserver.__init__.__defaults__ = (0.1,)
