"""Training: who answers the hooks that CyclicStrategy is asked.

    PlainTraining        Lightning itself: one worker, or nothing set up yet
    ReplicatedTraining   a session in which each worker runs whole micro-batches (replicated.py)
    PipelinedTraining    a session in which each worker runs single stages (pipelines.py)

A hook of Lightning's keeps its name and arguments here, behind ``own``: what Lightning itself
would do. What a training does not override is Lightning's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, final

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.agreement import device_for, require_same_module
from lightning_cyclic.runtime.transport import CountingTransport

Own: TypeAlias = Callable[..., Any]
Closure: TypeAlias = Callable[[], Any]


class AbstractTraining:
    """Answer a strategy's hooks, from its setup to its teardown."""

    @staticmethod
    def check(trainer: Trainer, *, sync_batchnorm: bool) -> None:
        """Refuse a Trainer and a module that cannot be trained so, before anything is set up.

        Raises:
            ConfigurationError: with the flag, what is allowed and what to do.
        """

    # ------------------------------------------------------------------ what users ask

    @property
    def plan(self) -> Plan | None:
        """Return the plan with the stages that were found; None before they are."""
        return None

    @property
    def stage_of(self) -> dict[str, int] | None:
        """Return parameter name -> stage; None before the stages are found."""
        return None

    @property
    def transport(self) -> CountingTransport | None:
        """Return what messages travel by, if any do."""
        return None

    def report(self) -> str:
        """Return where the stages of a pipeline could begin and where they do.

        Raises:
            ConfigurationError: before the first step, and elsewhere than on rank 0, where the
                module is looked at.
        """
        raise ConfigurationError(
            "strategy.report() was asked for where no module has been looked at; allowed: on "
            "rank 0, from the first step of a pipeline on; or run `lightning-cyclic doctor "
            "PATH:CLASS` without training"
        )

    # ------------------------------------------------------------------ one step

    def training_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step."""
        return own(*args, **kwargs)

    def validation_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step."""
        return own(*args, **kwargs)

    def test_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step."""
        return own(*args, **kwargs)

    def predict_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict step."""
        return own(*args, **kwargs)

    def reduce(self, own: Own, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce over all workers."""
        return own(tensor, group, reduce_op)

    def reduce_boolean_decision(self, own: Own, decision: bool, all: bool) -> bool:
        """Decide by all (or any) workers' decisions."""
        return bool(own(decision, all))

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Begin a backward."""

    def post_backward(self) -> None:
        """End a backward."""

    def accumulating(self) -> AbstractContextManager[None]:
        """Let gradients only accumulate while the body runs."""
        return nullcontext()

    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Closure, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the closure and update."""
        return own(optimizer, closure, *args, **kwargs)

    # ------------------------------------------------------------------ between steps

    def flush(self) -> None:
        """Finish updates in flight, so that the module holds the newest weights."""

    def begin_epoch(self) -> None:
        """Check what may have changed between epochs."""

    def end_epoch(self) -> None:
        """Bring metrics to all workers before anybody computes them."""

    def fail(self, text: str) -> None:
        """Communicate no more, and tell the other workers why."""

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self, own: Own) -> dict[str, Any]:
        """Return the newest weights, full on every worker."""
        state: dict[str, Any] = own()
        return state

    def optimizer_state(self, own: Own, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole optimizer state on worker 0."""
        state: dict[str, Any] = own(optimizer)
        return state

    def delayed_state(self) -> dict[str, Any] | None:
        """Return what else a checkpoint needs, if anything, to go on with the same bits."""
        return None

    def load_model_state_dict(
        self, own: Own, checkpoint: Mapping[str, Any], *, strict: bool
    ) -> None:
        """Load weights."""
        own(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, own: Own, checkpoint: Mapping[str, Any]) -> None:
        """Load the whole optimizer state."""
        own(checkpoint)

    def resume(self, saved: Mapping[str, Any] | None) -> bool:
        """Go on from weights that were loaded, and from the delayed state beside them.

        Returns:
            Whether it was taken; else it is for a training that is set up later.
        """
        return False

    def close(self) -> None:
        """Take everything off the module and the Trainer again."""


@final
class PlainTraining(AbstractTraining):
    """Leave everything to Lightning."""


def start_alike(module: nn.Module) -> None:
    """Give all workers worker 0's weights; all must call it.

    Raises:
        ConfigurationError: on every worker, where modules differ in more than values.
    """
    require_same_module(module)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            torch.distributed.broadcast(tensor, 0)


def agreed_seed() -> int:
    """Return the seed of worker 0, on every worker."""
    seed = torch.tensor([torch.initial_seed() % 2**63], device=device_for())
    torch.distributed.broadcast(seed, 0)
    return int(seed)


def epoch_ends(trainer: Trainer) -> bool:
    """Say whether no batch is to follow the one under way, in this epoch or at all."""
    loop = trainer.fit_loop.epoch_loop
    return bool(
        loop.batch_progress.is_last_batch
        or loop.batch_idx + 1 >= trainer.num_training_batches
        or trainer.global_step + 1 >= trainer.max_steps > 0
    )
