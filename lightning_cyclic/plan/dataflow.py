"""How much a worker must keep at once, counted along its program."""

from __future__ import annotations

from collections import defaultdict

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program


def live_activations(program: Program) -> int:
    """Count the most stage-activations that a worker keeps from an F to its B.

    Example:
        >>> from lightning_cyclic.plan.actions import parse
        >>> live_activations(tuple(map(parse, ["0F0#0", "0F1#0", "0B0#0", "0B1#0"])))
        2
    """
    live = peak = 0
    for a in program:
        live += (a.kind is Kind.F) - (a.kind is Kind.B)
        peak = max(peak, live)
    return peak


def live_versions(program: Program) -> dict[int, int]:
    """Count, for each stage, the most versions that a worker must keep at once.

    A version is kept from when it is made or received to its last read, send or update. What is
    being received or made is counted only from the next action on, as it may replace the old.

    Returns:
        Peak by stage; stages of which the program reads nothing are left out.
    """
    last_use = {(a.j, v): n for n, a in enumerate(program) for v in _uses(a)}
    live: dict[int, set[int]] = defaultdict(set)
    peaks: dict[int, int] = {}
    for n, a in enumerate(program):
        for v in _uses(a):
            live[a.j].add(v)
        peaks[a.j] = max(peaks.get(a.j, 0), len(live[a.j]))
        live[a.j] = {v for v in live[a.j] if last_use[a.j, v] > n}
        if a.v is not None and _makes(a) and last_use.get((a.j, a.v), 0) > n:
            live[a.j].add(a.v)
    return {j: peak for j, peak in peaks.items() if peak}


def _makes(a: Action) -> bool:
    return a.kind is Kind.UPDATE or (a.kind is Kind.RECV and a.payload is Payload.P)


def _uses(a: Action) -> tuple[int, ...]:
    if a.v is None:
        return ()
    if a.kind is Kind.UPDATE:
        return (a.v - 1,)
    is_read = a.kind in (Kind.F, Kind.B, Kind.SEND)  # what is sent with a version is parameters
    return (a.v,) if is_read else ()
