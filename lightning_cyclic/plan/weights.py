"""The third axis: which weight version each forward reads.

A rule sees two numbers only: the step, and the newest version that exists in the timetable at
that moment. So rules know nothing of schedules, and a new schedule needs no new rule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from lightning_cyclic.errors import PlanError


@dataclass(frozen=True, slots=True)
class AbstractWeights(ABC):
    """Say which version a forward of step t reads, given the newest one there is."""

    at_end_of_step: ClassVar[bool] = False
    """Whether an update is made as soon as its step has ended, not when it is first read."""
    per_micro: ClassVar[bool] = False
    """Whether the published rule updates after each micro-batch, of which there is one."""
    needs_previous: ClassVar[bool] = False
    """Whether version t-1 must exist wherever step t reads: of few micro-batches it does not."""
    looks_ahead: ClassVar[bool] = False
    """Whether a backward reads the newest version, not the one that its forward read."""
    for_replicas: ClassVar[bool] = True
    """Whether the rule makes sense where every worker holds every stage."""
    is_local: ClassVar[bool] = False
    """Whether each worker has weights of its own, which it updates by its own gradients alone."""

    @abstractmethod
    def forward(self, t: int, newest: int) -> int:
        """Give the version; ``newest`` counts the updates that exist then, slack included."""

    def exchanges(self, t: int, j: int, num_stages: int) -> bool:
        """Say whether stage j is exchanged in step t: its sum over workers makes its version."""
        return True

    def used(self, t: int, j: int, num_stages: int) -> int | None:
        """Give the step whose exchange of stage j is used behind step t; None for none."""
        return t if self.exchanges(t, j, num_stages) else None

    def repeats(self, num_stages: int) -> int:
        """Count the steps after which the same stages are exchanged again."""
        return 1


@final
@dataclass(frozen=True, slots=True)
class Sync(AbstractWeights):
    """Read version t, as in plain training. Needs a flush or lockstep.

    Where the timetable has not made it yet, the program is refused by the checker.
    """

    at_end_of_step: ClassVar[bool] = True

    def forward(self, t: int, newest: int) -> int:
        return t


@final
@dataclass(frozen=True, slots=True)
class Delayed(AbstractWeights):
    """Read version t-1, or the first weights in step 0; the cheapest rule that never waits.

        theta_{t+1} = theta_t - lr * opt(mean_i grad f_i(theta_{t-1}))

    Source: CDP-v1, https://arxiv.org/abs/2403.08837; PipeDream-2BW, section 3.1,
        https://arxiv.org/abs/2006.09503.
    """

    needs_previous: ClassVar[bool] = True

    def forward(self, t: int, newest: int) -> int:
        return max(t - 1, 0)


@final
@dataclass(frozen=True, slots=True)
class Freshest(AbstractWeights):
    """Read version t where it exists already, else t-1; so there are two versions at most.

    On the cyclic timetable with S = N this is the mask of CDP-v2, i + j >= N-1:

                j=0  j=1  j=2
        i=0     t-1  t-1   t
        i=1     t-1   t    t
        i=2      t    t    t

    Slack makes versions appear later to their readers; a large one is the delayed rule.

    Source: CDP-v2, https://arxiv.org/abs/2403.08837.
    """

    needs_previous: ClassVar[bool] = True

    def forward(self, t: int, newest: int) -> int:
        return min(t, max(newest, t - 1, 0))


@final
@dataclass(frozen=True, slots=True)
class Stashed(AbstractWeights):
    """Read the newest version, and keep it until the backward, however many that are.

    With one update per micro-batch, micro-batch k reads max(0, k - (S-1-j)) on stage j, so stage j
    keeps S-j versions.

    Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
        SOSP 2019, section 3.3, https://doi.org/10.1145/3341301.3359646.
    """

    per_micro: ClassVar[bool] = True
    for_replicas: ClassVar[bool] = False

    def forward(self, t: int, newest: int) -> int:
        return min(t, newest)


@final
@dataclass(frozen=True, slots=True)
class Predicted(AbstractWeights):
    """Guess in the forward the weights that the backward, which reads the newest, will find.

    The forward of micro-batch k starts from version v = max(0, k - (S-1-j)) and moves it s updates
    along the optimizer's direction: W - lr * s * direction. s is the true number of updates
    between this forward and its backward, min(k, S-1-j), so it grows during warm-up.

    Source: PipeOptim, https://arxiv.org/abs/2312.00839; SpecTrain,
        https://arxiv.org/abs/1809.02839, which looks floor(j/2) + S-1-j updates ahead, and
        floor(j/2) in the backward.
    """

    looks_ahead: ClassVar[bool] = True
    per_micro: ClassVar[bool] = True
    for_replicas: ClassVar[bool] = False

    def forward(self, t: int, newest: int) -> int:
        return min(t, newest)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps(AbstractWeights):
    """Let each worker train weights of its own, and meet the others every so many steps.

    In each step a worker updates its own weights by its own gradients, as if it were alone. Where
    a stage is exchanged, the differences (what all had before, less what each has now) are added
    in the order of workers; the owner takes their mean for a gradient of the *outer* weights, and
    makes one step of SGD with Nesterov momentum on them. From these all workers go on:

        step     0       1       2       3       4       5
        w0     own     own     own, all      own     own     own, all
        w1     own     own     own, all      own     own     own, all        every=3

    Or they do not wait for them. Differences leave behind a step, and what has come of them is
    used ``delay`` steps later, in which workers have gone on by themselves; so that these steps
    are not lost, a part of the own weights stays: mixing * own + (1 - mixing) * outer.

    ``weights="local"`` stands for the numbers of the preset; in its place a plan takes this.

    Args:
        every: steps from one exchange of a stage to its next, at least 1. [50]
        outer_lr: learning rate of the outer weights, above 0. [0.7]
        outer_momentum: their Nesterov momentum, from 0 to below 1. [0.9]
        in_turn: whether stages are exchanged one after the other, evenly over the period, so that
            less travels at once; else all of them in its last step. [False]
        delay: steps that an exchange may take while workers go on, below ``every``. [0: they wait]
        mixing: how much of the own weights stays where outer ones are used that are late, from 0
            to below 1. [0.5, or 0 without a delay]

    Raises:
        PlanError: a number that is none of these.

    Source: DiLoCo, algorithm 1, https://arxiv.org/abs/2311.08105; stages in turn, delay (tau)
        and mixing (alpha): Streaming DiLoCo, section 2, https://arxiv.org/abs/2501.18512.

    Example:
        >>> rule = LocalSteps(every=4, in_turn=True)
        >>> [[j for j in range(2) if rule.exchanges(t, j, 2)] for t in range(6)]
        [[], [0], [], [1], [], [0]]
    """

    every: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    in_turn: bool = False
    delay: int = 0
    mixing: float | None = None

    at_end_of_step: ClassVar[bool] = True
    is_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check("every", self.every, "whole numbers from 1 on", "50")
        _check("outer_lr", self.outer_lr, "numbers above 0", "0.7")
        _check("outer_momentum", self.outer_momentum, "numbers from 0 to below 1", "0.9")
        _check("in_turn", self.in_turn, "True or False", "True")
        _check("delay", self.delay, "whole numbers from 0 on", "1")
        if self.delay >= self.every:
            raise PlanError(
                f"delay={self.delay} of LocalSteps with every={self.every}, so that an exchange "
                f"would begin before the one before it is used; allowed: 0 to {self.every - 1}; "
                f"use delay={self.every - 1}, or every={self.delay + 1}"
            )
        if self.mixing is None:
            object.__setattr__(self, "mixing", 0.5 if self.delay else 0.0)
        _check("mixing", self.mixing, "numbers from 0 to below 1", "0.5")
        if self.mixing and not self.delay:
            raise PlanError(
                f"mixing={self.mixing} of LocalSteps with delay=0, where workers wait for the "
                "outer weights, and have no steps of their own since; allowed: 0; use mixing=0, "
                "or delay=1"
            )

    def forward(self, t: int, newest: int) -> int:
        return t

    def exchanges(self, t: int, j: int, num_stages: int) -> bool:
        return t % self.every == self._moment(j, num_stages)

    def used(self, t: int, j: int, num_stages: int) -> int | None:
        begun = t - self.delay
        return begun if begun >= 0 and self.exchanges(begun, j, num_stages) else None

    def repeats(self, num_stages: int) -> int:
        return self.every

    def _moment(self, j: int, num_stages: int) -> int:
        """Give the step of a period in which a stage is exchanged; the last stage in the last."""
        if not self.in_turn:
            return self.every - 1
        return -(-(j + 1) * self.every // num_stages) - 1

    # ------------------------------------------------------------------ a period that is shorter

    def shorter(self, num_stages: int) -> LocalSteps:
        """Return the rule with the shortest period in which the same stages follow each other.

        Steps without an exchange are alike: one stands for all between two exchanges.
        """
        groups = num_stages if self.in_turn else 1
        every = min(self.every, 2 * groups)
        # what is exchanged travels beside its worker's steps: how many they are changes no order
        return replace(self, every=every, delay=min(self.delay, every - 1))

    def as_shorter(self, t: int, num_stages: int) -> int:
        """Give the step of the shorter period that is like step t."""
        every, place = self.shorter(num_stages).every, t % self.every
        if every == self.every:
            return place
        stages = range(num_stages) if self.in_turn else range(1)
        next_one = next(j for j in stages if self._moment(j, num_stages) >= place)
        return 2 * next_one + (self._moment(next_one, num_stages) == place)


_FITS: dict[str, Callable[[Any], bool]] = {
    "every": lambda x: isinstance(x, int) and x >= 1,
    "outer_lr": lambda x: isinstance(x, int | float) and 0 < x < math.inf,
    "outer_momentum": lambda x: isinstance(x, int | float) and 0 <= x < 1,
    "delay": lambda x: isinstance(x, int) and x >= 0,
    "mixing": lambda x: isinstance(x, int | float) and 0 <= x < 1,
}


def _check(name: str, value: object, allowed: str, example: str) -> None:
    is_switch = isinstance(value, bool)
    if not (is_switch if name == "in_turn" else not is_switch and _FITS[name](value)):
        raise PlanError(
            f"{name}={value!r} of LocalSteps; allowed: {allowed}; use {name}={example}"
        )
