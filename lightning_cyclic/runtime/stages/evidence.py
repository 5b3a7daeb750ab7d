"""The evidence: what a survey of one step found, as plain data.

Everything has its *tick*: the number of calls, ends of calls and torch functions before it.

    tick   0  1        2       3        4    5        6     7       8
           .  (wte     embed)  (h.0     add  (h.0.ln  norm) h.0)   cross_entropy
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from lightning_cyclic.runtime.torch_functions import Line

ClockName: TypeAlias = Literal["counted", "measured"]


class Use(NamedTuple):
    """Say when, within which call (its number; None: outside all) and where something is used."""

    tick: int
    call: int | None
    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Hold one call of a module.

    Args:
        path: of the module, "" for the root.
        n: how many calls of it came before.
        parent: number of the call within which it was made; None: outside all.
        begin_ns: time since the step began, by the survey's clock.
        is_unit: it has parameters, or is a metric, or has buffers that the step changes: other
            stages' workers skip it whole.
        outputs: numbers of the tensors that a unit call returned.
    """

    path: str
    n: int
    parent: int | None
    begin: int
    end: int
    begin_ns: int
    end_ns: int
    is_unit: bool
    outputs: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Hold one tensor.

    Args:
        storage: number of what it shares with its views.
        made: where it was made; None for what was given: parameters, buffers, the batch.
        units: numbers of the innermost unit calls within which it, or what it was computed from,
            was made.
    """

    storage: int
    num_bytes: int
    derived: bool
    made: Use | None
    units: frozenset[int]
    uses: tuple[Use, ...]


class Storage(NamedTuple):
    """Hold what views share.

    ``derived_from``: when a value that depends on parameters was written into it in place.
    """

    num_bytes: int
    derived_from: int | None


class Read(NamedTuple):
    """Say that Python looked at the values of a tensor (``.item()``, ``if x > 0``)."""

    value: int
    at: Use
    function: str


class Change(NamedTuple):
    """Say that a storage that did not depend on parameters was changed in place.

    ``by_derived``: by a value that does; else within a unit call.
    """

    storage: int
    at: Use
    by_derived: bool


class Edit(NamedTuple):
    """Say that some storage was changed in place, whatever it depended on."""

    storage: int
    at: Use


class Moved(NamedTuple):
    """Say how the step changed a buffer.

    Args:
        within: path of the innermost module within whose calls all uses are; "": the root.
        by_derived: whether by values that depend on parameters, or nobody knows by which.
        units: paths of the unit calls within which it, or what it was changed by, was made.
        anew: where another tensor was put into its place; None: it was changed in place.
    """

    first: Use
    last: Use
    within: str
    is_leaf: bool
    by_derived: bool
    units: frozenset[str]
    anew: Use | None


class Written(NamedTuple):
    """Say that the step changed a parameter; ``itself``: not by ``.data``, nor by a view."""

    name: str
    at: Use
    itself: bool


class Closed(NamedTuple):
    """Say that no stage can begin within some ticks: behind the first, up to the last."""

    begin: int
    end: int
    what: str  # happens with the code that runs then
    line: Line


class Kept(NamedTuple):
    """Say that a backward needs what one storage holds.

    Args:
        made: when it was.
        saves: when it was saved, in order.
        again_until: up to which tick workers of later stages make it, too, of the batch alone; 0:
            they do not.
    """

    num_bytes: int
    made: int
    saves: tuple[int, ...]
    again_until: int


class Held(NamedTuple):
    num_bytes: int
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Hold what the run showed.

    Args:
        calls: in order of their begins; their place here is their number.
        reads: of values that depend on parameters or were made within units.
        changes: in place, of storages that did not depend on parameters.
        buffers: name of every buffer -> tick of its first use; of its module's first call, where
            none was seen; None: not called.
        changed: name of every buffer that the step changed -> how.
        metrics: path of every metric -> ticks of its updates.
        duration_ns: of the step, by the survey's clock.
        edits: in place, of all storages but those of buffers.
        aliases: further names of modules -> the first, which is among ``modules``.
        clock: whose times they are (clocks.py).
        stateful: paths of the modules that are units for their buffers alone.
        kept: what is kept for the backward. [None: nobody knows]
    """

    title: str
    modules: tuple[str, ...]
    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    reads: tuple[Read, ...]
    changes: tuple[Change, ...]
    parameters: Mapping[str, Held]
    buffers: Mapping[str, int | None]
    changed: Mapping[str, Moved]
    metrics: Mapping[str, tuple[int, ...]]
    end: int
    duration_ns: int
    edits: tuple[Edit, ...] = ()
    written: tuple[Written, ...] = ()
    closed: tuple[Closed, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    clock: ClockName = "counted"
    stateful: frozenset[str] = frozenset()
    kept: tuple[Kept, ...] | None = None

    def is_derived(self, value: int, tick: int) -> bool:
        """Say whether a value depends on parameters at a tick."""
        since = self.storages[self.values[value].storage].derived_from
        return self.values[value].derived or (since is not None and since <= tick)

    def beside(self, name: str) -> str | None:
        """Return the used parameter that is nearest to an unused one, or to a buffer.

        It is of the same module, or of the innermost one around it that has any; of these, the
        one that is defined before it, else behind it. None if the step uses none.
        """
        names = list(self.parameters)
        at = names.index(name) if name in self.parameters else len(names)
        nearest = [n for n in (*reversed(names[:at]), *names[at:]) if self.parameters[n].uses]
        path = name
        while path:
            path = path.rpartition(".")[0]
            for n in nearest:
                if n.startswith(f"{path}." if path else ""):
                    return n
        return None

    def uses_beside(self, name: str) -> tuple[Use, ...]:
        """Return the uses of a parameter; of one that was not used, the first of one beside it."""
        uses = self.parameters[name].uses if name in self.parameters else ()
        near = None if uses else self.beside(name)
        return uses if near is None else self.parameters[near].uses[:1]

    def in_metric(self, path: str) -> bool:
        """Say whether a call's path is that of a metric, of its update or of what it holds."""
        return any(path == metric or path.startswith(f"{metric}.") for metric in self.metrics)

    def around(self, call: int | None) -> list[Call]:
        """Return a call and those within which it was made, from the inside out."""
        found = []
        while call is not None:
            found.append(self.calls[call])
            call = self.calls[call].parent
        return found


def quietest(runs: Sequence[Survey]) -> Survey:
    """Return the first run with the shortest time that any run took from event to event.

    Runs that made other calls than the first count for nothing.
    """
    times = [_times(run) for run in runs if _order(run) == _order(runs[0])]
    events = [*sorted(times[0].keys() - {_END}), _END]
    now, at = 0, {}
    for before, event in pairwise([_START, *events]):
        now += max(0, min(t[event] - t.get(before, 0) for t in times))
        at[event] = now
    calls = tuple(replace(c, begin_ns=at[c.begin], end_ns=at[c.end]) for c in runs[0].calls)
    return replace(runs[0], calls=calls, duration_ns=at[_END])


def with_kept(run: Survey, other: Survey) -> Survey:
    """Return a run with what another one, with gradients, has kept between the same calls.

    There may be other functions of torch between them, such as those of activation checkpointing.
    """
    events, others = (sorted(_events(each)) for each in (run, other))
    if other.kept is None or [e.what for e in events] != [e.what for e in others]:
        return run
    ticks, known = [0, *(e.tick for e in events)], [e.tick for e in others]

    def here(tick: int) -> int:
        return ticks[bisect_right(known, tick)]

    kept = (
        Kept(x.num_bytes, here(x.made), tuple(map(here, x.saves)), here(x.again_until))
        for x in other.kept
    )
    return replace(run, kept=tuple(kept))


class _Event(NamedTuple):
    tick: int
    what: tuple[str, bool]  # path of a call, and whether it is its end


def _events(run: Survey) -> Iterator[_Event]:
    for call in run.calls:
        yield _Event(call.begin, (call.path, False))
        yield _Event(call.end, (call.path, True))


_START, _END = -2, -1  # stand for ticks before and behind all others


def _times(run: Survey) -> dict[int, int]:
    """Return when each call began and ended, by tick, and when the step ended."""
    times = {c.begin: c.begin_ns for c in run.calls} | {c.end: c.end_ns for c in run.calls}
    return times | {_END: run.duration_ns}


def _order(run: Survey) -> list[tuple[str, int, int]]:
    return [(c.path, c.begin, c.end) for c in run.calls]


def is_inside(path: str, paths: Collection[str]) -> bool:
    """Say whether what has a path is one of some modules, or inside.

    Example:
        >>> is_inside("net.3.mean", {"net.3"}), is_inside("net.30.mean", {"net.3"})
        (True, False)
    """
    parts = path.split(".")
    return any(".".join(parts[:k]) in paths for k in range(1, len(parts) + 1))


def is_metric(module: object) -> bool:
    """Say whether a module is a torchmetrics metric, without importing torchmetrics."""
    return any(
        c.__name__ == "Metric" and c.__module__.startswith("torchmetrics")
        for c in type(module).__mro__
    )
