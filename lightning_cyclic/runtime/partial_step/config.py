"""What the user chose of stage-at-a-time training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.gradient_store import Gradients
from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.partial_step.batch_cutter import SplitBatch
from lightning_cyclic.runtime.partial_step.exchange import ReadState, WriteState
from lightning_cyclic.runtime.partial_step.stage_step import Outcome
from lightning_cyclic.runtime.predict import Guess
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.sum_dtypes import AS_MADE, SumDtypes
from lightning_cyclic.runtime.weight_forms import ALL, WeightForms

Apply = Callable[[int, int], None]  # (step, stage): clip and optimize; gradients are in p.grad
Share = Callable[[Tensor], Tensor]
Summarise = Callable[[Sequence[Outcome]], Message]  # called on the last stage's worker alone
Scaled = Callable[[int, Share], Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagewiseConfig:
    """Hold what the user chose.

    Args:
        make_plan: (number of stages, micro-batches of all replicas, ties, stages whose buffers
            change) -> plan.
        find_cuts: (module, step) -> where the stages begin; run on worker 0 alone.
        num_microbatches: into how many micro-batches each replica cuts its batch.
        replicas: number of replicas.
        split_batch: cuts a batch in the place of what its tensors say. [none]
        remat: "never", "always" or "except_last".
        seed: of the randomness inside steps.
        apply: makes a new version of a stage, where steps flow into each other.
        unscale: takes the scale of a step out of gradients of a stage there: (step, gradients).
        scaled: multiplies the share of a micro-batch in the loss of a step there.
        guess: predicts the weights of a stage, for plans that read predicted ones.
        read_state: gives what an owner must tell replicas of a stage, so that they can guess.
        write_state: takes it.
        memory_limit_bytes: most bytes of parameters on a worker, also where a hook reads the
            whole module. [any number]
        say: tells the user what happens.
        not_state: attributes of the module that are not the user's. [those of any module]
        is_delayed: whether the plan reads versions older than the newest.
        forms: what of weights is trained, and travels. [all]
        sums: dtypes of sums of gradients.
        verify: how many of the first steps are compared with the plain one.
        is_one_stage: whether one worker has all of the module, so that nobody waits for it: a step
            may return no loss then, and a batch that cannot be cut is one micro-batch.
        is_under_autocast: whether the step computes with low-precision copies of the weights.
        expected_stages: how many stages there will be. [0: one per worker of a replica]
    """

    make_plan: Callable[..., Plan]
    find_cuts: Callable[[nn.Module, Callable[[], Any]], Cuts]
    num_microbatches: int
    replicas: int
    remat: str
    seed: int
    apply: Apply | None = None
    split_batch: SplitBatch | None = None
    unscale: Callable[[int, Gradients], None] | None = None
    scaled: Scaled | None = None
    guess: Guess | None = None
    read_state: ReadState | None = None
    write_state: WriteState | None = None
    is_one_stage: bool = False
    is_under_autocast: bool = False
    expected_stages: int = 0
    memory_limit_bytes: int | None = None
    say: Callable[[str], None] = print
    not_state: frozenset[str] = frozenset(vars(nn.Module()))
    is_delayed: bool = False
    forms: WeightForms = ALL
    sums: SumDtypes = AS_MADE
    verify: int = 0
