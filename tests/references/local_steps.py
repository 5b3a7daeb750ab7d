"""Local steps, written down without the package: DiLoCo, and with its stages in turn.

A codec is the one that the package has.

Source: algorithm 1 of https://arxiv.org/abs/2311.08105; fragments in turn: section 2.1 of
https://arxiv.org/abs/2501.18512.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cyclic import AbstractCodec
from tests.modules.classifier import Classifier, MicroBatches


@dataclass(kw_only=True)
class LocalReference:
    """Workers that are trained one after the other, and what they left.

    Args:
        moments: step of a period -> stages that are exchanged behind it.
        every: steps of a period.
        lr: of the outer weights; so is momentum.
        clip: norm to which each worker clips its gradients. [they are not]
        accumulate: batches of a step.
        delay: steps behind which workers use what an exchange has made.
        mixing: how much of their own weights they keep then.
        dtype: of own weights and data; outer ones have float32 at their owner.
        last_rows: rows of the last batch of each worker. [all]
        codec: by which each worker's differences are encoded, with a memory for each tensor.
        frozen: what parameters begin with that are not trained from a step on, up to another.
    """

    n: int
    num_steps: int
    every: int
    moments: dict[int, list[int]]
    lr: float = 0.7
    momentum: float = 0.9
    clip: float | None = None
    accumulate: int = 1
    delay: int = 0
    mixing: float = 0.0
    dtype: torch.dtype = torch.float32
    last_rows: int | None = None
    codec: AbstractCodec | None = None
    frozen: tuple[str, int, int] = ("", 0, 0)

    def run(self, module: Classifier, stage_of: dict[str, int]) -> LocalReference:
        """Train copies of a module; the reference has losses by worker, and outer weights."""
        torch.set_num_threads(1)
        workers = [copy.deepcopy(module).to(self.dtype) for _ in range(self.n)]
        optimizers = [worker.configure_optimizers() for worker in workers]
        data = MicroBatches(module.kind, self.num_steps * self.accumulate * self.n)
        dtypes = {n: p.dtype for n, p in workers[0].named_parameters()}
        outer = {
            n: nn.Parameter(p.detach().to(dtypes[n]).float()) for n, p in module.named_parameters()
        }
        nesterov = self.momentum > 0
        by_all = torch.optim.SGD(
            outer.values(), lr=self.lr, momentum=self.momentum, nesterov=nesterov
        )
        self._states: dict[tuple[int, str], dict[str, Tensor]] = {}
        self.losses: list[list[float]] = [[] for _ in range(self.n)]
        self.outer: list[dict[str, Tensor]] = []  # behind each step
        for t in range(self.num_steps):
            for i, worker in enumerate(workers):
                for name, p in worker.named_parameters():
                    p.requires_grad_(not self._is_frozen(name, t))
                first = t * self.accumulate
                batches = [data[k * self.n + i] for k in range(first, first + self.accumulate)]
                if t == self.num_steps - 1:
                    batches = [(x[: self.last_rows], y[: self.last_rows]) for x, y in batches]
                batches = [(x.to(self.dtype), y) for x, y in batches]
                self.losses[i] += self._step(worker, optimizers[i], batches)
            stages = self.moments.get(t % self.every, [])
            met = [n for n, j in stage_of.items() if j in stages]
            for name in (n for n in met if not self._is_frozen(n, t)):
                own = [dict(worker.named_parameters())[name].detach() for worker in workers]
                changes = [outer[name].detach().to(dtypes[name]) - x for x in own]
                total, *others = (self._sent(i, name, x).float() for i, x in enumerate(changes))
                for x in others:
                    total = total + x
                outer[name].grad = total / self.n
            by_all.step()
            by_all.zero_grad()
            begun = t - self.delay
            used = self.moments.get(begun % self.every, []) if begun >= 0 else []
            for worker in workers:
                for name in (n for n, j in stage_of.items() if j in used):
                    p, part = dict(worker.named_parameters())[name].data, self.mixing
                    part = 0.0 if self._is_frozen(name, t) else part
                    p.copy_(p.float() * part + outer[name].data.to(p.dtype).float() * (1 - part))
            self.outer.append({n: p.detach().to(dtypes[n], copy=True) for n, p in outer.items()})
        self.buffers = [{n: x.clone() for n, x in w.named_buffers()} for w in workers]
        return self

    def _sent(self, i: int, name: str, change: Tensor) -> Tensor:
        """Return a difference as it comes to the owner."""
        if self.codec is None or not self.codec.takes(change):
            return change
        sent = self.codec.encode(change, self._states.setdefault((i, name), {}))
        return self.codec.decode(sent, torch.empty_like(change, device="meta"))

    def _is_frozen(self, name: str, t: int) -> bool:
        prefix, first, end = self.frozen
        return first <= t < end and name.startswith(prefix)

    def _step(self, worker: Classifier, made: Any, batches: list[Any]) -> list[float]:
        parts = made if isinstance(made, dict) else {"optimizer": made}
        parts["optimizer"].zero_grad()
        losses = [worker.loss(batch, 0) for batch in batches]
        for loss in losses:
            (loss / self.accumulate).backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(worker.parameters(), self.clip)
        parts["optimizer"].step()
        if "lr_scheduler" in parts:
            parts["lr_scheduler"]["scheduler"].step()
        return [float(loss.detach()) for loss in losses]
