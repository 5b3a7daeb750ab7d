"""Foreign weights: those of other workers' stages, absent while steps run.

behind a flush    all workers gather what they lack; the next step lets it go again
elsewhere         who reads them is told their name, stage and worker, and where they can be read
do not fit        the same: a worker that has never had the whole module (meta.py) never gets it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.absent import Home
from lightning_cyclic.runtime.partial_step.ghosts import user_line


class Holdings(Protocol):
    """Say what a worker has of a module, and let go of the rest."""

    @property
    def foreign(self) -> Sequence[str]:
        """Return the names of the parameters that other workers have."""

    @property
    def stale(self) -> Sequence[str]:
        """Return the names of the buffers that other workers' steps change."""

    @property
    def is_freed(self) -> bool:
        """Say whether what others have has no memory here."""

    def free_foreign(self, home: Home | None) -> None:
        """Give up the memory of what other workers have; its home is told who reads it."""

    def restore(self) -> None:
        """Give it memory again, without values."""


@final
class ForeignWeights:
    """Have what other workers have here behind a flush, and absent else.

    Args:
        module: the whole module.
        stage_of: name -> stage, of parameters and of the buffers that training changes.
        holdings: which of them this worker has.
        rank_of_stage: stage -> rank of the worker that updates it.
        fits: whether a worker may have the whole module.
        gather: returns all parameters and buffers by name; all workers call it together.
    """

    def __init__(
        self,
        module: nn.Module,
        stage_of: Mapping[str, int],
        holdings: Holdings,
        rank_of_stage: Callable[[int], int],
        fits: bool,
        gather: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._module = module
        self._stage_of = stage_of
        self._holdings = holdings
        self._rank_of_stage = rank_of_stage
        self.fits = fits
        self._gather = gather
        self.is_running = False  # a part of the program

    @property
    def are_here(self) -> bool:
        """Say whether this worker has the whole module."""
        return not self._holdings.is_freed

    def bring(self) -> None:
        """Have the whole module on every worker until the next step; all workers must call it.

        Where it does not fit, do nothing: who reads what is absent is told.
        """
        if self.are_here or not self.fits:
            return
        came = self._gather()
        with torch.inference_mode(mode=False), torch.no_grad():
            self._holdings.restore()
            named = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
            for n in (*self._holdings.foreign, *self._holdings.stale):
                named[n].copy_(came[n])

    def leave(self) -> None:
        """Have no foreign weights from here on."""
        self._holdings.free_foreign(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the body, a part of the program, without foreign weights."""
        self.leave()
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    # ------------------------------------------------------------------ who reads what is absent

    def read(self, names: Sequence[str]) -> NoReturn:
        """Refuse that an absent parameter or buffer is read.

        Raises:
            StepError: with its stage, and the rank that has it.
        """
        j = self._stage_of[names[0]]
        raise StepError(
            f"{user_line()} reads {names[0]!r} of stage {j}, which rank {self._rank_of_stage(j)} "
            f"has and this rank has not, {self._why}"
        )

    @property
    def _why(self) -> str:
        if not self.fits:
            return (
                "as all parameters together exceed memory_limit_bytes; allowed: parameters of a "
                "rank's own stages; behind training read a checkpoint folder, or raise "
                "memory_limit_bytes"
            )
        if self.is_running:
            return (
                "in the middle of a step; allowed: reads of the whole module in hooks of "
                "validation and at the end of epochs; or let one stage have what is read and the "
                "code that reads it, stages=[...]"
            )
        return (
            "between steps; allowed: reads of the whole module in hooks of validation and at the "
            "end of epochs, where each rank has it; elsewhere do it on all ranks, under "
            "`with trainer.strategy.whole():`"
        )

    def read_gradient(self, name: str) -> None:
        """Refuse to read the gradient of a foreign parameter, which is None here.

        Raises:
            StepError: unless steps are under way, in which updates are made.
        """
        if not self.is_running:
            j = self._stage_of[name]
            raise StepError(
                f"{user_line()} reads the gradient of {name!r} of stage {j}, which rank "
                f"{self._rank_of_stage(j)} has; allowed: gradients of a rank's own stages, whose "
                "parameters are [n for n, j in trainer.strategy.stage_of.items() if j in "
                "trainer.strategy.own_stages]; read those, or use strategy='ddp' for this run"
            )
