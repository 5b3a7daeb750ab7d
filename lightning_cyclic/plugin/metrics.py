"""Metrics of pipelined modules: the worker that updates one tells the others of its replica.

A metric is an attribute of the whole module, on every worker, but only one worker runs the code
that updates it. The others are told its state before anybody computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn

from lightning_cyclic.compat import Trainer
from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.partial_step.module_state import state_of
from lightning_cyclic.runtime.partial_step.session import StagewiseSession
from lightning_cyclic.runtime.stages.evidence import is_metric
from lightning_cyclic.runtime.values.plain import decode, encode

_SYNCING = ("sync_on_compute", "_to_sync", "dist_sync_on_step")
_STORES_METRICS = "_store_dataloader_outputs"  # of evaluation loops: computes, before any hook


@final
class SharedMetrics:
    """Share the states of a module's metrics.

    Args:
        trainer: whose loops of evaluation compute metrics.
        module: whose metrics they are.
        session: knows which worker updates which.
    """

    def __init__(self, trainer: Trainer, module: nn.Module, session: StagewiseSession) -> None:
        self._session = session
        self._loops: tuple[Any, ...] = (
            trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop,
        )  # fmt: skip
        for loop in self._loops:
            setattr(loop, _STORES_METRICS, self._sharing_before(getattr(loop, _STORES_METRICS)))
        self._metrics: dict[str, Any] = {p: m for p, m in module.named_modules() if is_metric(m)}
        self._before = {path: _syncing(metric) for path, metric in self._metrics.items()}
        if (
            session.config.replicas == 1
        ):  # else they would add up states of stages, which are alike
            for metric in self._metrics.values():
                metric.__dict__.update(dict.fromkeys(_SYNCING, False))

    def _sharing_before(self, compute: Callable[[], None]) -> Callable[[], None]:
        def share_and_compute() -> None:
            self.share()
            compute()

        return share_and_compute

    def share(self) -> None:
        """Bring the states of metrics from the workers that update them to all of a replica."""
        session = self._session
        if session.cuts is None or len(session.replica) == 1:
            return
        for path, stage in sorted(session.cuts.metrics.items()):
            metric = self._metrics[path]
            shared = session.share(stage, Message(*encode(state_of(metric), path)))
            if session.worker != session.worker_of(stage):
                metric.__dict__.update(decode(shared.tensors, shared.facts))

    def release(self) -> None:
        """Let metrics synchronize as they did before."""
        for loop in self._loops:
            vars(loop).pop(_STORES_METRICS, None)
        for path, attributes in self._before.items():
            self._metrics[path].__dict__.update(attributes)


def _syncing(metric: nn.Module) -> dict[str, Any]:
    return {n: metric.__dict__[n] for n in _SYNCING if n in metric.__dict__}
