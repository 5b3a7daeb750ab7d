"""The way of another step through the stages of training: validation, test, prediction.

    training     encoder | decoder . loss            a stage begins with the decoder
    validation   net( encoder | decoder ) . score    the same, within the call of the net

Parameters stay where training has them. A step that uses those of a later stage before those of
an earlier one has no way through the stages: it is run whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.stages.evidence import Survey
from lightning_cyclic.runtime.stages.places import CutPoints, Place, split_by

_Use = tuple[int, frozenset[int]]  # tick, and the stages that have what is used then


def cuts_along(survey: Survey, cuts: Cuts) -> Cuts | None:
    """Return where a step passes from stage to stage.

    Args:
        survey: of the step.
        cuts: the stages, as training has them.

    Returns:
        The same stages, begun by modules that this step calls; None if it does not pass through
        them in their order.
    """
    points, uses = CutPoints(survey), sorted(_uses(survey, cuts))
    places: list[Place] = []
    for j in range(1, cuts.num_stages):
        place = _place(points, uses, j, cuts.starts[j - 1])
        if place is None or (places and place.tick <= places[-1].tick):
            return None
        places.append(place)
    split = split_by(places)
    if any(o.is_hard for p in places for o in points.obstacles.against(p.tick, split)):
        return None
    ticks = [p.tick for p in places]
    if any(sum(t <= tick for t in ticks) not in stages for tick, stages in uses):
        return None
    return replace(cuts, starts=tuple(p.path for p in places), split=split)


def _uses(survey: Survey, cuts: Cuts) -> Iterator[_Use]:
    """Iterate over what only some workers have, when it is used."""
    home = {n: frozenset((j,)) for j, names in enumerate(cuts.parameters) for n in names}
    home |= {n: frozenset(stages) for n, stages in cuts.tied.items()}
    for name, held in survey.parameters.items():
        yield from ((use.tick, home[name]) for use in held.uses)
    for j, names in enumerate(cuts.buffers):
        for name in names:
            tick = survey.buffers.get(name)
            if tick is not None and (name in cuts.changed or name in survey.changed):
                yield tick, frozenset((j,))
    for path, ticks in survey.metrics.items():
        yield from ((tick, frozenset((cuts.metrics[path],))) for tick in ticks)


def _place(points: CutPoints, uses: Sequence[_Use], j: int, start: str) -> Place | None:
    """Return where stage ``j`` begins: where it does in training, or as late as it can."""
    behind = max((tick for tick, stages in uses if max(stages) < j), default=0)
    first = min((tick for tick, stages in uses if min(stages) >= j), default=0)
    found = [p for p in points.places if behind < p.tick <= first and p.is_possible]
    same = [at for p in found if start in p.names and (at := points.at(start)) is not None]
    return same[0] if same else max(found, key=lambda p: p.tick, default=None)
