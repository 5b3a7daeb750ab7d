"""Placement: which worker runs micro-batch i on stage j; sharding: who keeps which bytes of it.

Four answers:

    replicated   w = i % N      a worker runs whole micro-batches, as in data parallelism; those
                                of a step in one or several rounds of N
    pipelined    w = home(j)    a worker runs one stage, or several where N < S, which the
                                schedule asks for: neighbours (block), every p-th of p workers
                                (loop), or there and back (vee); of several replicas,
                                micro-batch i runs on replica i % replicas
    shared       S-j places     a device per live activation, S(S+1)/2 in all, not S*S
    single       w = 0          one worker runs everything: the reference

Of a stage that several workers hold, its *owner* keeps the optimizer state and applies the
updates; three answers:

    none        the last worker owns every stage; all keep all parameters
    optimizer   the first reader of a new version owns the stage: optimizer state is spread
    full        as optimizer, and the others hold parameters only around each F and B, for which
                their owner sends them; they send it their gradients, which it adds up
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import ClassVar, final


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractPlacement(ABC):
    """Say which worker runs F(i, j) and B(i, j) of step t.

    Args:
        replicas: replicas of the pipeline, for placements that allow more than one. [1]
        shape: of a pipeline, which stages a worker has that has several; of four, two workers:

            block   0 1 | 2 3    neighbours, however many
            loop    0 2 | 1 3    a micro-batch passes all workers, then again
            vee     0 3 | 1 2    it passes all workers, and comes back
    """

    num_stages: int
    num_workers: int
    num_microbatches: int
    replicas: int = 1
    shape: str = "block"

    takes_turns: ClassVar[bool] = False
    """Whether the worker of a micro-batch on a stage depends on the step."""
    runs_whole_micro: ClassVar[bool] = False
    """Whether a worker runs every stage of its micro-batches, so that stages are replicated."""
    overlaps: ClassVar[bool] = True
    """Whether steps follow each other as the timetable has it; else each ends before the next."""
    may_be_wide: ClassVar[bool] = False
    """Whether several replicas of a pipeline can follow a schedule together."""

    @abstractmethod
    def worker(self, t: int, i: int, j: int) -> int:
        """Give the worker of micro-batch i of step t on stage j."""

    @abstractmethod
    def misfit(self) -> str | None:
        """Say what is wrong with the numbers and what to do, or None where they fit."""

    @property
    def repeats(self) -> int:
        """Steps after which the same workers run the same micro-batches of a step again."""
        return 1

    def workers_of(self, j: int) -> tuple[int, ...]:
        """List the workers that hold stage j, the first of them first."""
        return (self.worker(0, 0, j),)

    def replica(self, w: int) -> range:
        """List the workers that run parts of the same micro-batches as worker w, w included.

        In the order of their stages; w alone where it runs whole micro-batches.
        """
        return range(w, w + 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated(AbstractPlacement):
    """Give micro-batch i to worker i % N: in each round of a step one to every worker."""

    runs_whole_micro: ClassVar[bool] = True

    def worker(self, t: int, i: int, j: int) -> int:
        return i % self.num_workers

    def misfit(self) -> str | None:
        if self.num_microbatches % self.num_workers == 0:
            return None
        fewer = self.num_microbatches // self.num_workers * self.num_workers
        return (
            f"num_microbatches={self.num_microbatches} with num_workers={self.num_workers}; "
            "placement "
            "'replicated' runs as many micro-batches on each worker, so allowed: multiples of "
            f"num_workers; use num_microbatches={fewer or self.num_workers}"
        )

    def workers_of(self, j: int) -> tuple[int, ...]:
        """List the workers that hold stage j: all of them."""
        return tuple(range(self.num_workers))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined(AbstractPlacement):
    """Give stage j to worker j; with fewer workers, several stages to each.

    With replicas, that many pipelines take the micro-batches in turn.
    """

    may_be_wide: ClassVar[bool] = True

    @property
    def depth(self) -> int:
        return self.num_workers // self.replicas

    def worker(self, t: int, i: int, j: int) -> int:
        return i % self.replicas * self.depth + self._home(j)

    def _home(self, j: int) -> int:
        p = self.depth
        if self.shape == "block":
            return j * p // self.num_stages
        if self.shape == "loop":
            return j % p
        return min(j % (2 * p), 2 * p - 1 - j % (2 * p))

    def misfit(self) -> str | None:
        if self.num_workers % self.replicas:
            return (
                f"num_workers={self.num_workers} with replicas={self.replicas}; all replicas of a "
                "pipeline have as many workers, so allowed: multiples of the replicas; "
                f"use num_workers={(self.depth + 1) * self.replicas}"
            )
        if self.num_microbatches % self.replicas:
            return (
                f"num_microbatches={self.num_microbatches} with replicas={self.replicas}; all "
                "replicas of a pipeline "
                "run as many micro-batches, so allowed: multiples of the replicas; "
                "use "
                f"num_microbatches={(self.num_microbatches // self.replicas + 1) * self.replicas}"
            )
        return self._too_deep() if self.depth > self.num_stages else self._uneven()

    def _too_deep(self) -> str:
        replicas = f" and replicas={self.replicas}" if self.replicas > 1 else ""
        of_each = " of each replica" if self.replicas > 1 else ""
        wider = self.num_workers // self.num_stages
        fills = wider * self.num_stages == self.num_workers
        return (
            f"num_workers={self.num_workers} with num_stages={self.num_stages}{replicas}; "
            f"allowed with placement 'pipelined': at most one worker per stage{of_each}; "
            f"use num_stages={self.depth} or num_workers={self.num_stages * self.replicas}"
            + (f", or replicas={wider}" if fills else "")
        )

    def _uneven(self) -> str | None:
        """Say that some workers would have more stages than others, which only blocks allow."""
        if self.shape == "block" or self.num_stages % self.depth == 0:
            return None
        fewer = self.num_stages // self.depth * self.depth
        return (
            f"num_stages={self.num_stages} with {self.depth} workers of each replica; this "
            "schedule gives each of them as many stages, so allowed: multiples of the workers; "
            f"use num_stages={fewer} or {fewer + self.depth}"
        )

    def workers_of(self, j: int) -> tuple[int, ...]:
        """List the workers that hold stage j: one of each replica."""
        return tuple(self.worker(0, i, j) for i in range(self.replicas))

    def replica(self, w: int) -> range:
        """List the workers of w's replica, first stage first."""
        start = w - w % self.depth
        return range(start, start + self.depth)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shared(AbstractPlacement):
    """Give each stage as many places as it has live activations: S-j for stage j.

    A place is free again in the slot in which the (S-j)th micro-batch after it arrives, so
    S(S+1)/2 devices with room for one activation do what S*S do in lockstep. With that many
    workers there is one place per worker; fewer take several neighbouring places each.

    Source: Fournier and Oyallon, https://arxiv.org/abs/2403.08837, model parallelism; the
        assignment of places is derived from the timetable.
    """

    takes_turns: ClassVar[bool] = True

    def replica(self, w: int) -> range:
        """List the workers: all of them, the last stage last."""
        return range(self.num_workers)

    @property
    def repeats(self) -> int:
        sizes = [self.num_stages - j for j in range(self.num_stages)]
        return lcm(*(size // gcd(self.num_microbatches, size) for size in sizes))

    @property
    def num_places(self) -> int:
        """Live activations of all stages together."""
        return self.num_stages * (self.num_stages + 1) // 2

    @staticmethod
    def fewest_stages(num_workers: int) -> int:
        """Return the fewest stages with a place for each worker.

        Example:
            >>> [Shared.fewest_stages(n) for n in (1, 2, 3, 4, 6, 7)]
            [1, 2, 2, 3, 3, 4]
        """
        return next(s for s in range(1, num_workers + 1) if s * (s + 1) // 2 >= num_workers)

    def worker(self, t: int, i: int, j: int) -> int:
        return self._worker_at(j, (t * self.num_microbatches + i) % (self.num_stages - j))

    def misfit(self) -> str | None:
        if self.num_workers <= self.num_places:
            return None
        return (
            f"num_workers={self.num_workers} with num_stages={self.num_stages}; placement "
            f"'shared' has one place per live activation, S(S+1)/2 = {self.num_places}; "
            f"use num_workers={self.num_places} or fewer"
        )

    def workers_of(self, j: int) -> tuple[int, ...]:
        """List the workers that hold stage j, in the order of its places."""
        places = range(self.num_stages - j)
        return tuple(dict.fromkeys(self._worker_at(j, place) for place in places))

    def _worker_at(self, j: int, place: int) -> int:
        before = j * self.num_stages - j * (j - 1) // 2
        return (before + place) * self.num_workers // self.num_places


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Single(AbstractPlacement):
    """Give everything to worker 0, one step after the other."""

    overlaps: ClassVar[bool] = False

    def worker(self, t: int, i: int, j: int) -> int:
        return 0

    def misfit(self) -> str | None:
        if self.num_workers == 1:
            return None
        return (
            f"num_workers={self.num_workers}; placement 'single' runs on one worker; "
            "use num_workers=1"
        )


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
            first_readers: workers that read a new version in the earliest slot, ascending.
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
        return OptimizerSharding().owner(
            j, first_readers, num_workers=num_workers, num_stages=num_stages
        )
