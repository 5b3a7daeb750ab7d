"""Transports: how flat buffers travel between workers."""

from lightning_cyclic.runtime.transport.base import (
    AbstractPending,
    AbstractTransport,
    CountingTransport,
    Part,
)
from lightning_cyclic.runtime.transport.edges import EdgeTransport
from lightning_cyclic.runtime.transport.host_staged import HostStagedTransport
from lightning_cyclic.runtime.transport.named import NamedTransport

__all__ = [
    "AbstractPending",
    "AbstractTransport",
    "CountingTransport",
    "EdgeTransport",
    "HostStagedTransport",
    "NamedTransport",
    "Part",
]
