"""Profiles of a fit's own step, on its own first batch, before anything has been trained."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_cyclic.planner.profile import ModelProfile
from lightning_cyclic.plugin.split_hook import first_part
from lightning_cyclic.runtime.plain_copies import ours
from lightning_cyclic.runtime.snapshot import untouched
from lightning_cyclic.runtime.stages.profiling import measured
from lightning_cyclic.runtime.values.reading import size_of


def profiles_of(
    trainer: Trainer, batch: Any, cuts: Callable[[int], Iterable[int]] = lambda rows: (1,)
) -> tuple[ModelProfile, ...]:
    """Measure the module's step on this rank.

    Args:
        trainer: whose module is on its device.
        batch: as of :func:`first_batch`.
        cuts: from the rows of the batch to numbers of parts to cut it into; the first of the parts
            is measured. [the whole batch]

    Returns:
        One profile for each size, up to the number of parts that the step cannot do with.
    """
    module = trainer.lightning_module
    found: dict[int, ModelProfile] = {}
    with _quiet(module):
        for num_parts in cuts(size_of(batch)):
            part = first_part(batch, num_parts, module, trainer.datamodule)  # type: ignore[attr-defined]
            try:
                profile = measured(module, _step(trainer, part), part)
            except Exception:
                if not found:
                    raise
                break  # too few rows, as one for BatchNorm; more parts have no more
            found.setdefault(profile.micro_size, profile)
    return tuple(found.values())


def leaves_out_parameters(trainer: Trainer, batch: Any) -> bool:
    """Say whether a step on this batch gives some trained parameter no gradient."""
    module = trainer.lightning_module
    with _quiet(module), untouched(module):
        found = _step(trainer, batch)()
        loss = found["loss"] if isinstance(found, dict) else found
        loss.backward()
        is_partial = any(p.grad is None for p in module.parameters() if p.requires_grad)
    module.zero_grad(set_to_none=True)
    return is_partial


@contextmanager
def _quiet(module: LightningModule) -> Iterator[None]:
    """Keep nothing of what the module logs."""
    for name in ("log", "log_dict"):
        module.__dict__[name] = ours(lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            del module.__dict__[name]


def _step(trainer: Trainer, batch: Any) -> Callable[[], Any]:
    """Return what runs the module's step as a fit does."""
    arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)

    def step() -> Any:
        with trainer.precision_plugin.train_step_context():
            return trainer.lightning_module.training_step(*arguments.values())

    return step
