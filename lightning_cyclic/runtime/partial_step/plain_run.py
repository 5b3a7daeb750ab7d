"""The plain run: the user's step on the whole module at once, as one device runs it.

No stage is left out and nothing is pretended. What it has in common with a run of a stage are the
keys of random numbers, which change where a stage begins, so that both draw the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)

from lightning_cyclic.runtime.partial_step.call_router import CallRouter, Unit
from lightning_cyclic.runtime.partial_step.evidence import Notes
from lightning_cyclic.runtime.partial_step.ghosts import tensors_in
from lightning_cyclic.runtime.partial_step.watch import known
from lightning_cyclic.runtime.randomness import Randomness
from lightning_cyclic.runtime.snapshot import tensor_print
from lightning_cyclic.runtime.values.trees import tensors


@final
class PlainRun:
    """Run a step for one micro-batch.

    Args:
        router: of the module's calls.
        i: micro-batch.
        randomness: that of this step and micro-batch.
        notes: of what happens.
    """

    depth = 0
    region = 0
    is_plain = True

    def __init__(self, router: CallRouter, i: int, randomness: Randomness, notes: Notes) -> None:
        self.router = router
        self.target = router.num_stages - 1  # as a run that goes to the end of the step
        self.logs: list[tuple[str, Any, dict[str, Any]]] = []
        self._i = i
        self._randomness = randomness
        self._notes = notes

    def stage(self) -> int:
        """Return the stage whose code is under way."""
        return self.region

    def __call__(self, step: Callable[[], Any]) -> Any:
        """Run the step; return what it returned."""
        router, depth = self.router, _len_torch_function_stack()
        router.run = router.looking = self
        try:
            self._enter(0)
            router.watch.insert(depth)
            output = step()
            self._leave()
            return output
        finally:
            router.run = router.looking = None
            while _len_torch_function_stack() > depth:
                _pop_torch_function_stack()

    def call(self, unit: Unit, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call of a module with parameters, or of a metric."""
        self.reach(unit.path, unit.begins)
        if unit.is_split:
            return original(*args, **kwargs)
        given = [tensor_print(x) for x in tensors_in(args, kwargs)]
        router, self.depth = self.router, 1
        is_top = _get_function_stack_at(_len_torch_function_stack() - 1) is router.watch
        if is_top:
            _pop_torch_function_stack()
        router.looking = None
        try:
            result = original(*args, **kwargs)
        finally:
            router.looking, self.depth = self, 0
            if is_top:
                _push_on_torch_function_stack(router.watch)
        self._notes.call(self._i, self.region, unit.event, given, tensors(result))
        return result

    def function(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Answer a call of a torch function outside all units."""
        if not known(func).is_random:
            return func(*args, **kwargs)
        with self._randomness.of_glue():
            return func(*args, **kwargs)

    def reach(self, path: str, stage: int) -> None:
        """Begin a stage with the call of a module, unless it has begun."""
        if stage > self.region:
            self._leave()
            self._enter(stage)

    def _enter(self, region: int) -> None:
        self.region = region
        self._notes.begin(self._i, region)
        self._randomness.begin_region(region)
        self._randomness.begin_stage(region)

    def _leave(self) -> None:
        self._notes.end(self._i, self.region, self._randomness.num_draws)
