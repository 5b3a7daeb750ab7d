"""Best chunks: in how many messages a stage should travel, from the network alone.

Every port sends all sums and all parameters once a step, however they are cut. A sum visits the
workers one after the other, and each hop takes what a chunk does; that should be well below what
the ports take anyway:

    workers * (bytes of a stage / chunks / bandwidth + latency)  <  2 * bytes of all / bandwidth

As each message has a price of its own, there are no more chunks than that takes; and where
latencies alone take longer, as many as let bytes add a twelfth to them.
"""

from __future__ import annotations

from math import ceil

from lightning_cyclic.simulate.costs import Network

_SHARE = 0.6  # of what ports take, for hops: sums wait for gradients and for each other, too
LEAST_BYTES = 1 << 16  # of a chunk: smaller ones cost more than they gain, wherever measured
MOST = 32  # pieces of 16 bytes of the smallest tensor, in messages that are 512-byte aligned


def best_chunks(num_workers: int, num_stages: int, model_bytes: float, network: Network) -> int:
    """Return the fewest chunks with which hops hardly hold up a step.

    Args:
        num_workers: that a sum visits.
        num_stages: that the model is cut into.
        model_bytes: of all trained parameters.
        network: the links between the workers; of a free one the answer is 1.

    Example:
        >>> network = Network(latency_s=50e-6, bandwidth_bytes_per_s=1.25e9)
        >>> best_chunks(64, 16, 100e6, network), best_chunks(4, 8, 100e6, network)
        (4, 1)
    """
    link = network.slowest
    latencies_s = num_workers * link.latency_s
    spare_s = max(_SHARE * 2 * link.transfer_s(model_bytes) - latencies_s, latencies_s / 12)
    hops_s = num_workers * link.transfer_s(model_bytes / num_stages)
    if hops_s <= spare_s:
        return 1
    most = min(MOST, int(model_bytes / num_stages / LEAST_BYTES))
    return max(1, min(ceil(hops_s / spare_s), most))
