"""The hook by which users cut their batches: ``split_batch(batch, num_microbatches)``."""

from __future__ import annotations

from typing import Any

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.partial_step.micro_batches import BatchCutter, SplitBatch


def split_hook(module: Any, datamodule: Any) -> SplitBatch | None:
    """Return the hook of the LightningModule, else that of the datamodule; None without.

    Raises:
        ConfigurationError: if it cannot be called.
    """
    for owner in (module, datamodule):
        hook: SplitBatch | None = getattr(owner, "split_batch", None)
        if hook is not None and not callable(hook):
            raise ConfigurationError(
                f"{type(owner).__name__}.split_batch is of type {type(hook).__name__}; allowed: a "
                "method split_batch(self, batch, num_microbatches) that returns the parts of a "
                "batch; give the attribute another name"
            )
        if hook is not None:
            return hook
    return None


def first_part(batch: Any, num_parts: int, module: Any, datamodule: Any) -> Any:
    """Return the first of the micro-batches that a fit would cut a batch into."""
    return BatchCutter(num_parts, split_hook(module, datamodule)).cut(batch)[0].batch
