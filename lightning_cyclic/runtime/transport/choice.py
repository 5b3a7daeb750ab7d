"""The choice of a transport: by where tensors live, and by who shares a GPU.

tensors of the host                        named         gloo matches messages by tags
GPUs, over NCCL                            edges         a group of two for each channel
GPUs, over gloo                            host_staged   named, with a copy on the host

Several workers may share a GPU over NCCL where :mod:`~.shared_gpus` says so, else over gloo.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
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
from lightning_cyclic.runtime.transport.shared_gpus import Nccl, loaded_nccl, refuse_sharing

Route = Literal["auto", "named", "edges", "host_staged"]
"""How messages travel: what transport=... may be."""


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
        over_nccl = "cuda:nccl" in dist.get_backend_config()
        nccl = loaded_nccl() if over_nccl else Nccl((), "")
        told = assembly.share((_identity(device), *nccl), "to say which GPU each has")
        # all ranks look at the oldest, so that all of them say the same
        oldest = min(Nccl(version, setting) for _, version, setting in told)
        gpus = [gpu for gpu, *_ in told]
        route = route_on_gpus(route, gpus, oldest if over_nccl else None)
    elif route == "auto":
        route = "named"
    made: AbstractTransport = named
    if route == "edges":
        made = LateEdges(named, device, "nccl" if device.type == "cuda" else "gloo")
    elif route == "host_staged":
        made = HostStagedTransport(named)
    return CountingTransport(made, route=route)


def route_on_gpus(route: Route, devices: Sequence[str], nccl: Nccl | None) -> Route:
    """Choose for workers on GPUs, or check what the user chose.

    Args:
        route: what the user chose.
        devices: the GPU of each rank; several have one where it is the same.
        nccl: by which the default process group sends tensors of GPUs, if it does.

    Raises:
        ConfigurationError: an NCCL that does not let workers share a GPU with several on one, or
            a route that takes no GPU.

    Example:
        >>> route_on_gpus("auto", ["a", "a"], Nccl((2, 32, 3), "1"))
        'edges'
        >>> route_on_gpus("auto", ["a", "a"], None)
        'host_staged'
    """
    if nccl is not None:
        refuse_sharing(devices, nccl)
    if route == "auto":
        return "host_staged" if nccl is None else "edges"
    if route == "named":
        raise ConfigurationError(
            "transport='named' was chosen for workers on GPUs; allowed: tensors in the host's "
            "memory, which is all that gloo's messages take; use transport='auto' or "
            "'host_staged', or Trainer(accelerator='cpu')"
        )
    if route == "edges" and nccl is None:
        raise ConfigurationError(
            "transport='edges' was chosen for workers on GPUs without NCCL; allowed: NCCL; leave "
            "process_group_backend out, or use transport='auto'"
        )
    return route


def _identity(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()}/{getattr(properties, 'uuid', device.index)}"
