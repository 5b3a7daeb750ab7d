"""The call router: the calls of an unmodified module, so that its step can be run by stages.

While the router is open, calls of modules that have parameters pass through it, so that a run may
skip them or end at one. Nothing of the module's code or class changes, and behind the opening it
is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.compiled import IN_PLACE, is_compiled_in_place, named_modules
from lightning_cyclic.runtime.partial_step.ghosts import Ghost
from lightning_cyclic.runtime.partial_step.tape import MARK, OWNED
from lightning_cyclic.runtime.plain_copies import ours
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.stages.evidence import is_inside, is_metric
from lightning_cyclic.runtime.torch_functions import FunctionWatch

_CALL = "forward"  # inside hooks, which run whether the forward is skipped or not
_WITH_HOOKS = "_call_impl"


class Follower(Protocol):
    """Answer calls of the modules of a stage that is run for real."""

    def following(self) -> AbstractContextManager[None]: ...

    def call(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


class Method(NamedTuple):
    """Hold a method that is replaced on a module while the router is open."""

    owner: nn.Module
    name: str
    routed: Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Say what a call that passes through a router is of.

    Args:
        path: of a module, or of a metric's method.
        event: name of the event that a call is.
        begins: the stage that begins with it; 0 for none.
        stages: in which it may be called, since its parameters belong to them, or the buffers
            that it changes; None for any.
        beside: name of the parameter with which those went that were not used when the stages
            were found; "": all were used.
    """

    path: str
    event: str
    begins: int
    is_split: bool
    stages: tuple[int, ...] | None
    beside: str


