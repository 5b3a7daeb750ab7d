"""Transports: how flat buffers travel between workers."""

from lightning_cyclic.runtime.transport.base import AbstractPending, AbstractTransport
from lightning_cyclic.runtime.transport.counting import CountingTransport
from lightning_cyclic.runtime.transport.distributed import DistributedTransport
from lightning_cyclic.runtime.transport.local import LocalTransport, PostOffice

__all__ = [
    "AbstractPending",
    "AbstractTransport",
    "CountingTransport",
    "DistributedTransport",
    "LocalTransport",
    "PostOffice",
]
