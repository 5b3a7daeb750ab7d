"""The first training step, which finds the stages.

Version 0 is what every stage of step 0 reads, so step 0 needs no stages for its forwards: they
run one worker after the other, as the sequential run does, handing all module buffers on, and
take notes on the way. Then the workers agree on the stages and the backwards go on staggered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.agreement import describe_batch, require_same_lines
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.buffers import Layout
from lightning_cyclic.runtime.stages.stage_map import Profile, Recorder, Unit


@final
class FirstStep:
    """Run the forwards of step 0 in the order of workers and record them.

    Args:
        parameters: name -> parameter, for those that are trained.
        counts: whether bytes of activations are counted.
    """

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], assembly: Assembly,
        *, counts: bool = False,
    ) -> None:  # fmt: skip
        self._module = module
        self._assembly = assembly
        self._recorder = Recorder(module, dict(parameters), counts=counts)
        self._batch = ""
        self._profile: Profile | None = None
        self._orders: list[list[str]] = []  # in which each worker used its parameters
        self._layout = Layout((b for _, b in module.named_buffers()), torch.device("cpu"))

    @contextmanager
    def forward(self, batch: Any, *, first: bool) -> Iterator[None]:
        """Run the body as one forward of the step; the first of its batches is recorded."""
        if not first:
            yield
            return
        self._batch = describe_batch(batch)
        with self._recorder.recording():
            yield

    def note(self) -> None:
        self._profile = self._recorder.profile()

    def receive(self) -> None:
        """Take in all buffers as the worker before this one left them."""
        ranks = self._assembly
        if ranks.rank > 0 and self._buffers():
            buffer, peer = self._layout.new(), ranks.rank - 1
            with ranks.waiting("to send the buffers of the module", peer):
                dist.recv(buffer.data, peer, group=ranks.group)
            for own, view in zip(self._buffers(), buffer.tensors, strict=True):
                own.copy_(view)

    def send(self) -> None:
        """Hand all buffers to the worker behind this one."""
        ranks = self._assembly
        if ranks.rank < ranks.num_ranks - 1 and self._buffers():
            buffer, peer = self._layout.new(), ranks.rank + 1
            buffer.write(self._buffers())
            with ranks.waiting("to take the buffers of the module", peer):
                dist.send(buffer.data, peer, group=ranks.group)

    def agree(self) -> Profile:
        """Return the profile that all workers share.

        Raises:
            StepError: on every worker, if batches differ.
        """
        mine = self._profile or self._recorder.profile()
        both = self._assembly.share((self._batch, asdict(mine)), "to agree on the stages")
        require_same_lines(
            "the data of their first batch",
            [batch for batch, _ in both],
            "the same structure, dtypes and number of dims; check the dataset of each rank",
        )
        everyone = [data for _, data in both]
        self._orders = [[n for u in data["units"] for n in u["parameters"]] for data in everyone]
        return _shared(everyone)

    def check_order(self, stage_of: Mapping[str, int]) -> None:
        """Refuse stages that some worker's forward entered in another order.

        Workers may use parameters differently, as long as they do so inside one stage. What only
        some of them use is in stage 0, which is there before a step begins.

        Raises:
            StepError: on every worker, with the order of the one that differs.
        """
        for w, order in enumerate(self._orders):
            entered = list(dict.fromkeys(j for j in map(stage_of.__getitem__, order) if j > 0))
            if entered != sorted(entered):
                raise StepError(
                    f"the first training step of rank {w} entered the stages that rank 0 has "
                    f"in the order {entered}; allowed: the same order everywhere; control flow "
                    "that differs between workers must lie inside one stage: put boundaries "
                    'around it, stages=["module.path", ...], or use stages=1'
                )

    def _buffers(self) -> list[torch.Tensor]:
        return [b.detach() for _, b in self._module.named_buffers()]


def _shared(everyone: Sequence[Mapping[str, Any]]) -> Profile:
    """Return worker 0's profile, with the buffers that changed on any worker.

    Whether statistics change may depend on the batch: what changed anywhere is relayed.
    """
    base = everyone[0]
    units = tuple(Unit(**{key: tuple(names) for key, names in u.items()}) for u in base["units"])
    changed: dict[str, tuple[int, int]] = {}
    for data in everyone:
        for name, (first, last) in data["buffers"].items():
            # another worker's units mean nothing here: such a buffer may change anywhere
            span = (first, last) if data["units"] == base["units"] else (0, len(units) - 1)
            changed.setdefault(name, span)
    unused, resting = tuple(base["unused"]), tuple(base["resting"])
    # one plan for all: where most is left
    alike = [data["saved"] for data in everyone if len(data["saved"]) == len(base["saved"])]
    saved = tuple(map(max, zip(*alike, strict=True)))
    return Profile(
        units=units, unused=unused, buffers=changed, resting=resting, saved=saved,
        last=base["last"],
    )  # fmt: skip
