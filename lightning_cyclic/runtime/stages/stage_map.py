"""Stages of whole steps: what belongs together, and which module call begins each.

The first training step is run as it is, with a note taken whenever a module is called and
whenever a parameter is first used: by the module that owns it, or by glue code (seen by a
FunctionWatch). A stage may begin at the first call of a module. What lies between two such
calls and first uses parameters, trained or frozen, is a *unit*; stages are runs of units.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_cyclic.errors import PlanError, StepError
from lightning_cyclic.planner.partition import balance
from lightning_cyclic.runtime.absent import make_present
from lightning_cyclic.runtime.bits import same
from lightning_cyclic.runtime.compiled import before_calls, is_compiled, named_modules
from lightning_cyclic.runtime.stages.saved import SavedStorages
from lightning_cyclic.runtime.torch_functions import FunctionWatch, known, moves_nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Hold a run of first uses that no stage boundary can split.

    Args:
        starts: paths of the modules whose first calls lie between the last first use before the
            unit and its own first; any of them may begin a stage. Empty for the first unit.
        parameters: names of the trained parameters first used in it, in order of use.
        glue: those, trained or frozen, that code outside their own module used first.
        frozen: names of the parameters first used in it that are not trained, or not yet.
    """

    starts: tuple[str, ...]
    parameters: tuple[str, ...]
    glue: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Hold what the first training step showed.

    Args:
        unused: names of trained parameters that the step did not use.
        resting: names of other parameters that the step did not use.
        buffers: the module buffers whose values the step changed: name -> (unit of the first
            call of their module, unit of its last call).
        saved: bytes of activations that each unit leaves for the backward; none: nobody counted.
        last: name of a parameter -> the last unit that uses it, where that is not its first.
    """

    units: tuple[Unit, ...]
    unused: tuple[str, ...]
    buffers: dict[str, tuple[int, int]]
    resting: tuple[str, ...] = ()
    saved: tuple[int, ...] = ()
    last: dict[str, int] = field(default_factory=dict)

    @property
    def begins(self) -> list[int]:
        """Return the units at which stages with trained parameters may begin, the first being 0.

        What is frozen goes with what is trained behind it.
        """
        trained = [k for k, unit in enumerate(self.units) if unit.parameters]
        return [0, *(k + 1 for k in trained[:-1])]

    def as_trained(self) -> Self:
        """Return the profile as if what is frozen were trained, too."""
        units = (
            replace(unit, parameters=unit.parameters + unit.frozen, frozen=())
            for unit in self.units
        )
        unused = self.unused + self.resting
        return replace(self, units=tuple(units), unused=unused, resting=())


class _OfWeight(NamedTuple):
    """Stand for a weight, or a view of one, that a graph would hold."""

    weight: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _given_back(saved: Tensor | _OfWeight) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    make_present(saved.weight)
    return saved.weight.detach().as_strided(saved.size, saved.stride, saved.offset)


@final
class Recorder:
    """Record the order of first use while one training step runs.

    Args:
        parameters: name -> parameter, for those that are trained.
        counts: whether bytes of activations are counted.
    """

    def __init__(
        self, module: nn.Module, parameters: dict[str, nn.Parameter], *, counts: bool = False
    ) -> None:
        self._module = module
        self._counts = counts
        there = (*module.parameters(), *module.buffers())
        self._saved = SavedStorages(there, lambda: len(self._units) - 1)
        self._trained = parameters
        self._names = {
            id(p): name for name, p in (*module.named_parameters(), *parameters.items())
        }
        self._seen: set[str] = set()
        self._is_first = True  # a survey may run a step again, whose units are known
        self._last: dict[str, int] = {}  # name -> unit of the last use but the first
        self._called: set[str] = set()
        self._units: list[tuple[list[str], list[str]]] = [([], [])]
        self._glue: set[str] = set()
        self._candidates: list[str] = []  # first calls since the last first use of a parameter
        self._calls: dict[str, tuple[int, int]] = {}  # path -> first and last unit of its calls
        self._buffers_before = {name: b.detach().clone() for name, b in module.named_buffers()}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Take notes while the body runs one training step."""
        ends = [
            before_calls(m, self._noter(path))
            for path, m in named_modules(self._module)
            if path and not isinstance(m, torch.jit.ScriptModule)
        ]
        try:
            saving = saved_tensors_hooks(self._note_saved, _given_back)
            self._counts &= torch.is_grad_enabled()  # else nothing is kept for a backward
            self._is_first = not self._seen
            counting = saving if self._counts and self._is_first else nullcontext()
            with counting, FunctionWatch(self._function):
                yield
        except RuntimeError as error:
            if self._counts and "saved tensor hooks" in str(error):
                raise _not_counted(error) from error
            raise
        finally:
            for end in ends:
                end()

    def profile(self) -> Profile:
        after = dict(self._module.named_buffers())
        last = len(self._units) - 1
        changed = {
            name: self._unit_span(name, last)
            for name, before in self._buffers_before.items()
            if name in after and not same(before, after[name])
        }
        units = tuple(self._unit(starts, used) for starts, used in self._units)
        rest = [name for name in self._names.values() if name not in self._seen]
        unused, resting = self._apart(rest)
        saved = self._saved_by_unit() if self._counts else ()
        return Profile(
            units=units, unused=unused, buffers=changed, resting=resting, saved=saved,
            last={name: min(k, last) for name, k in self._last.items()},
        )  # fmt: skip

    def _saved_by_unit(self) -> tuple[int, ...]:
        num_bytes = [0] * len(self._units)
        for storage in self._saved.found():
            num_bytes[storage.saves[0]] += storage.num_bytes
        return tuple(num_bytes)

    def _note_saved(self, x: Tensor) -> Tensor | _OfWeight:
        weight = x._base if x._is_view() else x
        if isinstance(weight, nn.Parameter):  # which may be there only while it is used
            return _OfWeight(weight, x.size(), x.stride(), int(x.storage_offset()))
        self._saved.save(x)
        return x.detach()  # an output of its own node would never be let go of

    def _unit(self, starts: list[str], used: list[str]) -> Unit:
        trained, frozen = self._apart(used)
        glue = tuple(n for n in used if n in self._glue)
        return Unit(starts=tuple(starts), parameters=trained, glue=glue, frozen=frozen)

    def _apart(self, names: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        trained = tuple(n for n in names if n in self._trained)
        return trained, tuple(n for n in names if n not in self._trained)

    def _unit_span(self, buffer: str, last: int) -> tuple[int, int]:
        # what glue code changes may change anywhere: from the first unit to the last
        first_call, last_call = self._calls.get(buffer.rpartition(".")[0], (0, last))
        return min(first_call, last), min(last_call, last)

    def _noter(self, path: str) -> Callable[[nn.Module], None]:
        def note_call(module: nn.Module) -> None:
            if path not in self._called:
                self._called.add(path)
                self._candidates.append(path)
            upcoming = self._upcoming()
            self._calls[path] = (self._calls.get(path, (upcoming, 0))[0], upcoming)
            for parameter in module.parameters(recurse=is_compiled(module)):
                self._note(parameter, glue=False)

        return note_call

    def _function(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        about = known(func)
        reads = not about.is_metadata and about.name != "grad.get"
        if reads and not moves_nothing(func, args, kwargs):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter):
                    self._note(leaf, glue=True)
        return func(*args, **kwargs)

    def _note(self, parameter: nn.Parameter, *, glue: bool) -> None:
        name = self._names.get(id(parameter))
        if name is None:
            return
        if name in self._seen:
            if self._is_first:
                self._last[name] = self._upcoming()
            return
        self._seen.add(name)
        if self._starts_unit():
            self._units.append((self._candidates, []))
        self._candidates = []
        self._units[-1][1].append(name)
        if glue:
            self._glue.add(name)

    def _upcoming(self) -> int:
        # a call behind a candidate belongs to the unit that will begin there
        return len(self._units) if self._starts_unit() else len(self._units) - 1

    def _starts_unit(self) -> bool:
        # a boundary before the very first use would leave stage 0 without parameters
        return bool(self._candidates) and bool(self._units[-1][1])


def _not_counted(error: RuntimeError) -> StepError:
    return StepError(
        f"what training_step keeps for its backward cannot be counted, which memory_limit_bytes "
        f"needs: {error}; allowed: training steps without torch.func and the like, in which torch "
        "lets nobody see that; leave memory_limit_bytes out"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Hold one stage.

    Args:
        start: path of the module whose first call begins the stage; "" for the step's beginning.
        glue: those, trained or frozen, that code outside their own module uses.
        buffers: names of the buffers that training changes (BatchNorm statistics) and that are
            first used here.
        buffers_final_after: stage after whose forward these buffers change no more in a step.
        frozen: names of the parameters that are first used here, but not trained, or not yet.
        activation_bytes: what a forward leaves for its backward. [None: nobody has counted]
        is_used_later: whether a later stage uses something of it, too.
    """

    start: str
    parameters: tuple[str, ...]
    glue: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    buffers_final_after: int = 0
    frozen: tuple[str, ...] = ()
    activation_bytes: int | None = None
    is_used_later: bool = False


@dataclass(frozen=True, slots=True)
class StageMap:
    """Hold the stages of a module, in order of execution.

    Args:
        untrained: names of those parameters of stages that get no gradients.
    """

    stages: tuple[Stage, ...]
    untrained: frozenset[str] = frozenset()

    @property
    def stage_of(self) -> dict[str, int]:
        return {name: j for j, stage in enumerate(self.stages) for name in stage.parameters}

    @property
    def starts(self) -> tuple[str, ...]:
        """Return the paths of the modules that begin stages 1, 2, ..."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def trained(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(n for n in stage.parameters if n not in self.untrained) for stage in self.stages
        )

    @property
    def relayed(self) -> tuple[int, ...]:
        """Return the stages that hold buffers which training changes."""
        return tuple(j for j, stage in enumerate(self.stages) if stage.buffers)

    def training(self, names: Iterable[str]) -> Self:
        """Return the map with some parameters trained that were frozen; begins stay as they are.

        Args:
            names: of the parameters; those that are trained already change nothing.

        Raises:
            PlanError: nobody knows the stage of one.
        """
        known = self.stage_of
        asked = {n: None for n in names if n not in known}
        frozen = {n for stage in self.stages for n in stage.frozen}
        unknown = next((n for n in asked if n not in frozen), None)
        if unknown is not None:
            raise PlanError(
                f"parameter {unknown!r} is trained now, but it was no part of the module when the "
                "stages were found; allowed: parameters that were there in the first step; "
                "freeze and unfreeze them, or call fit once per phase"
            )
        return type(self)(tuple(_thawed(stage, asked) for stage in self.stages))

    def relaying(self, buffers: Iterable[tuple[str, str]]) -> Self:
        """Return the map with more buffers that travel; nobody knows where they change last.

        Args:
            buffers: path of a module, and name of a buffer of it.
        """
        known = {name for stage in self.stages for name in stage.buffers}
        homes = {name.rpartition(".")[0]: j for name, j in self.stage_of.items()}
        new = [(homes.get(path, 0), name) for path, name in buffers if name not in known]
        last, stages = len(self.stages) - 1, list(self.stages)
        for j, name in new:
            others = stages[j].buffers
            stages[j] = replace(stages[j], buffers=(*others, name), buffers_final_after=last)
        return replace(self, stages=tuple(stages))

    def holding(self, names: Iterable[str], trained: Container[str]) -> Self:
        """Return the map with all parameters in stages, of which some are trained."""
        held = dict.fromkeys(names)
        untrained = frozenset(n for n in held if n not in trained)
        return replace(self.training(held), untrained=untrained)

    def as_data(self) -> list[dict[str, Any]]:
        return [asdict(stage) for stage in self.stages]

    @classmethod
    def from_data(cls, data: Sequence[Mapping[str, Any]]) -> Self:
        return cls(
            tuple(
                Stage(
                    start=d["start"],
                    parameters=tuple(d["parameters"]),
                    glue=tuple(d["glue"]),
                    buffers=tuple(d["buffers"]),
                    buffers_final_after=d["buffers_final_after"],
                    frozen=tuple(d.get("frozen", ())),  # of older checkpoints nobody knows
                    activation_bytes=d.get("activation_bytes"),
                    is_used_later=d.get("is_used_later", False),
                )
                for d in data
            )
        )


def make_stages(
    profile: Profile, num_bytes: Mapping[str, int], stages: int | Sequence[str]
) -> StageMap:
    """Group the units of a profile into stages.

    A number asks for the contiguous grouping whose largest stage has the fewest bytes (exact);
    a list of module paths says where stages 1, 2, ... begin.

    Args:
        profile: what the first step showed.
        num_bytes: bytes of each parameter, by name.
        stages: how many, or the paths that begin stages 1, 2, ...

    Returns:
        The map; parameters that the profile did not see used go to stage 0, which is always read
        before a step begins.

    Raises:
        PlanError: more stages than places to begin one, or a path where none can begin.
    """
    units = profile.units
    if isinstance(stages, int):
        begins = profile.begins
        if stages > len(begins):
            raise PlanError(
                f"stages={stages} were asked for, but the module has only {len(begins)} places "
                "where a stage with trained parameters can begin; "
                f"allowed: 1 to {len(begins)}; "
                f'lower it, or leave stages="auto"'
            )
        parts = zip(begins, [*begins[1:], len(units)], strict=True)
        names = ([n for unit in units[a:b] for n in unit.parameters] for a, b in parts)
        weights = [max(1, sum(num_bytes[n] for n in part)) for part in names]
        starts = [begins[k] for k in balance(weights, stages)]
        paths = ["", *(units[k].starts[0] for k in starts[1:])]
    else:
        starts = [0, *(_unit_at(units, path) for path in stages)]
        paths = ["", *stages]
        if sorted(set(starts)) != starts:
            raise PlanError(
                f"stages={list(stages)} do not begin one after the other; "
                f"allowed: {_places(units)}, in this order; reorder them"
            )
    return _group(profile, starts, paths)


def _unit_at(units: Sequence[Unit], path: str) -> int:
    for k, unit in enumerate(units):
        if path in unit.starts:
            return k
    raise PlanError(
        f"stages names {path!r}, where no stage can begin; allowed: {_places(units)}; "
        "name some of these, or give a number"
    )


def _places(units: Sequence[Unit]) -> str:
    return ", ".join("|".join(u.starts) for u in units[1:]) or "none: the module is one unit"


def _group(profile: Profile, starts: Sequence[int], paths: Sequence[str]) -> StageMap:
    units, made = profile.units, []
    for j, (a, b) in enumerate(zip(starts, [*starts[1:], len(units)], strict=True)):
        members = units[a:b]
        names = [n for unit in members for n in unit.parameters]
        frozen = [n for unit in members for n in unit.frozen]
        if j == 0:
            names += profile.unused
            frozen += profile.resting
        glue = tuple(n for unit in members for n in unit.glue)
        saved = sum(profile.saved[a:b]) if profile.saved else None
        made.append(
            Stage(
                start=paths[j], parameters=tuple(names), glue=glue, frozen=tuple(frozen),
                activation_bytes=saved,
                is_used_later=any(profile.last.get(n, 0) >= b for n in (*names, *frozen)),
            )
        )  # fmt: skip
    return StageMap(_with_buffers(made, profile.buffers, starts))


def _thawed(stage: Stage, names: Collection[str]) -> Stage:
    mine = tuple(n for n in stage.frozen if n in names)
    rest = tuple(n for n in stage.frozen if n not in names)
    return replace(stage, parameters=stage.parameters + mine, frozen=rest)


def _with_buffers(
    stages: Sequence[Stage], buffers: Mapping[str, tuple[int, int]], starts: Sequence[int]
) -> tuple[Stage, ...]:
    spans = {
        n: (bisect_right(starts, a) - 1, bisect_right(starts, b) - 1)
        for n, (a, b) in buffers.items()
    }
    made = []
    for j, stage in enumerate(stages):
        mine = tuple(name for name, (first, _) in spans.items() if first == j)
        final_after = max((spans[name][1] for name in mine), default=j)
        made.append(replace(stage, buffers=mine, buffers_final_after=final_after))
    return tuple(made)
