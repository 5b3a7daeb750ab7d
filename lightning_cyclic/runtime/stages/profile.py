"""Find in which order a training step first uses its parameters, and where stages may begin.

The first training step is run as it is, with a note taken whenever a module is called and
whenever a parameter is first used: by the module that owns it, or by glue code (seen by a
TorchFunctionMode). A stage may begin at the first call of a module. What lies between two such
calls and first uses parameters, trained or frozen, is a *unit*; stages are runs of units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_cyclic.runtime.compiled import before_calls, is_compiled, named_modules


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
    """

    units: tuple[Unit, ...]
    unused: tuple[str, ...]
    buffers: dict[str, tuple[int, int]]
    resting: tuple[str, ...] = ()

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


@final
class Recorder:
    """Record the order of first use while one training step runs.

    Args:
        parameters: name -> parameter, for those that are trained.
    """

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        self._module = module
        self._trained = parameters
        self._names = {
            id(p): name for name, p in (*module.named_parameters(), *parameters.items())
        }
        self._seen: set[str] = set()
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
            with _ParameterWatch(self._note_glue):
                yield
        finally:
            for end in ends:
                end()

    def profile(self) -> Profile:
        after = dict(self._module.named_buffers())
        last = len(self._units) - 1
        changed = {
            name: self._unit_span(name, last)
            for name, before in self._buffers_before.items()
            if name in after and not _same(before, after[name])
        }
        units = tuple(self._unit(starts, used) for starts, used in self._units)
        rest = [name for name in self._names.values() if name not in self._seen]
        unused, resting = self._apart(rest)
        return Profile(units=units, unused=unused, buffers=changed, resting=resting)

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
            # a call behind a candidate belongs to the unit that will begin there
            upcoming = len(self._units) if self._starts_unit() else len(self._units) - 1
            self._calls[path] = (self._calls.get(path, (upcoming, 0))[0], upcoming)
            for parameter in module.parameters(recurse=is_compiled(module)):
                self._note(parameter, glue=False)

        return note_call

    def _note_glue(self, parameter: nn.Parameter) -> None:
        self._note(parameter, glue=True)

    def _note(self, parameter: nn.Parameter, *, glue: bool) -> None:
        name = self._names.get(id(parameter))
        if name is None or name in self._seen:
            return
        self._seen.add(name)
        if self._starts_unit():
            self._units.append((self._candidates, []))
        self._candidates = []
        self._units[-1][1].append(name)
        if glue:
            self._glue.add(name)

    def _starts_unit(self) -> bool:
        # a boundary before the very first use would leave stage 0 without parameters
        return bool(self._candidates) and bool(self._units[-1][1])


@final
class _ParameterWatch(TorchFunctionMode):
    """Call back with every parameter that a torch function is given."""

    def __init__(self, note: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter):
                self._note(leaf)
        return func(*args, **(kwargs or {}))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.detach())
