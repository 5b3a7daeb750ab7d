"""Tiers: what stays in memory under a limit; the rest comes when it is used.

What a stage has lies in chunks of equal size. Where a worker is in its program says which stages'
chunks are there, as they are used; those of all others have the room that is left:

    place            what is there besides    room for what stays of others
    B0               weights, activations     limit - these
    UPDATE of 2      state of 1, 2 and 3      limit - these, of all stages but 1, 2 and 3

What stays of the stages of a place and what stays of others add up to all that stays, K chunks.
So K is possible where of the stages of each place at least K minus its room stays; the least that
does so is found from the last stage of each place backwards, as those of a place follow each
other. Less moves by no rule, but for the part of a chunk that steps unlike each other would save:
this is what a cache does that knows its future (Belady's rule, by which PatrickStar evicts).

Optimizer state moves first, once each way in a step. Weights come for forwards, and again for
backwards and updates, and move where the limit is less than is needed with all weights in memory.
As many of their chunks stay as can, and then of state; of all choices together some might move
less, where the last stage's weights, which come once, could take the place of others'.

Source: Fang et al., "PatrickStar", arXiv 2108.05818 (chunks, the rule of eviction).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.tiers import Tiers
from lightning_cyclic.simulate.costs import Costs
from lightning_cyclic.simulate.memory import memory_by_place, spans


class Chunks(NamedTuple):
    """Say in how many chunks something of each stage lies.

    Args:
        num_bytes: of one.
        used: bytes of each chunk of each stage in which something lies. [all]
    """

    counts: Sequence[int]
    num_bytes: int
    used: Sequence[Sequence[int]] = ()

    def of(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of so many of each stage."""
        return tuple(n * self.num_bytes for n in numbers)

    def rest(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of all but so many of each stage."""
        return self.of([n - k for n, k in zip(self.counts, kept, strict=True)])

    def used_of_rest(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes that lie in all but so many of each stage."""
        if not self.used:
            return self.rest(kept)
        return tuple(sum(each[k:]) for each, k in zip(self.used, kept, strict=True))


def in_tiers(
    plan: Plan,
    costs: Costs,
    state: Chunks,
    limit_bytes: float,
    *,
    weights: Chunks | None = None,
    besides: float = 0.0,
    early: bool = False,
    remat: bool = False,
) -> Plan:
    """Return a plan of which no worker exceeds a limit.

    Copies overlap what is computed if there is room for that, and no more moves than has to then.
    State of single stages comes as far ahead as it can, if no more moves by that.

    Args:
        plan: of enough steps to be steady.
        costs: bytes of weights and activations.
        state: chunks of optimizer state.
        limit_bytes: most bytes that a worker may have in memory.
        weights: chunks of weights, of one worker alone. [all stay]
        besides: bytes of the limit that a worker has for other things at any time.
        early: whether stages are updated right behind their backwards, by one worker alone.
        remat: whether backwards of single stages run their forward again.

    Returns:
        The plan with tiers; with nothing that moves, if all fits. Stages are updated one by one
        in either case, as gradients of all of them at once would take more room.

    Raises:
        PlanError: the limit is less than what is needed at once, and the text names the least; or
            updates wait for the norms of all stages.
    """
    if plan.norms != "none" and plan.axes.placement.runs_whole_micro:
        raise PlanError(
            f"optimizer state that comes and goes with norms={plan.norms!r} (gradients clipped by "
            "the norm of all stages), so that all stages are updated at once; allowed: "
            "norms='none'; use that (clip_norm='stage')"
        )
    least, room = float("inf"), limit_bytes - besides
    every, none = state.of(state.counts), (0,) * len(state.counts)
    for moving in (None,) if weights is None else (None, weights):
        for ahead in (1, 0):
            tiers = Tiers(moved=every, kept=none, ahead=ahead, early=early)
            if moving is not None:
                tiers = replace(tiers, weights=moving.rest(none), away=moving.used_of_rest(none))
            rooms = rooms_beside(replace(plan, tiers=tiers), costs, room, remat=remat)
            needed = limit_bytes - min(min(x.values()) for x in rooms)
            least = min(least, needed)
            if needed > limit_bytes:
                continue
            if moving is not None:
                kept = _most(replace(plan, tiers=tiers), costs, moving, room, "fetched")
                tiers = replace(tiers, weights=moving.rest(kept), away=moving.used_of_rest(kept))
            kept = _most(replace(plan, tiers=tiers), costs, state, room, "state", remat=remat)
            if ahead and not plan.axes.placement.runs_whole_micro:
                tiers, kept = _further_ahead(plan, costs, state, room, tiers, kept, remat=remat)
            return replace(plan, tiers=replace(tiers, moved=state.rest(kept), kept=state.of(kept)))
    what = "optimizer state" if weights is None else "weights and optimizer state"
    raise PlanError(
        f"a limit of {limit_bytes:.0f} bytes, but a worker of preset {plan.preset!r} with "
        f"{plan.num_stages} stages needs {least:.0f} at once, with {what} of one stage "
        f"at a time in memory; allowed: {least:.0f} or more; use that, smaller batches, or more "
        "stages"
    )


def _further_ahead(
    plan: Plan, costs: Costs, state: Chunks, room: float, tiers: Tiers, kept: list[int], *,
    remat: bool,
) -> tuple[Tiers, list[int]]:  # fmt: skip
    """Let state of single stages come as far ahead as it can, as long as no less of it stays.

    Behind a step activations are gone, and state has room beside the last backwards.
    """
    for ahead in range(plan.num_stages, tiers.ahead, -1):
        further = replace(tiers, ahead=ahead)
        rooms = rooms_beside(replace(plan, tiers=further), costs, room, remat=remat)
        if min(min(x.values()) for x in rooms) < 0:
            continue
        found = most_that_stays(plan, state.counts, state.num_bytes, rooms)
        if sum(found) >= sum(kept):
            return further, found
    return tiers, kept


def _most(
    plan: Plan, costs: Costs, chunks: Chunks, room: float, kind: str, *, remat: bool = False
) -> list[int]:
    rooms = rooms_beside(plan, costs, room, kind, remat=remat)
    return most_that_stays(plan, chunks.counts, chunks.num_bytes, rooms)


def rooms_beside(
    plan: Plan, costs: Costs, limit_bytes: float, kind: str = "state", *, remat: bool = False
) -> list[dict[tuple[int, ...], float]]:
    """Return for each worker: stages of which something is there -> the least room for others.

    Args:
        plan: of which all of it comes and goes.
        kind: of spans, what comes and goes.
    """
    found: list[dict[tuple[int, ...], float]] = []
    rows = memory_by_place(plan, costs, remat=remat)
    for row, held in zip(rows, spans(plan, remat=remat), strict=True):
        comes = [x for x in held if x.kind == kind]
        rooms: dict[tuple[int, ...], float] = {}
        for place, kept in enumerate(row):
            there = tuple(sorted({x.j for x in comes if x.begin <= place < x.end}))
            rooms[there] = min(rooms.get(there, float("inf")), limit_bytes - kept.total)
        found.append(rooms)
    return found


def most_that_stays(
    plan: Plan, chunks: Sequence[int], chunk_bytes: int,
    rooms: Sequence[Mapping[tuple[int, ...], float]],
) -> list[int]:  # fmt: skip
    """Return how many chunks of each stage stay: of each worker's together as many as can.

    Args:
        rooms: of each worker.
    """
    kept = [0] * len(chunks)
    for w, of_places in enumerate(rooms):
        own = [j for j in range(len(chunks)) if plan.owner(j) == w]
        in_chunks = {there: int(room // chunk_bytes) for there, room in of_places.items()}
        least, most = 0, sum(chunks[j] for j in own)
        while least < most:  # what is possible with K chunks is with one less
            middle = (least + most + 1) // 2
            if _least_that_stays(chunks, own, in_chunks, middle) is not None:
                least = middle
            else:
                most = middle - 1
        found = _least_that_stays(chunks, own, in_chunks, least)
        assert found is not None, "none at all is always possible under the limit"
        left = least - sum(found.values())
        for j in own:
            more = min(left, chunks[j] - found[j])
            kept[j], left = found[j] + more, left - more
    return kept


def _least_that_stays(
    chunks: Sequence[int], own: Sequence[int], rooms: Mapping[tuple[int, ...], int], total: int
) -> dict[int, int] | None:
    """Return the fewest chunks of each stage that must stay for ``total`` to; None: too many."""
    stays = dict.fromkeys(own, 0)
    for there, room in sorted(rooms.items(), key=lambda x: x[0][-1:]):
        missing = total - room - sum(stays[j] for j in there)
        for j in reversed(there):  # the last is there at most places that are still to come
            more = min(max(missing, 0), chunks[j] - stays[j])
            stays[j] += more
            missing -= more
        if missing > 0:
            return None
    return stays if sum(stays.values()) <= total else None
