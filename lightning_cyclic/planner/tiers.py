"""Tiers: how much optimizer state stays in memory under a limit; the rest comes for its update.

State of a stage lies in chunks of equal size. Where a worker is in its program says which stages'
state is there for an update; that of all others has the room that is left:

    place            what is there besides    room for what stays of others
    B0               weights, activations     limit - these
    UPDATE of 2      state of 1, 2 and 3      limit - these, of all stages but 1, 2 and 3

What stays of the stages of a place and what stays of others add up to all that stays, K chunks.
So K is possible where of the stages of each place at least K minus its room stays; the least that
does so is found from the last stage of each place backwards, as those of a place follow each
other. Less moves by no rule, but for the part of a chunk that steps unlike each other would save:
this is what a cache does that knows its future (Belady's rule, by which PatrickStar evicts).

Source: Fang et al., "PatrickStar", arXiv 2108.05818 (chunks, the rule of eviction).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.tiers import Tiers
from lightning_cyclic.simulate.costs import Costs
from lightning_cyclic.simulate.memory import memory_by_place, spans


def with_state_in_tiers(
    plan: Plan,
    costs: Costs,
    chunks: Sequence[int],
    chunk_bytes: int,
    limit_bytes: float,
    *,
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
        chunks: how many the optimizer state of each stage has.
        chunk_bytes: of one.
        limit_bytes: most bytes that a worker may have in memory.
        besides: bytes of it that a worker has for other things at any time.
        early: whether stages are updated right behind their backwards, by one worker alone.
        remat: whether backwards of single stages run their forward again.

    Returns:
        The plan with tiers; with nothing that moves, if all state fits. Stages are updated one by
        one in either case, as gradients of all of them at once would take more room.

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
    fitting = partial(
        _fitting, plan, costs, chunks, chunk_bytes, limit_bytes - besides,
        early=early, remat=remat,
    )  # fmt: skip
    least = float("inf")
    for ahead in (1, 0):
        found = fitting(ahead)
        least = min(least, limit_bytes + found.missing)
        if found.kept is None:
            continue
        if ahead and not plan.axes.placement.runs_whole_micro:
            # behind a step activations are gone, and state has room beside the last backwards
            further = map(fitting, range(plan.num_stages, 1, -1))
            stays = sum(found.kept)
            found = next((x for x in further if x.kept and sum(x.kept) >= stays), found)
        assert found.kept is not None
        return replace(plan, tiers=_with_kept(found.tiers, chunks, found.kept, chunk_bytes))
    raise PlanError(
        f"a limit of {limit_bytes:.0f} bytes, but a worker of preset {plan.preset!r} with "
        f"{plan.num_stages} stages needs {least:.0f} at once, with optimizer state of one stage "
        f"at a time in memory; allowed: {least:.0f} or more; use that, smaller batches, or more "
        "stages"
    )


class _Fitting(NamedTuple):
    """Say what of state stays, if state comes so far ahead; None where bytes are missing."""

    tiers: Tiers
    missing: float
    kept: list[int] | None


def _fitting(
    plan: Plan, costs: Costs, chunks: Sequence[int], chunk_bytes: int, limit_bytes: float,
    ahead: int, *, early: bool, remat: bool,
) -> _Fitting:  # fmt: skip
    every = tuple(n * chunk_bytes for n in chunks)
    tiers = Tiers(moved=every, kept=(0,) * len(every), ahead=ahead, early=early)
    rooms = rooms_beside_state(replace(plan, tiers=tiers), costs, limit_bytes, remat=remat)
    missing = -min(min(x.values()) for x in rooms)
    fits = missing <= 0
    kept = most_that_stays(plan, chunks, chunk_bytes, rooms) if fits else None
    return _Fitting(tiers, missing, kept)


def _with_kept(
    tiers: Tiers, chunks: Sequence[int], kept: Sequence[int], chunk_bytes: int
) -> Tiers:
    return replace(
        tiers,
        moved=tuple((n - k) * chunk_bytes for n, k in zip(chunks, kept, strict=True)),
        kept=tuple(k * chunk_bytes for k in kept),
    )


def rooms_beside_state(
    plan: Plan, costs: Costs, limit_bytes: float, *, remat: bool = False
) -> list[dict[tuple[int, ...], float]]:
    """Return for each worker: stages whose state is there -> the least room for what stays.

    Args:
        plan: of which all state comes and goes.
    """
    found: list[dict[tuple[int, ...], float]] = []
    rows = memory_by_place(plan, costs, remat=remat)
    for row, held in zip(rows, spans(plan, remat=remat), strict=True):
        state = [x for x in held if x.kind == "state"]
        rooms: dict[tuple[int, ...], float] = {}
        for place, kept in enumerate(row):
            there = tuple(sorted({x.j for x in state if x.begin <= place < x.end}))
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
