"""Obstacles: what stands against a stage that begins at some module call.

The worker of a later stage runs the step from its start, without the *units* of earlier stages:
the outermost calls of modules with parameters, or buffers that the step changes, that no stage
begins within. It repeats the *glue* around them. So glue must not need what only a unit knows:

    read      Python reads a value that an earlier stage computes
    stash     glue uses a tensor that a unit made but did not return
    in_place  a tensor that every worker has is changed by what only one computes
    views     of two views of a tensor of an earlier stage, which travel apart, one is changed
    buffer    a buffer that training changes is used on both sides, or assigned anew by glue
    closed    activation checkpointing or torch.compile has both sides in one piece of code
    shared    (soft) a module uses a parameter on both sides: possible, but costs messages
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import dropwhile, groupby
from typing import final

from lightning_cyclic.runtime.stages.evidence import Closed, Moved, Read, Survey, Use
from lightning_cyclic.runtime.torch_functions import Line

Split = frozenset[str]
"""Paths of the modules within whose calls stages begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Hold why a stage cannot, or rather should not, begin somewhere."""

    kind: str
    reason: str
    line: Line

    @property
    def is_hard(self) -> bool:
        """Say whether no stage can begin there."""
        return self.kind != "shared"

    def __str__(self) -> str:
        return f"{self.reason} ({self.line})"


@dataclass(frozen=True, slots=True)
class _Hazard:
    """Hold what may become an obstacle, and to which cuts.

    ``strikes(tick, split)``: whether it does, to a cut at the tick, among cuts that split so.
    """

    obstacle: Obstacle
    strikes: Callable[[int, Split], bool]


@final
class Obstacles:
    """Answer for any set of cuts what stands against each."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._units = self._unit_paths()
        self._stashes: list[tuple[Callable[[int, Split], bool], int, list[int]]] = []
        self._hazards = [
            *self._of_reads(),
            *self._of_stashes(),
            *self._of_changes(),
            *self._of_edits(),
            *self._of_buffers(),
            *self._of_closed(),
            *self._of_parameters(),
        ]
        self.depend_on_other_cuts = any(
            h.obstacle.kind in ("read", "stash", "in_place", "views") for h in self._hazards
        ) or any(m.anew is not None for m in survey.changed.values())

    def against(self, tick: int, split: Split) -> tuple[Obstacle, ...]:
        """Return what stands against a cut, hard ones first."""
        found = dict.fromkeys(h.obstacle for h in self._hazards if h.strikes(tick, split))
        return tuple(sorted(found, key=lambda o: not o.is_hard))

    def opened(self, tick: int, split: Split) -> Split:
        """Add the modules whose own code has to be repeated for a cut, as it hands tensors out.

        A module that leaves a tensor behind (for a hook that collects router outputs, say) is
        entered on every worker, down to the module that returned the tensor.
        """
        while True:
            more = [
                path
                for strikes, value, units in self._stashes
                if strikes(tick, split)
                for path in self._to_open(value, units, split)
            ]
            if not more:
                return split
            split |= frozenset(more)

    def _to_open(self, value: int, units: list[int], split: Split) -> Iterator[str]:
        """Name the units from the one that is skipped down to the one that returns a tensor."""
        for n in dropwhile(lambda n: self._survey.calls[n].path in split, units):
            if value in self._survey.calls[n].outputs:
                return
            yield self._survey.calls[n].path

    def is_ghost(self, value: int, tick: int, split: Split) -> bool:
        """Say whether later stages' workers lack a tensor's values."""
        return self._survey.is_derived(value, tick) or any(
            not self._repeated(unit, split) for unit in self._survey.values[value].units
        )

    def _unit_paths(self) -> list[Split]:
        """Return, for each call, the paths of the unit calls around it, itself included."""
        found: list[Split] = []
        for call in self._survey.calls:
            around = frozenset() if call.parent is None else found[call.parent]
            found.append(around | {call.path} if call.is_unit else around)
        return found

    def _repeated(self, call: int | None, split: Split) -> bool:
        """Say whether code directly within a call runs on the workers of later stages too."""
        return call is None or self._units[call] <= split

    # ------------------------------------------------------------------ the kinds

    def _of_reads(self) -> Iterator[_Hazard]:
        for read in self._survey.reads:
            reason = f"Python reads a value that an earlier stage computes, by {read.function}"
            yield _Hazard(
                Obstacle(kind="read", reason=reason, line=read.at.line), self._read_strikes(read)
            )

    def _read_strikes(self, read: Read) -> Callable[[int, Split], bool]:
        def strikes(tick: int, split: Split) -> bool:
            return (
                read.at.tick < tick
                and self._repeated(read.at.call, split)
                and self.is_ghost(read.value, read.at.tick, split)
            )

        return strikes

    def _of_stashes(self) -> Iterator[_Hazard]:
        calls = self._survey.calls
        for k, value in enumerate(self._survey.values):
            made = value.made
            if made is None or not value.uses or made.call is None:
                continue
            # from the outside in: the first that is not split is the one that is skipped
            units = [n for n in reversed(self._numbers_around(made.call)) if calls[n].is_unit]
            last = value.uses[-1]
            kept = [n for n in units if calls[n].end < last.tick and k not in calls[n].outputs]
            if not kept:
                continue
            first = next(u for u in value.uses if u.tick > calls[kept[-1]].end)
            reason = (
                f"uses a tensor that {calls[kept[0]].path!r} made at {made.line.short} but did "
                "not return"
            )
            strikes = self._stash_strikes(k, units)
            self._stashes.append((strikes, k, units))
            yield _Hazard(Obstacle(kind="stash", reason=reason, line=first.line), strikes)

    def _stash_strikes(self, k: int, units: list[int]) -> Callable[[int, Split], bool]:
        calls, uses = self._survey.calls, self._survey.values[k].uses

        def strikes(tick: int, split: Split) -> bool:
            skipped = next((n for n in units if calls[n].path not in split), None)
            if skipped is None or calls[skipped].end > tick or k in calls[skipped].outputs:
                return False
            later = [u for u in uses if u.tick > calls[skipped].end]
            return self._needed(later, tick, split)

        return strikes

    def _of_changes(self) -> Iterator[_Hazard]:
        made: dict[int, Use | None] = {}
        uses: dict[int, list[Use]] = {}
        for value in self._survey.values:
            made.setdefault(value.storage, value.made)
            uses.setdefault(value.storage, []).extend(value.uses)
        for change in self._survey.changes:
            by = "by values of parameters" if change.by_derived else "within a module's call"
            yield _Hazard(
                Obstacle(
                    kind="in_place",
                    reason=f"a tensor that all stages have is changed in place {by}",
                    line=change.at.line,
                ),
                self._change_strikes(
                    change.at,
                    change.by_derived,
                    made[change.storage],
                    [u for u in uses[change.storage] if u.tick > change.at.tick],
                ),
            )

    def _change_strikes(
        self, at: Use, by_derived: bool, made: Use | None, later: list[Use]
    ) -> Callable[[int, Split], bool]:
        def strikes(tick: int, split: Split) -> bool:
            if at.tick >= tick or (made is not None and not self._repeated(made.call, split)):
                return False
            lost = by_derived or not self._repeated(at.call, split)
            return lost and self._needed(later, tick, split)

        return strikes

    def _of_edits(self) -> Iterator[_Hazard]:
        views: dict[int, list[int]] = {}
        for k, value in enumerate(self._survey.values):
            if value.made is not None and value.uses:
                views.setdefault(value.storage, []).append(k)
        for edit in self._survey.edits:
            sharing = views.get(edit.storage, [])
            if len(sharing) > 1:
                reason = "a tensor of an earlier stage, whose views are used, is changed in place"
                yield _Hazard(
                    Obstacle(kind="views", reason=reason, line=edit.at.line),
                    self._edit_strikes(edit.at, sharing),
                )

    def _edit_strikes(self, at: Use, sharing: list[int]) -> Callable[[int, Split], bool]:
        values = self._survey.values

        def crosses(k: int, tick: int, split: Split) -> bool:
            made, last = values[k].made, values[k].uses[-1]
            assert made is not None
            return made.tick < tick <= last.tick and self.is_ghost(k, tick, split)

        def strikes(tick: int, split: Split) -> bool:
            return tick <= at.tick and sum(crosses(k, tick, split) for k in sharing) > 1

        return strikes

    def _of_buffers(self) -> Iterator[_Hazard]:
        for name, moved in self._survey.changed.items():
            owner, _, short = name.rpartition(".")
            what = f"{owner!r} has buffers" if owner else f"{name!r} is a buffer"
            reason = f"{what} that training changes, used on both sides"
            yield _Hazard(
                Obstacle(kind="buffer", reason=reason, line=moved.last.line),
                _between(moved.first, moved.last),
            )
            if moved.anew is not None:
                reason = (
                    f"buffer {name!r} is assigned anew by code that later stages repeat, and of "
                    f"what an earlier one computes; change it in place, self.{short}.copy_(...)"
                )
                yield _Hazard(
                    Obstacle(kind="buffer", reason=reason, line=moved.anew.line),
                    self._anew_strikes(moved, moved.anew),
                )

    def _anew_strikes(self, moved: Moved, anew: Use) -> Callable[[int, Split], bool]:
        def strikes(tick: int, split: Split) -> bool:
            is_ghost = moved.by_derived or not moved.units <= split
            return tick > anew.tick and is_ghost and self._repeated(anew.call, split)

        return strikes

    def _of_closed(self) -> Iterator[_Hazard]:
        for closed in self._survey.closed:
            reason = f"the code on both sides of it {closed.what}, as a whole"
            yield _Hazard(
                Obstacle(kind="closed", reason=reason, line=closed.line), _within(closed)
            )

    def _of_parameters(self) -> Iterator[_Hazard]:
        for name, held in self._survey.parameters.items():
            users = sorted(held.uses, key=lambda u: (self._path(u), u.tick))
            for path, group in groupby(users, key=self._path):
                uses = list(group)
                if len(uses) > 1:
                    what = repr(path) if path else f"glue code with {name!r}"
                    reason = f"{what} runs on both sides"
                    yield _Hazard(
                        Obstacle(kind="shared", reason=reason, line=uses[-1].line),
                        _between(uses[0], uses[-1]),
                    )

    # ------------------------------------------------------------------ what they share

    def _needed(self, uses: list[Use], tick: int, split: Split) -> bool:
        """Say whether a worker of a stage from ``tick`` on runs one of the uses."""
        return any(u.tick >= tick or self._repeated(u.call, split) for u in uses)

    def _path(self, use: Use) -> str:
        return "" if use.call is None else self._survey.calls[use.call].path

    def _numbers_around(self, call: int | None) -> list[int]:
        found = []
        while call is not None:
            found.append(call)
            call = self._survey.calls[call].parent
        return found


def _within(closed: Closed) -> Callable[[int, Split], bool]:
    return lambda tick, split: closed.begin < tick <= closed.end


def _between(first: Use, last: Use) -> Callable[[int, Split], bool]:
    return lambda tick, split: first.tick < tick <= last.tick
