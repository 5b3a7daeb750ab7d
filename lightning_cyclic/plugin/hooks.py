"""Hooks: what a strategy is asked, answered as Lightning itself does.

A hook of Lightning's keeps its name and arguments here, behind ``own``: what Lightning itself
would do. A training (training.py) answers those in which it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.transport import CountingTransport
from lightning_cyclic.simulate import Memory

Own: TypeAlias = Callable[..., Any]
Closure: TypeAlias = Callable[[], Any]


class Hooks:
    """Answer a strategy's hooks where Lightning's own step runs on whole weights."""

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
    def own_stages(self) -> tuple[int, ...] | None:
        """Return the stages that this worker alone has; None where it has all."""
        return None

    @property
    def updated_parameters(self) -> Sequence[nn.Parameter] | None:
        """Return those whose whole gradients on_before_optimizer_step sees; None for all."""
        return None

    @property
    def transport(self) -> CountingTransport | None:
        return None

    @property
    def steps_compared(self) -> int:
        return 0

    @property
    def not_compared(self) -> Sequence[str]:
        return ()

    def planned_memory(self, batch_bytes: int) -> Memory | None:
        """Return what this worker keeps by the plan, if there is one; all workers must call it."""
        return None

    def report(self) -> str | None:
        """Return where stages could begin and where they do, if known."""
        return None

    # ------------------------------------------------------------------ steps

    def training_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    def validation_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    def test_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    def predict_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    def pre_backward(self, own: Own, closure_loss: Tensor) -> None:
        own(closure_loss)

    def post_backward(self, own: Own, closure_loss: Tensor) -> None:
        own(closure_loss)

    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Closure, model: Any = None, **kwargs: Any
    ) -> Any:
        return own(optimizer, closure, model, **kwargs)

    def accumulating(self, own: Own) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = own()
        return context

    def reduce(self, own: Own, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return own(tensor, group, reduce_op)

    def reduce_boolean_decision(self, own: Own, decision: bool, all: bool = True) -> bool:
        """Decide by all (or any) workers' decisions."""
        return bool(own(decision, all))

    # ------------------------------------------------------------------ between steps

    def flush(self) -> None:
        """Finish updates in flight, so that the module holds the newest weights."""

    def bring(self) -> None:
        """Behind a flush, have the whole module on every worker until the next step."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Run the body with the whole module; all workers must call it, between steps."""
        self.flush()
        self.bring()
        yield

    # ------------------------------------------------------------------ checkpoints

    @property
    def with_state(self) -> Sequence[nn.Parameter] | None:
        """Return the parameters that this worker has optimizer state for; None: nobody knows."""
        return None

    def lightning_module_state_dict(self, own: Own) -> dict[str, Any]:
        """Return the newest weights: full on every worker, or the part that each one writes."""
        state: dict[str, Any] = own()
        return state

    def optimizer_state(self, own: Own, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole optimizer state on worker 0; or the part that this worker writes."""
        state: dict[str, Any] = own(optimizer)
        return state

    def delayed_state(self) -> dict[str, Any] | None:
        """Return what else a checkpoint needs, if anything, to go on with the same bits."""
        return None

    def writable(self) -> AbstractContextManager[None]:
        """Let the body write to every parameter of the module, also to what others hold."""
        return nullcontext()

    def load_optimizer_state_dict(self, own: Own, checkpoint: Mapping[str, Any]) -> None:
        own(checkpoint)

    # ------------------------------------------------------------------ the end

    def close(self) -> None: ...
