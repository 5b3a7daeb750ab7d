"""The measurement: a LightningModule's profile, from one step of it on this machine.

The doctor's survey says when each place where a stage can begin is reached, what crosses it and
what is made between two of them: that is a unit. The survey runs without gradients, so how much
longer a backward takes than a forward is measured on whole steps, and holds for every unit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor

from lightning_cyclic.errors import CyclicError, PlanError
from lightning_cyclic.patient import _arguments, _detached, _find, _make, _step
from lightning_cyclic.planner.profile import Profile, Tie, Unit
from lightning_cyclic.runtime.stagewise.evidence import Survey
from lightning_cyclic.runtime.stagewise.places import Place, Terrain
from lightning_cyclic.runtime.stagewise.split import size_of
from lightning_cyclic.runtime.stagewise.survey import survey
from lightning_cyclic.runtime.stagewise.trees import tensors
from lightning_cyclic.runtime.stagewise.untouched import untouched
from lightning_cyclic.simulate.costs import BACKWARD_PER_FORWARD

_REPEATS = 3  # of the step, for times that neither warm-up nor other processes disturb
_NS_PER_S = 1e9


def measure(
    where: str,
    *,
    data: str | None = None,
    texts: Sequence[str] = (),
    num_micros: Sequence[int] = (1,),
) -> tuple[Profile, ...]:
    """Make a module, run its step and return what its units take.

    Args:
        where: of its class, "PATH:CLASS".
        data: of a LightningDataModule's class. [the module's own data]
        texts: arguments, "name=value".
        num_micros: numbers of micro-batches that the first batch is cut into; of each the first
            micro-batch is run.

    Returns:
        A profile for each size of a micro-batch that comes of it.

    Raises:
        PlanError: what was given is wrong, or the module cannot be cut.
    """
    try:
        mine, its_data = _arguments(texts)
        module = _make(_find(where, LightningModule), mine)
        feed = None if data is None else _make(_find(data, LightningDataModule), its_data)
        with _detached(module, feed):
            found = [_measured(module, feed, num_micro) for num_micro in num_micros]
            return tuple({profile.micro_size: profile for profile in found}.values())
    except PlanError:
        raise
    except CyclicError as error:
        raise PlanError(str(error)) from error


def _measured(
    module: LightningModule, feed: LightningDataModule | None, num_micro: int
) -> Profile:
    step = _step(module, feed, num_micro)
    seen = survey(module, step, repeats=_REPEATS)
    batch = _given(module, step)
    return profile_of(
        seen,
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
) -> Profile:
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
    terrain = Terrain(survey)
    possible = [p for p in terrain.places if p.is_possible and p.has_parameters]
    places = [p for p in possible if not p.obstacles] or possible
    places = _with_parameters(terrain, places)
    ticks = [0, *(p.tick for p in places), survey.end + 1]
    names = ["", *(p.path for p in places)]
    crossing = [batch_bytes, *(p.crossing_bytes for p in places)]
    units = []
    for name, (begin, end), crossing_bytes in zip(names, pairwise(ticks), crossing, strict=True):
        load = terrain.load(begin, end)
        forward_s = load.compute_ns / _NS_PER_S
        units.append(
            Unit(
                name=name,
                forward_s=forward_s,
                backward_s=forward_s * backward_per_forward,
                param_bytes=load.parameter_bytes,
                activation_bytes=load.activation_bytes,
                crossing_bytes=crossing_bytes,
            )
        )
    return Profile(
        name=survey.title,
        micro_size=micro_size,
        units=tuple(units),
        ties=_ties(survey, ticks[1:-1]),
    )


def _with_parameters(terrain: Terrain, places: Sequence[Place]) -> list[Place]:
    """Leave out places between which no parameter is used first: no stage could be there."""
    kept: list[Place] = []
    for place in places:
        before = terrain.first_uses_before(kept[-1].tick) if kept else 0
        if terrain.first_uses_before(place.tick) > before:
            kept.append(place)
    return kept


def _ties(survey: Survey, begins: Sequence[int]) -> tuple[Tie, ...]:
    """Add up the parameters that the same units share."""
    sizes: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for held in survey.parameters.values():
        users = tuple(sorted({bisect_right(begins, use.tick) for use in held.uses}))
        if len(users) > 1:
            sizes[users] += held.num_bytes
    return tuple(Tie(units=users, bytes=size) for users, size in sorted(sizes.items()))


def _given(module: LightningModule, step: Callable[[], Any]) -> Any:
    """Return what a step gives the module: the batch, or the example input."""
    given: list[Any] = []
    run = module.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        given.append(args)
        return run(*args, **kwargs)

    def before_forward(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given.append(args or kwargs)

    module.__dict__["training_step"] = training_step
    handle = module.register_forward_pre_hook(before_forward, with_kwargs=True)
    try:
        with untouched(module), torch.no_grad():
            step()
    finally:
        del module.__dict__["training_step"]
        handle.remove()
    return given[0]


def _backward_per_forward(module: LightningModule, step: Callable[[], Any]) -> float:
    """Measure how much longer a backward takes than a forward; 2 where nothing can tell."""
    shortest = [float("inf")] * 2
    for _ in range(1 + _REPEATS):
        with untouched(module):
            begin = perf_counter()
            found = step()
            loss = found["loss"] if isinstance(found, dict) and "loss" in found else found
            if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
                return BACKWARD_PER_FORWARD
            middle = perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            end = perf_counter()
        module.zero_grad(set_to_none=True)
        shortest = [min(shortest[0], middle - begin), min(shortest[1], end - middle)]
    return shortest[1] / shortest[0] if shortest[0] else BACKWARD_PER_FORWARD
