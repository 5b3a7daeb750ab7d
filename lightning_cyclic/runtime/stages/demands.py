"""What a plan asks of the worker of each stage: time for compute and messages, and memory.

Stages of one pipeline differ: the first keep more micro-batches and versions than the last, so
that the same layers may fit behind and not in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self, final

from lightning_cyclic.plan import Plan
from lightning_cyclic.planner.copies import steps_to_count
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.runtime.stages.places import Load
from lightning_cyclic.simulate.costs import BACKWARD_PER_FORWARD, Network
from lightning_cyclic.simulate.memory import KINDS, Memory, memory

_NS_PER_S = 1e9


@final
class Demands:
    """Say what a stage takes, by its number and its load.

    Args:
        copies: that the worker of each stage keeps, of each kind.
        forwards: that forward and backward take as long as.
        network: the links between workers.
    """

    def __init__(self, copies: Sequence[Memory], *, forwards: float, network: Network) -> None:
        self._copies = tuple(copies)
        self._forwards = forwards
        self.network = network

    @classmethod
    def of(
        cls, plan: Plan, *, again: bool, network: Network, state_per_param: float
    ) -> Self | None:
        """Count the copies along a plan's programs; None where workers have several stages.

        Args:
            plan: with as many stages as are asked for.
            again: whether backwards run their forward again.
            network: the links between workers.
            state_per_param: bytes of optimizer state per byte of parameters.
        """
        homes = [plan.axes.placement.workers_of(j) for j in range(plan.num_stages)]
        if len({w for home in homes for w in home}) < sum(map(len, homes)):
            return None
        steps = steps_to_count(plan.num_stages, max(1, plan.num_microbatches // plan.replicas))
        workers = memory(
            replace(plan, num_steps=steps),
            Stages.alike(plan.num_stages).costs(),
            remat=again,
            state_per_param=state_per_param,
        )
        copies = (
            Memory(**{kind: max(getattr(workers[w], kind) for w in home) for kind in KINDS})
            for home in homes
        )
        forwards = 1 + BACKWARD_PER_FORWARD + again
        return cls(tuple(copies), forwards=forwards, network=network)

    @classmethod
    def of_forward(cls, num_stages: int) -> Self:
        """Ask for forwards and for memory of parameters and activations alone, without a plan."""
        one = Memory(**dict.fromkeys(KINDS, 0.0) | {"parameters": 1.0, "activations": 1.0})
        return cls((one,) * num_stages, forwards=1.0, network=Network())

    def compute_s(self, compute_ns: int) -> float:
        """Return the seconds of a stage's forward and backward, by those of its forward."""
        return compute_ns / _NS_PER_S * self._forwards

    def sent_s(self, crossing_bytes: int) -> float:
        """Return for how long what crosses a cut keeps a port busy, in each direction."""
        return self.network.transfer_s(crossing_bytes)

    def kept_bytes(self, j: int, load: Load, sent_bytes: int) -> float:
        """Return what the worker of a stage keeps.

        Args:
            j: number of the stage.
            load: of the stage; what it receives included.
            sent_bytes: that it sends to the next.
        """
        copies = self._copies[j]
        return (
            copies.of_parameters * load.parameter_bytes
            + copies.activations * load.activation_bytes
            + copies.inputs * load.crossing_bytes
            + copies.returns * sent_bytes
        )
