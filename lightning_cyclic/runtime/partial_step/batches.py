"""The batches of a pipeline's steps: who gives them, and the micro-batches that they become.

batch of the worker that loads  ->  all of its replica      messages D of the program
batch                           ->  micro-batches           as its tensors say, or a hook
micro-batch i of replica q      ->  number i * replicas + q of the step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan.actions import Action, Payload
from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig
from lightning_cyclic.runtime.partial_step.micro_batches import (
    BatchCutter,
    BatchReads,
    refusing_time_major,
    shares_of,
    words_for,
)
from lightning_cyclic.runtime.partial_step.stage_step import Micro
from lightning_cyclic.runtime.values.split import MicroBatch, family, signature
from lightning_cyclic.runtime.values.trees import map_tensors, tensors


@final
class Batches:
    """Share and cut the batches of one worker's replica.

    Args:
        replica: which one of all.
    """

    def __init__(
        self, module: nn.Module, config: StagewiseConfig, replica: int, device: torch.device
    ) -> None:
        self.shared: dict[int, Message] = {}  # by step, while they are on their way
        self._module = module
        self._config = config
        self._replica = replica
        self._device = device
        self._cutter = BatchCutter(
            config.num_microbatches, config.split_batch, config.say, may_leave=config.is_one_stage
        )

    def share(
        self, t: int, batch: Any, sharing: Sequence[Action], take: Callable[[], None],
        name: Callable[[int | None], str],
    ) -> Any:  # fmt: skip
        """Return the batch of the worker of this replica whose loader gives them.

        Args:
            t: step.
            batch: that this worker has been given: its structure counts.
            sharing: what the program has for that; nothing where each has its own.
            take: carries that out.
            name: says who a worker is; None: this one.

        Raises:
            StepError: theirs has another number of tensors.
        """
        if not sharing:
            return batch
        mine = tensors(batch)
        self.shared[t] = Message(mine, len(mine))
        take()
        shared = self.shared.pop(t)
        if shared.facts != len(mine):
            raise StepError(
                f"the batch of {name(None)} has {len(mine)} tensors, that of "
                f"{name(sharing[-1].peer)} has {shared.facts}; allowed: batches of one structure; "
                "check the dataset of each rank"
            )
        told = iter(shared.tensors)
        return map_tensors(lambda x: next(told), batch)

    def cut(self, batch: Any) -> list[MicroBatch]:
        """Cut a replica's batch into micro-batches; nobody minds one alone where nobody waits."""
        return self._cutter.cut(batch)

    def how_cut(self) -> str | None:
        """Return how batches have been cut; None before any has been."""
        return self._cutter.report()

    def along_samples(
        self, parts: Sequence[MicroBatch], call: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        """Let the user's step refuse to take the samples of these parts for time."""
        sizes, config = {part.size for part in parts}, self._config
        if config.num_microbatches == 1 or config.split_batch is not None or len(sizes) > 1:
            return call
        return partial(refusing_time_major, self._module, sizes.pop(), call)

    def shares(
        self, t: int, sizes: Sequence[int], accumulate: int
    ) -> list[Callable[[Tensor], Tensor]]:
        """Return the share of each micro-batch of step ``t`` in the update's loss.

        Args:
            t: step; its loss may be scaled.
            sizes: of micro-batches.
            accumulate: batches per update.
        """
        shares = shares_of(sizes, self._config.replicas * accumulate)
        if self._config.scaled is None:
            return shares
        return [self._config.scaled(t, share) for share in shares]

    def require_usual_number(self, parts: Sequence[MicroBatch]) -> None:
        """Refuse another number of micro-batches than in all other steps.

        Raises:
            StepError: with the number.
        """
        if len(parts) != self._config.num_microbatches:
            raise StepError(
                f"a batch gave {len(parts)} micro-batches, but "
                f"num_microbatches={self._config.num_microbatches}; "
                "allowed with delayed weights: as many in every step, as they decide which "
                "version is read; use DataLoader(drop_last=True), or larger batches"
            )

    def numbered(
        self, parts: Sequence[MicroBatch], shares: Sequence[Callable[[Tensor], Tensor]], kind: str
    ) -> dict[int, Micro]:
        """Return the micro-batches of this replica by their numbers among those of all."""
        waits = self._device.type != "cpu"  # who reads a value, for what computes it
        sizes = [part.size for part in parts] if kind == "train" else []
        return {
            i * self._config.replicas + self._replica: Micro(
                part.batch,
                weight,
                f"{kind} {signature(part.batch)}",
                f"{kind} {family(part.batch)}",
                BatchReads() if waits else None,
                words_for(i, sizes) if sizes else "",
                part.size,
            )
            for i, (part, weight) in enumerate(zip(parts, shares, strict=True))
        }


def apart_from_sharing(actions: Sequence[Action]) -> tuple[list[Action], list[Action]]:
    """Return what shares the batch, with what earlier steps have before that, and the rest."""
    behind = [n + 1 for n, a in enumerate(actions) if a.payload is Payload.D]
    begin = max(behind, default=0)
    return list(actions[:begin]), list(actions[begin:])
