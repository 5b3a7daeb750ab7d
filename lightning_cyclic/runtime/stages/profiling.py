"""The profile of a module: what its survey says of the units that the planner cuts.

A unit goes from one place where a stage can begin to the next. The survey runs without
gradients, so how much longer a backward takes than a forward is measured on whole steps, and
holds for every unit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cyclic.planner.profile import ModelProfile, Tie, UnitProfile
from lightning_cyclic.runtime.snapshot import untouched
from lightning_cyclic.runtime.stages.evidence import Survey
from lightning_cyclic.runtime.stages.places import CutPoints
from lightning_cyclic.runtime.stages.survey import survey
from lightning_cyclic.runtime.values.split import size_of
from lightning_cyclic.runtime.values.trees import tensors
from lightning_cyclic.simulate.costs import BACKWARD_PER_FORWARD

_REPEATS = 3  # of the step, for times that neither warm-up nor other processes disturb
_NS_PER_S = 1e9


def measured(module: nn.Module, step: Callable[[], Any], batch: Any) -> ModelProfile:
    """Run a module's step a few times and return what its units take.

    Args:
        module: is left as it was, but for its gradients, which are dropped.
        step: runs the module on the batch.
        batch: of which the samples and bytes count.
    """
    return profile_of(
        survey(module, step, clock="measured", for_backward=True),
        micro_size=size_of(batch),
        batch_bytes=sum(t.numel() * t.element_size() for t in tensors(batch)),
        backward_per_forward=_backward_per_forward(module, step),
    )


def profile_of(
    survey: Survey,
    *,
    micro_size: int,
    batch_bytes: float = 0.0,
    backward_per_forward: float = BACKWARD_PER_FORWARD,
) -> ModelProfile:
    """Turn a survey into a profile.

    Args:
        survey: of a step.
        micro_size: samples of the micro-batch that it was run on.
        batch_bytes: of that micro-batch. [0]
        backward_per_forward: how much longer a backward takes. [2]

    Returns:
        A unit from each place where a stage can begin to the next. Places that would share a
        module among stages are used only where there are no others.
    """
    points = CutPoints(survey)
    places = points.pieces()
    ticks = [0, *(p.tick for p in places), survey.end + 1]
    names = ["", *(p.path for p in places)]
    crossing = [batch_bytes, *(p.crossing_bytes for p in places)]
    units = []
    for name, (begin, end), crossing_bytes in zip(names, pairwise(ticks), crossing, strict=True):
        load = points.load(begin, end)
        forward_s = load.compute_ns / _NS_PER_S
        units.append(
            UnitProfile(
                name=name,
                forward_s=forward_s,
                backward_s=forward_s * backward_per_forward,
                param_bytes=load.parameter_bytes,
                activation_bytes=load.activation_bytes + load.adopted_bytes,
                crossing_bytes=crossing_bytes,
            )
        )
    return ModelProfile(
        name=survey.title,
        micro_size=micro_size,
        units=tuple(units),
        ties=_ties(survey, ticks[1:-1]),
    )


def _ties(survey: Survey, begins: Sequence[int]) -> tuple[Tie, ...]:
    """Add up the parameters that the same units share."""
    sizes: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for held in survey.parameters.values():
        users = tuple(sorted({bisect_right(begins, use.tick) for use in held.uses}))
        if len(users) > 1:
            sizes[users] += held.num_bytes
    return tuple(Tie(units=users, bytes=size) for users, size in sorted(sizes.items()))


def _backward_per_forward(module: nn.Module, step: Callable[[], Any]) -> float:
    """Measure how much longer a backward takes than a forward; 2 where nothing can tell."""
    shortest = [float("inf")] * 2
    on_cuda = any(p.is_cuda for p in module.parameters())
    for _ in range(1 + _REPEATS):
        with untouched(module):
            begin = _now(on_cuda)
            found = step()
            loss = found["loss"] if isinstance(found, dict) and "loss" in found else found
            if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
                return BACKWARD_PER_FORWARD
            middle = _now(on_cuda)
            loss.backward()  # type: ignore[no-untyped-call]
            end = _now(on_cuda)
        module.zero_grad(set_to_none=True)
        shortest = [min(shortest[0], middle - begin), min(shortest[1], end - middle)]
    return shortest[1] / shortest[0] if shortest[0] else BACKWARD_PER_FORWARD


def _now(on_cuda: bool) -> float:
    if on_cuda:
        torch.cuda.synchronize()
    return perf_counter()
