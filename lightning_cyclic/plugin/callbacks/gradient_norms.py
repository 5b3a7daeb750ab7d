"""The norms of gradients, exact and cheap, where each rank sees those of its own stages alone.

each update      norms of the tensors that this rank updates, kept where they are
end of epoch     one exchange; every rank knows and logs all of them
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_cyclic.compat import Callback
from lightning_cyclic.errors import ConfigurationError

_MISSING = -1.0


@final
class GradientNorms(Callback):
    """Log the 2-norm of all gradients, before clipping, with every preset and strategy.

    Under presets that update stage by stage no rank ever has all gradients, and a hook that sums
    them up gets an error. This callback keeps what each rank sees, and brings it together at the
    end of each epoch: its numbers are those that a single device would log, bit by bit, and
    training waits for nobody. Loggers get them then, with the step that each is of.

    Args:
        every_n_steps: how often. [``Trainer(log_every_n_steps)``]
        per_parameter: log the norm of each parameter, too, as ``grad_norm/NAME``.

    Attributes:
        totals: step, counted from 0 -> norm over all parameters, of the epochs that are over.
        each: step -> parameter's name -> norm of its gradient; without those that had none.

    Raises:
        ConfigurationError: a number of steps below 1.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> norms = GradientNorms(every_n_steps=10)
        >>> trainer = Trainer(callbacks=[norms], accelerator="cpu", logger=False)
    """

    def __init__(self, every_n_steps: int | None = None, *, per_parameter: bool = False) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(
                f"every_n_steps={every_n_steps}; allowed: 1, 2, ..., or None for "
                "Trainer(log_every_n_steps); use GradientNorms(every_n_steps=1)"
            )
        self.totals: dict[int, float] = {}
        self.each: dict[int, dict[str, float]] = {}
        self._every_n_steps = every_n_steps
        self._per_parameter = per_parameter
        self._start = 0  # the first step of the fit
        self._begin = 0  # the first step that is not brought together
        self._updates: dict[int, int] = {}  # of each parameter, by id
        self._kept: dict[int, dict[int, Tensor]] = {}  # step -> parameter's id -> norm

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._start = self._begin = trainer.global_step
        self._updates, self._kept = {}, {}

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Keep the norms of what is about to be updated, on this rank."""
        shown = getattr(trainer.strategy, "updated_parameters", None)
        parameters = list(pl_module.parameters()) if shown is None else list(shown)
        gradient_of = getattr(trainer.precision_plugin, "gradient_of", attrgetter("grad"))
        by_step: dict[int, dict[int, Tensor]] = {}
        for p in parameters:  # each stage is updated once a step, some stages late
            number = self._updates.get(id(p), 0)
            self._updates[id(p)] = number + 1
            step = self._start + number
            if step % self._interval(trainer) == 0 and (grad := gradient_of(p)) is not None:
                by_step.setdefault(step, {})[id(p)] = grad.detach()
        for step, grads in by_step.items():
            norms = torch._foreach_norm(list(grads.values()))
            self._kept.setdefault(step, {}).update(zip(grads, norms, strict=True))

    def _interval(self, trainer: Any) -> int:
        return max(1, self._every_n_steps or trainer.log_every_n_steps)

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Bring the norms of the epoch together, which all ranks do at this place."""
        every, named = self._interval(trainer), dict(pl_module.named_parameters())
        steps = [t for t in range(self._begin, trainer.global_step) if t % every == 0]
        self._begin = trainer.global_step
        if not steps:
            return
        norms = self._exchanged(steps, named, trainer.strategy.root_device)
        for t, row in zip(steps, norms.cpu(), strict=True):
            each = {n: x for n, x in zip(named, row, strict=True) if x != _MISSING}
            self.each[t] = {n: float(x) for n, x in each.items()}
            kept = self._kept.get(t, {}).values()  # float32 where a plugin has master weights
            dtypes = {named[n].dtype for n in each} | {norm.dtype for norm in kept}
            dtype = max(dtypes, key=lambda d: d.itemsize, default=torch.float32)
            stacked = torch.stack(list(each.values())).to(dtype) if each else torch.zeros(1)
            self.totals[t] = float(torch.linalg.vector_norm(stacked))  # as clipping reduces them
            self._log(trainer, t)
        self._kept.clear()

    def _exchanged(
        self, steps: list[int], named: dict[str, nn.Parameter], device: torch.device
    ) -> Tensor:
        """Return the norms of all ranks, shape (steps, parameters); float64 holds each exactly."""
        size = len(steps), len(named)
        rows = torch.full(size, _MISSING, dtype=torch.float64, device=device)
        places = {id(p): k for k, p in enumerate(named.values())}
        for row, t in zip(rows, steps, strict=True):
            for k, norm in self._kept.get(t, {}).items():
                row[places[k]] = norm.double()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(rows, dist.ReduceOp.MAX)
        return rows

    def _log(self, trainer: Any, t: int) -> None:
        values = {"grad_norm": self.totals[t]}
        if self._per_parameter:
            values |= {f"grad_norm/{n}": x for n, x in self.each[t].items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=t)
