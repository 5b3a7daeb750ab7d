"""Which transport is chosen, and what is refused; GPUs are names here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cyclic import CyclicStrategy
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.transport import HostStagedTransport, NamedTransport, choice
from lightning_cyclic.runtime.transport.choice import link, route_on_gpus
from lightning_cyclic.runtime.transport.crew import Crew
from lightning_cyclic.runtime.transport.edges import LateEdges
from lightning_cyclic.runtime.transport.shared_gpus import Nccl
from tests.harness import processes
from tests.runtime.transport.rings import join

APART, TOGETHER = ["host/a", "host/b", "host/c"], ["host/a", "host/b", "host/a"]
OLD, NEW = Nccl((2, 28, 9), "1"), Nccl((2, 30, 7), "1")


@pytest.mark.parametrize(
    ("route", "devices", "nccl", "expected"),
    [
        ("auto", APART, OLD, "edges"), ("auto", APART, None, "host_staged"),
        ("auto", TOGETHER, None, "host_staged"), ("edges", APART, OLD, "edges"),
        ("host_staged", APART, OLD, "host_staged"),
        ("host_staged", TOGETHER, None, "host_staged"),
        ("auto", TOGETHER, NEW, "edges"), ("edges", TOGETHER, NEW, "edges"),
        ("host_staged", TOGETHER, NEW, "host_staged"),
    ],
)  # fmt: skip
def test_the_route_between_gpus(
    route: Any, devices: list[str], nccl: Nccl | None, expected: str
) -> None:
    assert route_on_gpus(route, devices, nccl) == expected


@pytest.mark.parametrize(
    ("route", "devices", "nccl", "text"),
    [
        ("auto", TOGETHER, OLD, "ranks 0 and 2 share a GPU, which NCCL 2.28.9 refuses; "),
        ("host_staged", TOGETHER, OLD, "ranks 0 and 2 share a GPU"),
        ("edges", TOGETHER, NEW._replace(setting=""), "ranks 0 and 2 .* refuses unless NCCL_MULT"),
        ("edges", TOGETHER, None, "leave process_group_backend out"),
        ("edges", APART, None, "leave process_group_backend out"),
        ("named", APART, NEW, "in the host's memory.*; use transport='auto'"),
    ],
)
def test_what_does_not_go_with_gpus_is_refused(
    route: Any, devices: list[str], nccl: Nccl | None, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        route_on_gpus(route, devices, nccl)


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


def refused(versions: list[tuple[int, ...]]) -> str:
    """Link workers that share a GPU, each with an NCCL of its own; return what that says."""
    join()
    mine = Nccl(versions[torch.distributed.get_rank()], "1")
    choice._identity = lambda device: "host/a"  # type: ignore[assignment]
    choice.loaded_nccl = lambda: mine  # type: ignore[assignment]
    torch.distributed.get_backend_config = lambda *_: "cuda:nccl"
    assembly = Assembly(Crew(20.0))
    with pytest.raises(ConfigurationError) as caught:
        link("auto", torch.device("cuda"), assembly)
    assembly.meet("to end")
    return str(caught.value)


@pytest.mark.multi
def test_all_workers_refuse_where_one_has_an_nccl_that_is_too_old() -> None:
    first, second = processes.run(refused, 2, [(2, 30, 0), (2, 28, 9)])
    assert first == second
    assert "ranks 0 and 1 share a GPU, which NCCL 2.28.9 refuses" in first


def test_an_unknown_route_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="transport='tcp'; allowed: .*'host_staged'; use transport='auto'"
    ):
        CyclicStrategy(transport="tcp")  # type: ignore[arg-type]
