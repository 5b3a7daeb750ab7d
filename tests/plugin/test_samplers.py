"""Samplers that divide data: whom they may give different ones."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.checks import check_samplers

DATA = range(16)
ONE, SECOND_OF_TWO = {"num_replicas": 1, "rank": 0}, {"num_replicas": 2, "rank": 1}


def sampler(num_replicas: int, rank: int) -> DistributedSampler[Any]:
    return DistributedSampler(DATA, num_replicas, rank)  # type: ignore[arg-type]


def loaders(given: DistributedSampler[Any]) -> list[DataLoader[Any]]:
    return [
        DataLoader(DATA, sampler=given),  # type: ignore[arg-type]
        DataLoader(DATA, batch_sampler=BatchSampler(given, 2, False)),  # type: ignore[arg-type]
    ]


def test_replicas_have_what_they_are_given() -> None:
    for given in (ONE, SECOND_OF_TWO):
        for loader in loaders(sampler(**given)):
            check_samplers(loader, given, "1f1b")
    for other in ([1, 2], DataLoader(DATA), DataLoader(DATA, sampler=RandomSampler(DATA))):  # type: ignore[arg-type]
        check_samplers(other, ONE, "1f1b")


@pytest.mark.parametrize(
    ("given", "wanted", "allowed"),
    [
        (SECOND_OF_TWO, ONE, "num_replicas=1, rank=0"),
        ({"num_replicas": 4, "rank": 3}, SECOND_OF_TWO, "num_replicas=2, rank=1"),
        ({"num_replicas": 2, "rank": 0}, SECOND_OF_TWO, "num_replicas=2, rank=1"),
    ],
)
def test_others_are_refused(given: dict[str, int], wanted: dict[str, int], allowed: str) -> None:
    for loader in loaders(sampler(**given)):
        with pytest.raises(ConfigurationError) as error:
            check_samplers(loader, wanted, "1f1b")
        assert f"a DistributedSampler with num_replicas={given['num_replicas']}" in str(
            error.value
        )
        assert f"allowed on this rank: {allowed}; make it with" in str(error.value)
