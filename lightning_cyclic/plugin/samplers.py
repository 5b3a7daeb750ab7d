"""Samplers of the user's own that give each rank another part of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_cyclic.errors import ConfigurationError

_INSIDE = ("sampler", "batch_sampler")  # of loaders, of batch samplers, and of what wraps them


def check_samplers(loader: object, wanted: Mapping[str, int], preset: str) -> None:
    """Refuse a sampler that gives ranks of one replica different data, as each runs some stages.

    Args:
        loader: of any kind.
        wanted: "num_replicas" and "rank" among them, of this rank.
        preset: of the plan, for errors.

    Raises:
        ConfigurationError: with both.
    """
    for sampler in _samplers(loader):
        given = {name: getattr(sampler, name, None) for name in wanted}
        if all(isinstance(x, int) for x in given.values()) and given != wanted:
            raise ConfigurationError(
                f"a loader has a {type(sampler).__name__} with {_words(given)}, but under preset "
                f"{preset!r} the ranks of a replica run stages of the same batches; allowed on "
                f"this rank: {_words(wanted)}; make it with "
                "DistributedSampler(data, **self.trainer.distributed_sampler_kwargs), or leave "
                "sampler=... out, and Lightning makes one where data are to be divided"
            )


def _samplers(holder: Any, depth: int = 4) -> Iterator[Any]:
    for inner in (getattr(holder, name, None) for name in _INSIDE if depth):
        if inner is not None:
            yield inner
            yield from _samplers(inner, depth - 1)


def _words(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={number}" for name, number in numbers.items())
