"""The measurement: a LightningModule's profile, from one step of it on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_cyclic.cli.load_module import _arguments, _detached, _find, _make, _step
from lightning_cyclic.compat import LightningDataModule, LightningModule
from lightning_cyclic.errors import CyclicError, PlanError
from lightning_cyclic.planner.profile import ModelProfile
from lightning_cyclic.runtime.snapshot import untouched
from lightning_cyclic.runtime.stages.profiling import measured


def measure(
    where: str,
    *,
    data: str | None = None,
    texts: Sequence[str] = (),
    num_micros: Sequence[int] = (1,),
) -> tuple[ModelProfile, ...]:
    """Make a module, run its step and return what its units take.

    Args:
        where: of its class, "PATH:CLASS".
        data: of a LightningDataModule's class. [the module's own data]
        texts: arguments, "name=value".
        num_micros: numbers of micro-batches that the first batch is cut into; of each the first
            micro-batch is run.

    Returns:
        A profile for each size of a micro-batch that comes of it.

    Raises:
        PlanError: what was given is wrong, or the module cannot be cut.
    """
    try:
        mine, its_data = _arguments(texts)
        module = _make(_find(where, LightningModule), mine)
        feed = None if data is None else _make(_find(data, LightningDataModule), its_data)
        with _detached(module, feed):
            found = [_measured(module, feed, num_microbatches) for num_microbatches in num_micros]
            return tuple({profile.micro_size: profile for profile in found}.values())
    except PlanError:
        raise
    except CyclicError as error:
        raise PlanError(str(error)) from error


def _measured(
    module: LightningModule, feed: LightningDataModule | None, num_microbatches: int
) -> ModelProfile:
    step = _step(module, feed, num_microbatches)
    return measured(module, step, _given(module, step))


def _given(module: LightningModule, step: Callable[[], Any]) -> Any:
    """Return what a step gives the module: the batch, or the example input."""
    given: list[Any] = []
    run = module.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        given.append(args)
        return run(*args, **kwargs)

    def before_forward(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given.append(args or kwargs)

    module.__dict__["training_step"] = training_step
    handle = module.register_forward_pre_hook(before_forward, with_kwargs=True)
    try:
        with untouched(module), torch.no_grad():  # which forgets what hooks have kept
            step()
            first = given[0]
    finally:
        del module.__dict__["training_step"]
        handle.remove()
    return first
