"""The third axis: which weight version each forward reads.

A rule sees two numbers only: the step, and the newest version that exists in the timetable at
that moment. So rules know nothing of schedules, and a new schedule needs no new rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final


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

    @abstractmethod
    def forward(self, t: int, newest: int) -> int:
        """Give the version; ``newest`` counts the updates that exist then, slack included."""


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
