"""The choice of a transport: by where tensors live, and by who shares a GPU.

tensors of the host                        named         gloo matches messages by tags
a GPU for each worker, over NCCL           edges         a group of two for each channel
a GPU for several workers, or over gloo    host_staged   named, with a copy on the host
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan.actions import Lane
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.transport.base import AbstractTransport, CountingTransport
from lightning_cyclic.runtime.transport.edges import LateEdges
from lightning_cyclic.runtime.transport.host_staged import HostStagedTransport
from lightning_cyclic.runtime.transport.named import NamedTransport

Route = Literal["auto", "named", "edges", "host_staged"]
"""How messages travel: what transport=... may be."""

_DUPLICATE = "Duplicate GPU"  # so NCCL calls it
_INSTEAD = (
    "allowed: a GPU for each worker, or gloo in the place of NCCL; use "
    'process_group_backend="gloo", with which messages travel through the '
    "host's memory"
)


def link(
    route: Route,
    device: torch.device,
    assembly: Assembly,
    rank_of: Callable[[int], int] = lambda w: w,
) -> CountingTransport:
    """Join all workers, which must call it at the same time.

    Args:
        route: what the user chose.
        device: of this worker.
        assembly: their ranks.
        rank_of: worker -> rank, and rank -> worker: its own inverse. [worker w is rank w]

    Raises:
        ConfigurationError: on every worker, where its GPU does not go with the route.
    """
    assert assembly.crew is not None
    named = NamedTransport(Lane, assembly.crew, rank_of)
    if assembly.is_alone:
        route = "named"  # nothing travels
    elif device.type == "cuda":
        devices = assembly.share(_identity(device), "to say which GPU each has")
        route = route_on_gpus(route, devices, has_nccl="cuda:nccl" in dist.get_backend_config())
    elif route == "auto":
        route = "named"
    made: AbstractTransport = named
    if route == "edges":
        made = LateEdges(named, device, "nccl" if device.type == "cuda" else "gloo")
    elif route == "host_staged":
        made = HostStagedTransport(named)
    return CountingTransport(made, route=route)


def route_on_gpus(route: Route, devices: Sequence[str], *, has_nccl: bool) -> Route:
    """Choose for workers on GPUs, or check what the user chose.

    Args:
        route: what the user chose.
        devices: the GPU of each rank; several have one where it is the same.
        has_nccl: whether the default process group sends tensors of GPUs over NCCL.

    Raises:
        ConfigurationError: NCCL with several workers on a GPU, or a route that takes no GPU.

    Example:
        >>> route_on_gpus("auto", ["a", "b"], has_nccl=True)
        'edges'
        >>> route_on_gpus("auto", ["a", "a"], has_nccl=False)
        'host_staged'
    """
    sharing = _sharing(devices)
    if sharing and has_nccl:
        raise ConfigurationError(f"{sharing} share a GPU, which NCCL refuses; {_INSTEAD}")
    if route == "auto":
        return "edges" if has_nccl else "host_staged"
    if route == "named":
        raise ConfigurationError(
            "transport='named' was chosen for workers on GPUs; allowed: tensors in the host's "
            "memory, which is all that gloo's messages take; use transport='auto' or "
            "'host_staged', or Trainer(accelerator='cpu')"
        )
    if route == "edges" and not has_nccl:
        raise ConfigurationError(
            "transport='edges' was chosen for workers on GPUs without NCCL; allowed: NCCL, with "
            "a GPU for each worker; leave process_group_backend out, or use transport='auto'"
        )
    return route


def refuse_shared_gpus(devices: Sequence[torch.device] | None, *, has_nccl: bool) -> None:
    """Refuse early that workers of one process's list share a GPU over NCCL.

    Raises:
        ConfigurationError: some device is named twice.
    """
    on_gpus = [str(device) for device in devices or () if device.type == "cuda"]
    if has_nccl and (sharing := _sharing(on_gpus)):
        raise ConfigurationError(f"{sharing} share a GPU, which NCCL refuses; {_INSTEAD}")


@contextmanager
def naming_shared_gpus() -> Iterator[None]:
    """Run the body, in which NCCL connects; where workers share a GPU, say what to do.

    Raises:
        ConfigurationError: NCCL has found two workers on a GPU.
    """
    try:
        yield
    except RuntimeError as error:
        if _DUPLICATE not in str(error):
            raise
        raise ConfigurationError(
            f"several workers share a GPU, which NCCL refuses ({str(error).splitlines()[-1]}); "
            f"{_INSTEAD}"
        ) from error


def _identity(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()}/{getattr(properties, 'uuid', device.index)}"


def _sharing(devices: Sequence[str]) -> str:
    """Name the first ranks that share a device; nothing where none do."""
    ranks = defaultdict(list)
    for rank, device in enumerate(devices):
        ranks[device].append(f"{rank}")
    shared = next((each for each in ranks.values() if len(each) > 1), [])
    return f"ranks {', '.join(shared[:-1])} and {shared[-1]}" if shared else ""
