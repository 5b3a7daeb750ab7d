"""What the user chose of a session of whole steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.codecs.coded import Codes
from lightning_cyclic.runtime.codecs.weights import CodedWeights
from lightning_cyclic.runtime.gradient_store import AS_MADE, SumDtypes
from lightning_cyclic.runtime.loss_scaling import Outcomes
from lightning_cyclic.runtime.transport.choice import Route
from lightning_cyclic.runtime.weight_forms import ALL, WeightForms
from lightning_cyclic.runtime.whole_step.tiers import TierConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Hold it.

    Args:
        make_plan: (number of stages, relayed stages, stages in which their buffers change last,
            rounds) -> plan.
        stages: "auto", a number, or module paths that begin stages 1, 2, ...
        seed: key of the randomness inside training steps.
        assembly: all ranks.
        relay_buffers: "auto" relays the buffers that the first step changed, "all" every one.
        paced: whether workers that start together are brought into the timetable's stagger.
        accumulates: whether a step may have several batches in one round of the plan, of which
            the last hands buffers on.
        memory_limit_bytes: most bytes of parameters that a worker may have for good. [any number]
        outcomes: is told whether gradients were finite, where a loss scale follows from it.
            [gradients must be]
        forms: what of weights is trained, and travels. [all]
        sums: dtypes of sums of gradients.
        codes: of gradients, where a codec makes them smaller. [as they are]
        weights: by which new weights are sent. [as they are]
        tiers: where optimizer state lies while it is not used. [in memory]
    """

    make_plan: Callable[[int, tuple[int, ...], tuple[int, ...], int], Plan]
    stages: int | str | Sequence[str]
    seed: int
    assembly: Assembly
    route: Route = "auto"
    relay_buffers: str = "auto"
    paced: bool = True
    accumulates: bool = False
    memory_limit_bytes: int | None = None
    outcomes: Outcomes | None = None
    forms: WeightForms = ALL
    sums: SumDtypes = AS_MADE
    codes: Codes | None = None
    weights: CodedWeights | None = None
    tiers: TierConfig | None = None
