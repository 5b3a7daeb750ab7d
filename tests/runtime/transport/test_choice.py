"""Which transport is chosen, and what is refused; GPUs are names here."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_cyclic import CyclicStrategy
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.transport import HostStagedTransport, NamedTransport, choice
from lightning_cyclic.runtime.transport.choice import (
    link,
    naming_shared_gpus,
    refuse_shared_gpus,
    route_on_gpus,
)
from lightning_cyclic.runtime.transport.crew import Crew
from lightning_cyclic.runtime.transport.edges import LateEdges
from tests.harness import processes
from tests.runtime.transport.rings import join

APART, TOGETHER = ["host/a", "host/b", "host/c"], ["host/a", "host/b", "host/a"]
USE_GLOO = '; use process_group_backend="gloo"'


@pytest.mark.parametrize(
    ("route", "devices", "has_nccl", "expected"),
    [
        ("auto", APART, True, "edges"), ("auto", APART, False, "host_staged"),
        ("auto", TOGETHER, False, "host_staged"), ("edges", APART, True, "edges"),
        ("host_staged", APART, True, "host_staged"),
        ("host_staged", TOGETHER, False, "host_staged"),
    ],
)  # fmt: skip
def test_the_route_between_gpus(
    route: Any, devices: list[str], has_nccl: bool, expected: str
) -> None:
    assert route_on_gpus(route, devices, has_nccl=has_nccl) == expected


@pytest.mark.parametrize(
    ("route", "devices", "has_nccl", "text"),
    [
        ("auto", TOGETHER, True, "ranks 0 and 2 share a GPU, which NCCL refuses.*" + USE_GLOO),
        ("host_staged", TOGETHER, True, "ranks 0 and 2 share a GPU"),
        ("edges", TOGETHER, False, "leave process_group_backend out"),
        ("edges", APART, False, "leave process_group_backend out"),
        ("named", APART, True, "in the host's memory.*; use transport='auto'"),
    ],
)
def test_what_does_not_go_with_gpus_is_refused(
    route: Any, devices: list[str], has_nccl: bool, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        route_on_gpus(route, devices, has_nccl=has_nccl)


def test_one_gpu_named_twice_is_refused_before_anybody_connects() -> None:
    gpu, other = torch.device("cuda", 0), torch.device("cuda", 1)
    refuse_shared_gpus(None, has_nccl=True)
    refuse_shared_gpus([gpu, other], has_nccl=True)
    refuse_shared_gpus([gpu, gpu], has_nccl=False)
    refuse_shared_gpus([torch.device("cpu")] * 2, has_nccl=True)
    for refuse in (
        partial(refuse_shared_gpus, [gpu, gpu, gpu], has_nccl=True),
        CyclicStrategy(parallel_devices=[gpu, gpu, gpu]).setup_distributed,
    ):
        with pytest.raises(ConfigurationError, match="ranks 0, 1 and 2 share a GPU.*" + USE_GLOO):
            refuse()


def test_what_nccl_says_of_a_shared_gpu_is_told_with_what_to_do() -> None:
    said = "NCCL error\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on 1000"
    with pytest.raises(ConfigurationError, match="rank 1 and rank 0 both on.*" + USE_GLOO):  # noqa: SIM117
        with naming_shared_gpus():
            raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="^something else$"), naming_shared_gpus():
        raise RuntimeError("something else")


def linked(route: Any, device: str) -> tuple[str, str, str]:
    """Return what is made for workers that have one GPU, if any: what it is does not matter."""
    join()
    choice._identity = lambda device: "host/a"  # type: ignore[assignment]
    assembly = Assembly(Crew(20.0))
    made = link(route, torch.device(device), assembly)
    assembly.meet("to end")  # the store ends with rank 0: all have read the hosts
    made.close()
    backend = torch.distributed.get_backend(assembly.group)
    return made.route, type(made._inner).__name__, backend


@pytest.mark.multi
@pytest.mark.parametrize(
    ("route", "device", "num_ranks", "expected"),
    [
        ("auto", "cpu", 2, NamedTransport), ("named", "cpu", 2, NamedTransport),
        ("edges", "cpu", 2, LateEdges), ("host_staged", "cpu", 2, HostStagedTransport),
        ("auto", "cuda", 2, HostStagedTransport), ("edges", "cuda", 1, NamedTransport),
    ],
)  # fmt: skip
def test_all_workers_make_one_kind(
    route: str, device: str, num_ranks: int, expected: type
) -> None:
    made = processes.run(linked, num_ranks, route, device)
    names = {NamedTransport: "named", LateEdges: "edges", HostStagedTransport: "host_staged"}
    assert made == [(names[expected], expected.__name__, "gloo")] * num_ranks


def test_an_unknown_route_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="transport='tcp'; allowed: .*'host_staged'; use transport='auto'"
    ):
        CyclicStrategy(transport="tcp")  # type: ignore[arg-type]
