"""Reductions that training_step asks for: held back until its forward, or the step, is over.

``self.log(..., on_step=True, sync_dist=True)`` reduces over all workers in the middle of the
forward. Worker 0 would wait there for worker 1, which waits for the BatchNorm statistics that
worker 0 hands on behind it. So the tensor is given back at once and takes the reduced value, in
place, when the forward is over: before any callback or logger reads it. Where workers wait for
parameters that others have, in the middle of their steps, it does so when the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.torch_functions import callers, module_of, user_line

Reduce = Callable[[Tensor, Any, Any], Tensor]


@final
class HeldReductions:
    """Hold reductions back, and run them in the order in which they were asked for."""

    def __init__(self) -> None:
        self.holding = False
        self._is_apart = False  # code of the user's, which workers run at different times
        self.updating = False
        self.adding = False  # between batches that are added up to one step
        self._held: list[tuple[Tensor, Any, Any]] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        self.holding = True
        try:
            yield
        finally:
            self.holding = False

    @contextmanager
    def running(self, *, together: bool) -> Iterator[None]:
        """Run the body, code of a step of the user's.

        Args:
            together: whether all workers run it at once, so that it may make them meet.
        """
        self._is_apart = not together
        try:
            yield
        finally:
            self._is_apart = False

    def stop_refusing(self) -> None:
        """Take what was under way for ended: it has failed."""
        self.holding = self.updating = self.adding = self._is_apart = False

    @property
    def keeps_apart(self) -> bool:
        """Say whether code of the user's is under way in which not all workers can meet."""
        return self.updating or self._is_apart

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse what the body asks for: an update is applied, on some workers only."""
        self.updating = True
        try:
            yield
        finally:
            self.updating = False

    def check_meeting(self, what: str) -> None:
        """Refuse to wait for all workers where not all of them pass at the same time."""
        if self.adding and not self.updating and not self.holding:
            raise StepError(
                f"{what} waits for all workers, but was called behind a batch that is added to "
                "others (accumulate_grad_batches), for the end of which workers behind wait; "
                "allowed: behind the last of them, where global_step has changed; call it there, "
                "and use Timer(interval='epoch') in the place of max_time"
            )
        if self.updating:
            where = "a hook around an update, which only the owner of a stage runs"
        elif self._is_apart:
            where = "training_step, where workers run one behind the other"
        else:
            return
        raise StepError(
            f"{what} waits for all workers, but was called in {where}; allowed: in validation, "
            "in on_train_batch_end or at the end of an epoch, and in training_step under "
            "'lockstep_dp' where no buffers change; call it there, log with self.log(..., "
            "sync_dist=True) in training_step, which is reduced behind it, or use strategy='ddp'"
        )

    def hold(self, tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
        """Return the tensor, which takes the reduced value later.

        Raises:
            StepError: while an update is applied.
        """
        if self.updating:
            self.check_meeting("a reduction (self.log with sync_dist=True, say)")
        self._held.append((tensor, group, reduce_op))
        return tensor

    def run(self, reduce: Reduce) -> None:
        held, self._held = self._held, []
        for tensor, group, reduce_op in held:
            reduced = reduce(tensor, group, reduce_op)
            if reduced is not tensor:
                tensor.copy_(reduced)


_ASKED_FIRST = (
    (c10d, "_rank_not_in_group"),  # by collectives
    (c10d, "_new_group_with_tag"),  # by new_group
    (functional, "_resolve_group"),
    (functional, "_resolve_group_name"),  # the same, in older versions of torch
)


_OURS = "lightning_cyclic.runtime"
_SEEN_THROUGH = (  # torch, and what is shown the functions that the user's code calls
    "torch.",
    *(f"{_OURS}.partial_step.{name}" for name in ("run", "plain_step", "ghosts")),
    *(f"{_OURS}.{name}" for name in ("torch_functions", "whole_step.draws", "absent")),
    f"{_OURS}.whole_step.engine",
    *(f"{_OURS}.stages.{name}" for name in ("survey", "stage_map", "ledger")),
)


@contextmanager
def refusing_collectives(reductions: HeldReductions) -> Iterator[None]:
    """Refuse collectives, while the body runs, in code of the user's that keeps ranks apart."""
    usual = [(m, name, getattr(m, name)) for m, name in _ASKED_FIRST if hasattr(m, name)]
    for module, name, function in usual:
        setattr(module, name, _Asked(reductions, function))
    try:
        yield
    finally:
        for module, name, function in usual:
            setattr(module, name, function)


@final
class _Asked:
    """Be what a function of torch.distributed asks first."""

    def __init__(self, reductions: HeldReductions, usual: Any) -> None:
        self._reductions = reductions
        self._usual = usual

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._reductions.keeps_apart:
            asked = next(callers()).f_code.co_name
            if not asked.startswith("get_") and not _is_ours(callers()):
                self._reductions.check_meeting(f"torch.distributed.{asked} ({user_line()})")
        return self._usual(*args, **kwargs)


def _is_ours(asking: Iterator[FrameType]) -> bool:
    """Say whether it is the package that calls torch.distributed: what it agrees on, it may."""
    names = map(module_of, asking)
    first = next((name for name in names if not name.startswith(_SEEN_THROUGH)), "")
    return first.startswith("lightning_cyclic.")
