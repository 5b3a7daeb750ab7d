"""Delays: two experimental options that make training bear old gradients better.

Error feedback corrects every update by how much the one before missed it; PipeMare's rule lowers
the learning rate of stages whose gradients are old, for as long as training is young.
"""

from __future__ import annotations

import math
from typing import TypeVar, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import ConfigurationError


@final
class ErrorFeedback:
    """Turn each update u_t into ``2 * u_t - u_(t-1)``, whatever the optimizer.

    With gradients one update old, u_t is what update t - 1 should have been; the difference
    ``u_t - u_(t-1)`` is what it missed. Before the first update, u is 0. At a constant learning
    rate without decay the weights are those that one-step prediction would give to the forward:
    ``V_t - u_(t-1)`` for the weights V of a run with prediction. Experimental.

    Attributes:
        updates: u_(t-1) per parameter, one buffer of the size of the weights; checkpoints must
            keep it.

    Source: the study of pipelines one step late, https://arxiv.org/abs/2606.30634. The formula
        is inferred from accounts of it; check against the paper before naming it after them.

    Example:
        >>> weight, feedback = nn.Parameter(torch.zeros(1)), ErrorFeedback()
        >>> feedback.correct(weight, before=torch.ones(1), after=torch.full((1,), 0.5))
        tensor([0.])
        >>> feedback.correct(weight, before=torch.zeros(1), after=torch.full((1,), -0.5))
        tensor([-0.5000])
    """

    def __init__(self) -> None:
        self.updates: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def correct(self, parameter: nn.Parameter, before: Tensor, after: Tensor) -> Tensor:
        """Return the weights to go on with, out of place, and remember this update.

        Args:
            parameter: whose update it is.
            before: its weights before the optimizer's step.
            after: its weights afterwards; may be the parameter itself.
        """
        update = before.detach() - after.detach()
        previous = self.updates.get(parameter)
        self.updates[parameter] = update
        return after.detach() - (update if previous is None else update - previous)


Rate = TypeVar("Rate", float, Tensor)


def pipemare_lr(base_lr: Rate, delay: float, t: int, annealing_steps: int) -> Rate:
    """Lower a stage's learning rate by its delay, less and less until step ``annealing_steps``.

    The factor is ``delay ** -(1 - min(t / annealing_steps, 1))``. A delay below one step, where
    that would raise the learning rate, changes nothing (ours). Experimental.

    Args:
        base_lr: the learning rate that the scheduler gives for this step.
        delay: how many updates old the stage's gradients are: ``Plan.delay``. PipeMare's own
            pipeline has ``(2 * (S - j) - 1) / m`` for stage j of S, counted from 0, and m
            micro-batches: it reads the present weights in the backward, and stashes none.
        t: the training step, from 0.
        annealing_steps: number of steps until the learning rate is ``base_lr``; 0 for at once.

    Returns:
        The learning rate of the stage at step ``t``.

    Raises:
        ConfigurationError: a negative delay, step or number of steps.

    Source: PipeMare, technique 1, https://arxiv.org/abs/1910.05124.

    Example:
        >>> [pipemare_lr(0.1, 4, t, 100) for t in (0, 50, 100)]
        [0.025, 0.05, 0.1]
    """
    if min(delay, t, annealing_steps) < 0:
        raise ConfigurationError(
            f"got delay {delay}, step {t} and {annealing_steps} annealing steps; allowed: 0 or "
            "more of each; annealing_steps=0 switches rescheduling off"
        )
    done = 1.0 if annealing_steps == 0 else min(t / annealing_steps, 1.0)
    return base_lr / math.pow(max(delay, 1.0), 1 - done)
