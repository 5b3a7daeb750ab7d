"""Sharding: who keeps which bytes of a stage that several workers hold.

Three answers:

    none        the last worker owns every stage; all keep all parameters
    optimizer   the first reader of a new version owns the stage: optimizer state is spread
    full        as optimizer, and the others hold parameters only around each F and B, for which
                their owner sends them; they send it their gradients, which it adds up

The *owner* of a stage keeps its optimizer state and applies its updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final


@dataclass(frozen=True, slots=True)
class AbstractSharding(ABC):
    """Say who owns a stage, and whether the others give its parameters back after use."""

    gathers: ClassVar[bool] = False
    """Whether parameters are fetched before each F and B, and gradients sent to who adds them.

    Both are the owner's. Else all have the parameters, and sums of gradients travel.
    """

    @abstractmethod
    def owner(
        self, j: int, first_readers: Sequence[int], *, num_workers: int, num_stages: int
    ) -> int:
        """Choose the owner of stage j.

        Args:
            j: stage.
            first_readers: workers that read a new version in the earliest slot, ascending.
            num_workers: N.
            num_stages: S.
        """


@final
@dataclass(frozen=True, slots=True)
class NoSharding(AbstractSharding):
    """Let the last worker own everything, as it is where the sums end."""

    def owner(
        self, j: int, first_readers: Sequence[int], *, num_workers: int, num_stages: int
    ) -> int:
        """Choose the owner of stage j: N-1."""
        return num_workers - 1


@final
@dataclass(frozen=True, slots=True)
class OptimizerSharding(AbstractSharding):
    """Let the first reader own a stage; where several are first, deal the stages out."""

    def owner(
        self, j: int, first_readers: Sequence[int], *, num_workers: int, num_stages: int
    ) -> int:
        """Choose the owner of stage j: the last stages, whose sums end first, go to worker 0."""
        return first_readers[-1 - j * len(first_readers) // num_stages]


@final
@dataclass(frozen=True, slots=True)
class FullSharding(AbstractSharding):
    """Own as under ``optimizer``; owners send parameters to each user, who drops them again.

    Shards stay in place, as in ZeRO, and in TawPipe within a group of workers. So do the sums of
    gradients: workers come to a stage one after the other, so that their gradients reach its
    owner in the order of micro-batches, in which they are added. A sum that travelled would wait
    at each worker until that one comes to the stage.

    Source: ZeRO, https://arxiv.org/abs/1910.02054; TawPipe, https://arxiv.org/abs/2511.09741.
    """

    gathers: ClassVar[bool] = True

    def owner(
        self, j: int, first_readers: Sequence[int], *, num_workers: int, num_stages: int
    ) -> int:
        """Choose the owner of stage j."""
        return OptimizerSharding().owner(
            j, first_readers, num_workers=num_workers, num_stages=num_stages
        )