class Listener(Protocol):
    """Be the run of a step: of a stage (run.py), or of all of it (plain_step.py)."""

    is_plain: bool  # without ghosts
    target: int  # the stage with which it ends
    depth: int  # above zero within a unit
    logs: list[tuple[str, Any, dict[str, Any]]]  # name, value and arguments, of what was logged

    def reach(self, path: str, stage: int) -> None:
        """Begin a stage with the call of a module, unless it has begun."""

    def call(self, unit: Unit, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call of a module with parameters, or of a metric."""

    def function(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Answer a call of a torch function outside all units."""


@final
class CallRouter:
    """Route a module's calls to the run that is under way."""

    def __init__(self, module: nn.Module, cuts: Cuts, device: torch.device) -> None:
        self.module = module
        self.cuts = cuts
        self.device = device
        self.run: Listener | None = None  # that is under way
        # the same, while it looks at calls: outside units
        self.looking: Listener | None = None
        self._follower: Follower | None = None
        self.watch = FunctionWatch()
        self.num_stages = len(cuts.starts) + 1
        self._begins = {path: j for j, path in enumerate(cuts.starts, start=1)}
        self._stateful = dict.fromkeys(cuts.stateful)
        self._exposed = sorted(cuts.exposed)
        self._stages_of_unit = _stages_of_units(module, cuts)
        self._units: set[str] = set()
        self._set_by_hooks: dict[int, dict[str, Tensor]] = {}  # module -> what is real of it
        self._methods = list(self._route())
        self._own = self._own_methods()

    def begin(self, run: Listener) -> None:
        """Let a run answer calls and torch functions."""
        self.run = run
        self.look(run)

    def end(self) -> None:
        self.run = None
        self.look(None)

    @contextmanager
    def followed(self, follower: Follower) -> Iterator[None]:
        """Let calls of modules within a run's own stage be followed."""
        self._follower = follower
        try:
            with follower.following():
                yield
        finally:
            self._follower = None

    def called(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call what a module does."""
        follower = self._follower
        if follower is None:
            return original(*args, **kwargs)
        return follower.call(path, original, args, kwargs)

    def look(self, run: Listener | None) -> None:
        """Let the run look at what is called from here on, or nobody."""
        self.looking = run
        self.watch.hear = None if run is None else run.function

    @contextmanager
    def open(self) -> Iterator[None]:
        if self._own_methods() != self._own:  # somebody has replaced one meanwhile
            self._methods = list(self._route())
            self._own = self._own_methods()
        for owner, name, routed in self._methods:
            owner.__dict__[name] = routed
        exposed = list(map(self.module.get_buffer, self._exposed))
        for x in exposed:
            setattr(x, MARK, (OWNED, None))
        try:
            yield
        finally:
            for x in exposed:
                delattr(x, MARK)
            for (owner, name, _), method in zip(self._methods, self._own, strict=True):
                if method is None:
                    owner.__dict__.pop(name, None)
                else:
                    owner.__dict__[name] = method

    def still_buffers(self, *, of_units: bool = False) -> dict[str, Tensor]:
        """Return the buffers outside of units that the step was not seen to change, by name.

        Args:
            of_units: those of units instead, which the workers of their stage alone call.
        """
        shut = {path for path in self._units if path not in self.cuts.split}
        return {
            name: x
            for name, x in self.module.named_buffers()
            if name not in self.cuts.changed and is_inside(name, shut) is of_units
        }

    def _own_methods(self) -> list[Any]:
        """Return, for each method, what its module has by that name beside its class."""
        return [owner.__dict__.get(name) for owner, name, _ in self._methods]

    def _route(self) -> Iterator[Method]:
        for path, m in named_modules(self.module):
            if self.num_stages > 1:
                _refuse_backward_hooks(path, m)
            has_parameters = next(m.parameters(), None) is not None
            metric = is_metric(m)
            is_unit = has_parameters or metric or path in self._begins | self._stateful
            if not (path and is_unit):
                continue
            self._units.add(path)
            if isinstance(m, torch.jit.ScriptModule):
                raise ConfigurationError(
                    f"{path!r} is a TorchScript module, whose calls cannot be followed; allowed: "
                    "modules of Python code; use the module that it was scripted from"
                )
            name = IN_PLACE if is_compiled_in_place(m) else _CALL
            if path in self._begins and name == _CALL:
                begin = self._beginning(path, m._call_impl)
                own, follows = vars(m).get(_WITH_HOOKS), lambda: self.looking is not None
                yield Method(m, _WITH_HOOKS, ours(begin, own, follows))
            yield self._method(m, name, path)
            for name in ("update", "compute") if metric else ():
                yield self._method(m, name, f"{path}.{name}")

    def _method(self, m: nn.Module, name: str, path: str) -> Method:
        routed = self._routed(path, getattr(m, name), m)
        if m._forward_pre_hooks:
            self._without_ghosts(m)
        return Method(m, name, ours(routed, vars(m).get(name), lambda: self.looking is not None))

    def _beginning(self, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Let a stage begin before the hooks of its first module, which may make its weights."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.looking is not None:
                self.looking.reach(path, self._begins[path])
            return original(*args, **kwargs)

        return call

    def _without_ghosts(self, m: nn.Module) -> None:
        """Let what forward pre-hooks set, as torch.nn.utils.prune does, be what it was last.

        They run where the forward is skipped, too, and make ghosts there.
        """
        real = self._set_by_hooks.setdefault(id(m), {})
        for name, x in list(vars(m).items()):
            if type(x) is not Ghost:
                if isinstance(x, Tensor):
                    real[name] = x
            elif name in real:
                vars(m)[name] = real[name]
            else:
                del vars(m)[name]

    def _routed(self, path: str, original: Callable[..., Any], m: nn.Module) -> Callable[..., Any]:
        unit = Unit(
            path=path,
            event=f"{path}()",
            begins=self._begins.get(path, 0),
            is_split=path in self.cuts.split,
            stages=self._stages_of_unit.get(path),
            beside=_beside(path, self.cuts),
        )

        def call(*args: Any, **kwargs: Any) -> Any:
            run = self.looking
            if run is None:
                return self.called(path, original, args, kwargs)
            if m._forward_pre_hooks and not run.is_plain:
                self._without_ghosts(m)
            return run.call(unit, original, args, kwargs)

        return call


def _refuse_backward_hooks(path: str, m: nn.Module) -> None:
    """Refuse hooks on the gradients of a module's inputs, which may lie in another stage.

    Raises:
        ConfigurationError: with the module.
    """
    if m._backward_hooks or m._backward_pre_hooks:
        raise ConfigurationError(
            f"{path or 'the module'!r} has a backward hook (register_full_backward_hook), which "
            "torch sets up around its call, also on ranks that leave the call out; allowed: hooks "
            "of parameters and tensors; use tensor.register_hook within its forward, or a "
            "strategy whose ranks run whole steps, such as 'cyclic_dp'"
        )


def _beside(path: str, cuts: Cuts) -> str:
    """Return the parameter with which those of a module went; "" if any of them was used."""
    all_names = (n for names in cuts.parameters for n in names) if cuts.unused else ()
    names = [n for n in all_names if n.startswith(f"{path}.")]
    return cuts.unused[names[0]] if names and cuts.unused.keys() >= {*names} else ""


def _stages_of_units(module: nn.Module, cuts: Cuts) -> dict[str, tuple[int, ...]]:
    homes = {name: {j} for j, names in enumerate(cuts.parameters) for name in names}
    for name, stages in cuts.tied.items():
        homes[name] = set(stages)
    by_id = {id(p): homes[name] for name, p in module.named_parameters() if name in homes}
    everywhere = frozenset(range(len(cuts.starts) + 1))
    found: dict[str, tuple[int, ...]] = {}
    for path, m in module.named_modules():
        common = everywhere
        for p in m.parameters():
            common &= by_id.get(id(p), everywhere)
        found[path] = tuple(sorted(common))
    stage_of = cuts.changing
    for path in cuts.stateful:
        own = {j for n, j in stage_of.items() if n.startswith(f"{path}.")}
        found[path] = tuple(sorted(own)) or found[path]
    return found
