"""Entrances: notice in which order an unmodified module runs its stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.compiled import before_calls, seen_as
from lightning_cyclic.runtime.stages.stage_map import Stage, StageMap


@final
class Entrances:
    """Call ``enter(j)`` before the first module of each stage runs in a step.

    The module that begins a stage has a hook, and so has every module that owns parameters of
    it: where a step skips the first one (a dropped layer), the next one enters.

    Args:
        module: the whole module.
        stages: its stages.
        enter: does what the program has before F(.,j), and for stages skipped before it.
        worker: this worker, for messages.
        enter_again: called instead where a module runs behind the forward, in a backward that
            runs it again. [nothing is to be done]
    """

    def __init__(
        self,
        module: nn.Module,
        stages: StageMap,
        enter: Callable[[int], None],
        worker: int,
        enter_again: Callable[[int], None] | None = None,
    ) -> None:
        self._stages = stages
        self._enter = enter
        self._enter_again = enter_again
        self._worker = worker
        self._open = False
        self._order: list[int] = []
        self._ends: list[Callable[[], None]] = []
        first = 1 if enter_again is None else 0  # whose forward begins with the step's
        for j, stage in enumerate(stages.stages[first:], start=first):
            self._ends += self._hook(module, j, stage)

    def open(self) -> None:
        """Begin to notice: a step's forward begins."""
        self._open, self._order = True, []

    def close(self, t: int, entered: int) -> None:
        """End a step's forward and check what it did.

        Args:
            t: the step, for messages.
            entered: the last stage that was entered.

        Raises:
            StepError: the stages ran in another order than in the profiled step, or parameters
                used by glue code may have been read in the wrong version.
        """
        self._open = False
        for j in range(entered + 1, len(self._stages.stages)):
            if self._glue_of(j):
                raise self._glue_error(t, j)
        first = list(dict.fromkeys(self._order))
        if first != sorted(first):
            raise self._order_error(t, first)

    def remove(self) -> None:
        """Take the hooks off the module."""
        for end in self._ends:
            end()

    def _hook(self, module: nn.Module, j: int, stage: Stage) -> list[Callable[[], None]]:
        owners = (name.rpartition(".")[0] for name in stage.parameters)
        paths = dict.fromkeys(seen_as(module, path) for path in (stage.start, *owners) if path)

        def enter(_: nn.Module) -> None:
            if self._open:
                self._enter(j)
                self._order.append(j)
            elif self._enter_again is not None:
                self._enter_again(j)

        return [before_calls(module.get_submodule(path), enter) for path in paths]

    def _glue_of(self, j: int) -> list[str]:
        """Return the trained parameters of a stage that code outside their module uses."""
        stage = self._stages.stages[j]
        return [n for n in stage.glue if n in stage.parameters]

    def _glue_error(self, t: int, j: int) -> StepError:
        stage = self._stages.stages[j]
        return StepError(
            f"step {t} of rank {self._worker} called no module of stage {j}, but "
            f"{', '.join(self._glue_of(j))} of that stage is used by code outside its module, "
            f"perhaps in the wrong version; allowed: calling {stage.start!r} in every step; or "
            'put the boundary elsewhere, stages=["module.path", ...]'
        )

    def _order_error(self, t: int, first: list[int]) -> StepError:
        late = next(b for a, b in zip(first, first[1:], strict=False) if b < a)
        return StepError(
            f"step {t} of rank {self._worker} ran its stages in the order {first}, stage {late} "
            f"({self._stages.stages[late].start!r}) too late; allowed: the order of the first "
            "training step; cut only where the order is always the same, "
            'stages=["module.path", ...], or use stages=1'
        )
