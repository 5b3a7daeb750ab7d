"""The first batch of a fit, drawn once more than the fit does, and nothing changed by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Generator
from torch.utils.data import IterableDataset

from lightning_cyclic.errors import ConfigurationError


def first_batch(trainer: Trainer) -> Any:
    """Return the first batch of this rank's training data, on its device.

    The hook that makes the data is called once more. Random states are restored, also those of
    samplers with a generator of their own, and the places of loaders that know theirs.

    Raises:
        ConfigurationError: data that can be read once only, or none.
    """
    with isolate_rng():
        loaders = trainer.fit_loop._data_source.dataloader()
        combined = (
            loaders
            if isinstance(loaders, CombinedLoader)
            else CombinedLoader(loaders, "max_size_cycle")
        )
        for loader in combined.flattened:
            _refuse_single_use(loader)
        with ExitStack() as stack:
            for loader in combined.flattened:
                stack.enter_context(_unmoved(loader))
            batch = next(iter(combined), None)
        if batch is None:
            raise ConfigurationError(
                "the train_dataloader yields no batch to choose a plan by; allowed: one batch or "
                'more; check the data, or name a preset: CyclicStrategy("cyclic_dp")'
            )
        return trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch[0]))


def _refuse_single_use(loader: Any) -> None:
    source = getattr(loader, "dataset", loader)
    if source is not loader and not isinstance(source, IterableDataset):
        return
    if iter(source) is source:  # an iterator, of which what is drawn is gone
        raise ConfigurationError(
            f"the training data, {type(source).__name__}, can be read once only, and "
            'CyclicStrategy("auto") reads its first batch to choose a plan; allowed: data that '
            "begin again whenever iter() is called on them; make them so, or name a preset: "
            'CyclicStrategy("cyclic_dp")'
        )


@contextmanager
def _unmoved(loader: Any) -> Iterator[None]:
    """Put generators, and loaders that know their place, back where they were."""
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(owner, "generator", None) for owner in owners)
    generators = [(g, g.get_state()) for g in found if isinstance(g, Generator)]
    is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    place = loader.state_dict() if is_stateful else None
    try:
        yield
    finally:
        for generator, state in generators:
            generator.set_state(state)
        if is_stateful:
            loader.load_state_dict(place)
