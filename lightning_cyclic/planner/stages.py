"""The stages of a profile: what each of some units in a row takes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from lightning_cyclic.planner.partition import balance
from lightning_cyclic.planner.profile import ModelProfile
from lightning_cyclic.simulate.costs import Costs

_TICKS_PER_S = 10**12  # picoseconds, as balance() is exact in whole numbers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Hold what each stage takes, for one micro-batch.

    Args:
        param_bytes: bytes of the parameters; what units of one stage share counts once.
        activation_bytes: bytes that the forward leaves for the backward.
        input_bytes: bytes that the stage receives; of the first, of the batch.
        tied_bytes: bytes of those parameters that later stages use, too.
        again_s: seconds of what its backward runs again. [nothing]
    """

    names: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    param_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    input_bytes: tuple[float, ...]
    tied_bytes: tuple[float, ...]
    tied: tuple[tuple[int, ...], ...]
    again_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, profile: ModelProfile, starts: Sequence[int], *, together: bool = False) -> Stages:
        """Cut a profile.

        Args:
            starts: number of the first unit of each stage; the first is 0.
            together: each worker runs all stages, so that what they share belongs to the first
                that uses it, and ties none. [False]
        """
        rows = [profile.units[a:b] for a, b in pairwise([*starts, len(profile.units)])]
        param_bytes = [sum(unit.param_bytes for unit in row) for row in rows]
        tied_bytes, tied = [0.0] * len(rows), set()
        for tie in profile.ties:
            homes = [sum(a <= u for a in starts) - 1 for u in tie.units]
            users = tuple(sorted(set(homes)))
            for j in users:
                param_bytes[j] -= (homes.count(j) - 1) * tie.bytes
            if together:
                for j in users[1:]:
                    param_bytes[j] -= tie.bytes
            elif len(users) > 1:
                tied_bytes[users[0]] += tie.bytes
                tied.add(users)
        return cls(
            names=tuple(row[0].name for row in rows),
            forward_s=tuple(sum(unit.forward_s for unit in row) for row in rows),
            backward_s=tuple(sum(unit.backward_s for unit in row) for row in rows),
            param_bytes=tuple(param_bytes),
            activation_bytes=tuple(sum(unit.activation_bytes for unit in row) for row in rows),
            input_bytes=tuple(row[0].crossing_bytes for row in rows),
            tied_bytes=tuple(tied_bytes),
            tied=tuple(sorted(tied)),
        )

    @classmethod
    def even(cls, profile: ModelProfile, num_stages: int, *, together: bool = False) -> Stages:
        """Cut a profile into stages whose slowest is as fast as can be; see :meth:`of`."""
        return cls.of(profile, even_starts(profile, num_stages), together=together)

    @classmethod
    def alike(cls, num_stages: int) -> Stages:
        """Make stages that take one byte of each kind, so that bytes count copies."""
        one = (1,) * num_stages
        return cls(
            names=("",) * num_stages, forward_s=one, backward_s=(2,) * num_stages,
            param_bytes=one, activation_bytes=one, input_bytes=one, tied_bytes=(0,) * num_stages,
            tied=(),
        )  # fmt: skip

    @property
    def num_stages(self) -> int:
        return len(self.names)

    def running_again(self, again_s: Sequence[float]) -> Stages:
        """Return the same with backwards that run so much again."""
        return replace(self, again_s=tuple(again_s))

    def costs(self, *, kept: float = 1.0, sums: float = 1.0) -> Costs:
        """Return what the simulator asks for.

        Args:
            kept: fraction of the parameters' elements that messages carry. [1: all]
            sums: bytes of a sum of gradients in a message, per byte of parameters that it carries.
        """
        return Costs(
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            param_bytes=self.param_bytes,
            cut_bytes=self.input_bytes,
            tied_bytes=tuple(size * kept for size in self.tied_bytes),
            activation_bytes=self.activation_bytes,
            sent_param_bytes=tuple(size * kept for size in self.param_bytes),
            sent_sum_bytes=tuple(size * kept * sums for size in self.param_bytes),
        ).running_again(self.again_s or (0.0,) * self.num_stages)


def even_starts(profile: ModelProfile, num_stages: int) -> Sequence[int]:
    """Return the first unit of each stage, where the slowest is as fast as can be."""
    weights = [round((u.forward_s + u.backward_s) * _TICKS_PER_S) for u in profile.units]
    return balance(weights, num_stages)
