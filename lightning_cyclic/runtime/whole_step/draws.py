"""Draws of a whole step: the same numbers as where workers run single stages of it.

There (partial_step/run.py) a worker skips the modules of earlier stages, and with them what they
would have drawn. So each stage draws from a stream of its own, and code between modules has a
key for each of its draws. A whole step skips nothing, and only has to follow:

    first call of stage j    begin its stream                        a hook
    module with parameters   draws from the stream                   a hook stops the watch
    code between them        each draw has the key of its number     a FunctionWatch sees it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import nn

from lightning_cyclic.runtime.compiled import around_forwards, named_modules
from lightning_cyclic.runtime.randomness import Randomness, undisturbed
from lightning_cyclic.runtime.torch_functions import FunctionWatch, is_random


@final
class KeyedDraws:
    """Key what the training step of an unmodified module draws.

    Args:
        starts: paths of the modules that begin stages 1, 2, ...; none while they are not known.
    """

    def __init__(self, module: nn.Module, starts: Iterable[str], device: torch.device) -> None:
        self._device = device
        self._watch = _Watch()
        begins = {path: j for j, path in enumerate(starts, start=1)}
        split = {"", *(above for path in begins for above in _above(path))}
        self._ends = [
            self._hook(m, begins.get(path, 0))
            for path, m in named_modules(module)
            if path not in split and (path in begins or _has_parameters(m))
        ]

    @contextmanager
    def keyed(self, seed: int, t: int, i: int) -> Iterator[None]:
        """Run the body, which is micro-batch ``i`` of step ``t``; disturb no generator."""
        with undisturbed(self._device), self._watch.over(Randomness(seed, t, i, self._device)):
            yield

    def aside(self) -> AbstractContextManager[None]:
        """Run the body, in the middle of a step, as what does not belong to it."""
        return self._watch.aside

    def remove(self) -> None:
        for end in self._ends:
            end()

    def _hook(self, module: nn.Module, begins: int) -> Callable[[], None]:
        watch = self._watch  # not self: a module may be copied with its hooks

        def before(module: nn.Module) -> None:
            watch.enter(begins)

        # innermost: the hooks of users run where a module is skipped, too, and are no part of it
        return around_forwards(module, before, watch.leave)


@final
class _Watch:
    """See the torch functions of code between modules, and no others."""

    def __init__(self) -> None:
        self._functions = FunctionWatch(self._function)
        self._randomness: Randomness | None = None
        self._stage = 0
        self._depth = 0  # of calls of modules that are under way
        self._is_off = False
        self.aside = _Aside(self)

    @contextmanager
    def over(self, randomness: Randomness) -> Iterator[None]:
        self._randomness, self._stage, self._depth = randomness, 0, 0
        randomness.begin_region(0)
        randomness.begin_stage(0)
        try:
            with self._functions:
                yield
        finally:
            self._randomness = None

    def enter(self, begins: int) -> None:
        """Begin a module's call, with which a stage may begin."""
        if self._randomness is None:
            return
        if begins > self._stage:
            self._stage = begins
            self._randomness.begin_region(begins)
            self._randomness.begin_stage(begins)
        self._depth += 1
        if self._depth == 1:  # beneath a mode of the user's it stays, and looks away
            self._is_off = self._functions.step_aside()

    def leave(self) -> None:
        """End a module's call, also one that failed."""
        if self._randomness is None or self._depth == 0:  # failed before it began
            return
        self._depth -= 1
        if self._depth == 0 and self._is_off:
            self._functions.come_back()
            self._is_off = False

    def _function(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        randomness = self._randomness
        if self._depth == 0 and randomness is not None and is_random(func):
            with randomness.of_glue():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@final
class _Aside(AbstractContextManager[None]):
    """Let the watch look away."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.enter(0)

    def __exit__(self, *args: object) -> None:
        self._watch.leave()


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


def _has_parameters(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False  # takes no hooks; what it draws is of the stage under way
    return next(module.parameters(), None) is not None
