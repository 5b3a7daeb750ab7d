"""The numbers of plans around the ring: which are simpler, and which there are to choose from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import NamedTuple, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan, make_plan
from lightning_cyclic.planner.ring_bound import fresh_readers
from lightning_cyclic.simulate.costs import Network

_STEPS = 10  # to be steady, and to see it for some
_DEFAULT_SHARDINGS = ("optimizer", "none")


class RingNumbers(NamedTuple):
    """Hold the numbers of a plan around the ring.

    Args:
        is_delayed: whether all forwards read the version before the newest.
        slack: slots that a new version is given to travel; 0 where all are delayed.
        num_stages: S.
        sharding: "optimizer", or "none": the last worker owns all stages.
        group_size: workers that run in the same slots.
    """

    is_delayed: bool
    slack: int
    num_stages: int
    sharding: str
    group_size: int = 1

    @property
    def preset(self) -> str:
        """Return the name of the preset that has this rule."""
        return "cyclic_dp_v1" if self.is_delayed else "cyclic_dp"

    def plan(self, num_workers: int, num_steps: int = _STEPS) -> Plan:
        """Make the plan, without a proof that it can run."""
        return make_plan(
            self.preset,
            num_stages=self.num_stages,
            num_workers=num_workers,
            num_steps=num_steps,
            slack=self.slack,
            sharding=self.sharding,
            groups=self.num_groups(num_workers),
            proved=False,
        )

    def num_groups(self, num_workers: int) -> int | None:
        """Return how many groups there are; None where each worker is one."""
        return num_workers // self.group_size if self.group_size > 1 else None

    def behind(self, num_workers: int) -> Fraction:
        """Return by how many updates forwards are behind, on average.

        Example:
            >>> str(RingNumbers(False, 0, 8, "optimizer").behind(8))
            '7/16'
        """
        num_groups = self.num_groups(num_workers) or num_workers
        if self.is_delayed:
            return Fraction(num_groups > 1)
        stages = range(self.num_stages)
        fresh = sum(fresh_readers(j, self.num_stages, num_groups, self.slack) for j in stages)
        return 1 - Fraction(fresh, self.num_stages * num_groups)

    def rank(self, num_workers: int) -> tuple[object, ...]:
        """Return what sorts simpler numbers first: less old weights, in tenths, then less of all.

        Coarse stages are older; in tenths, so that few stages do not give way to very many.
        """
        has_default = self.sharding == ("none" if self.is_delayed else "optimizer")
        tenths = round(10 * self.behind(num_workers))
        return (
            tenths, self.group_size, self.num_stages, self.slack, not has_default,
        )  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RingChoices:
    """Hold the numbers that may be chosen from.

    Args:
        most_stages: that the module can be cut into.
        stages: numbers of stages. [powers of two, and such times N]
        slacks: numbers of slots. [0, and powers of two]
        delayed: whether forwards may all read the version before the newest, and whether all
            have to. [both]
        shardings: values of that axis, of "optimizer" and "none". [both]
        group_sizes: numbers of workers that run in the same slots: those of a group are on one
            host. [all that can be where hosts are known, else 1]

    Raises:
        PlanError: nothing is left to choose from.
    """

    most_stages: int
    stages: tuple[int, ...] | None = None
    slacks: tuple[int, ...] | None = None
    delayed: tuple[bool, ...] = (False, True)
    shardings: tuple[str, ...] = _DEFAULT_SHARDINGS
    group_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "slacks", "delayed", "shardings", "group_sizes"):
            if getattr(self, name) == ():
                raise PlanError(f"{name}=() leaves nothing to choose; allowed: one or more; "
                                "leave it out for those that are tried by default")  # fmt: skip
        if self.most_stages < 1:
            raise PlanError(
                f"most_stages={self.most_stages}; allowed: 1 or more; use the number of places "
                "where a stage of the module can begin"
            )

    def numbers(self, num_workers: int, network: Network) -> Iterator[RingNumbers]:
        """Yield all.

        Raises:
            PlanError: no size of a group that is allowed fits the workers of hosts.
        """
        sizes = self._group_sizes(num_workers, network)
        for num_stages in self._stages(num_workers):
            slacks = self.slacks or (0, *_doubled(2 * num_stages - 2))
            rules = [(False, slack) for slack in slacks if False in self.delayed]
            rules += [(True, 0)] * (True in self.delayed)
            for (is_delayed, slack), name, size in product(rules, self.shardings, sizes):
                yield RingNumbers(is_delayed, slack, num_stages, name, size)

    def _group_sizes(self, num_workers: int, network: Network) -> Sequence[int]:
        found = sizes_of_groups(num_workers, network.hosts)
        if self.group_sizes is not None:  # with hosts that are not known, nobody knows better
            all_sizes = [size for size in range(1, 1 + num_workers) if num_workers % size == 0]
            found = all_sizes if not network.hosts else found
        kept = [size for size in found if self.group_sizes is None or size in self.group_sizes]
        if not kept:
            raise PlanError(
                f"group_sizes={self.group_sizes} of {num_workers} workers; allowed: "
                f"{', '.join(map(str, found))}, whose groups are each on one host; use one of them"
            )
        return kept

    def _stages(self, num_workers: int) -> Sequence[int]:
        if self.stages is not None:
            return sorted({min(s, self.most_stages) for s in self.stages})
        multiples = (num_workers * k for k in _doubled(self.most_stages // num_workers))
        return sorted({*_doubled(self.most_stages), *multiples})


def sizes_of_groups(num_workers: int, hosts: Sequence[object]) -> list[int]:
    """Return how many neighbours can be a group, each on one host, of two or more groups.

    Args:
        num_workers: N.
        hosts: of each worker; empty where each has its own.

    Example:
        >>> sizes_of_groups(8, "aaaabbbb"), sizes_of_groups(8, "aaaaaaaa"), sizes_of_groups(8, "")
        ([1, 2, 4], [1, 2, 4], [1])
    """
    hosts = hosts or range(num_workers)
    blocks = {
        size: [set(hosts[w : w + size]) for w in range(0, num_workers, size)]
        for size in range(1, 1 + num_workers // 2)
        if num_workers % size == 0
    }
    return [size for size, found in blocks.items() if all(len(x) == 1 for x in found)] or [1]


def _doubled(most: int) -> Iterable[int]:
    """Return 1, 2, 4, ... up to a number."""
    return [1 << k for k in range(most.bit_length())]
