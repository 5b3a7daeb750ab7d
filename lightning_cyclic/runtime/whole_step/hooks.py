"""What hooks notice: in which order stages run, and when autograd has completed gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan.actions import Action
from lightning_cyclic.runtime.absent import come_back, home_of, leave
from lightning_cyclic.runtime.compiled import before_calls, seen_as
from lightning_cyclic.runtime.gradient_store import refuse_sparse
from lightning_cyclic.runtime.stages.stage_map import Stage, StageMap

HandOver = Callable[[int, list[Tensor | None]], None]  # stage, its gradients


@final
class GradientCollector:
    """Hand over stages from the last to the first, whatever the order in which autograd ends.

    Stage 0 also holds the parameters that the first step did not use, so it is complete only
    when backward has ended; so is every stage of which a parameter got no gradient.

    Args:
        holders: those in whose ``grad`` these are, as soon as a parameter's is there.
        lasting: stages whose backward needs parameters of which it makes no gradients, also when
            it has made all.
        updated: names of parameters, by stage, that have new values once they are handed over:
            nobody may read these in the same backward. [they stay as they are]
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        holders: Sequence[Sequence[nn.Parameter]],
        hand_over: HandOver,
        worker: int,
        lasting: Collection[int] = (),
        updated: Sequence[Sequence[str]] = (),
    ) -> None:
        self._parameters, self._updated = parameters, updated
        self._holders = holders
        self._hand_over = hand_over
        self._worker = worker
        self._lasting = lasting
        self._counts = [0] * len(parameters)
        self._next = -1  # the stage to hand over next; those above it are gone
        self._collecting = False
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(self._counter(j))  # type: ignore[no-untyped-call]
            for j, ps in enumerate(parameters)
            for p in ps
            if p.requires_grad  # what was frozen since gets none
        ]
        self._trained = [sum(p.requires_grad for p in ps) for ps in parameters]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect from the backward in the body; afterwards every stage is handed over."""
        self._next = len(self._holders) - 1
        self._counts = [0] * len(self._holders)
        self._collecting = True
        try:
            yield
            while self._next >= 0:
                self._take_next()
        finally:
            self._collecting = False
            self._let_read()

    def _let_read(self) -> None:
        for p in (p for ps in self._parameters for p in ps if home_of(p) is self):
            come_back(p)

    def read(self, names: Sequence[str]) -> None:
        """Refuse that a backward reads weights which it has updated.

        Raises:
            StepError: with the name.
        """
        raise StepError(
            f"a hook, or code of your own, reads {names[0]!r} in the backward, when a worker with "
            "a limit of its memory has updated it already; allowed: weights of the same layers; "
            "read them in the forward, define on_after_backward in the module, by which all "
            "stages are updated behind it, or leave memory_limit_bytes out"
        )

    def read_gradient(self, name: str) -> None:
        """Have none, which is what is there."""

    @property
    def is_collecting(self) -> bool:
        """Say whether a backward is under way whose gradients are handed over."""
        return self._collecting

    def is_turn_of(self, j: int) -> bool:
        """Say whether all stages behind one have been handed over."""
        return self._next <= j

    def is_over(self, j: int) -> bool:
        return self._next < j

    def begin_stage(self, j: int) -> None:
        """Hand over the stages behind one whose backward begins: autograd has done with them."""
        while self._next > j:
            self._take_next()

    def remove(self) -> None:
        self._let_read()  # where a backward has failed
        for handle in self._handles:
            handle.remove()

    def _counter(self, j: int) -> Callable[[Tensor], None]:
        def count(parameter: Tensor) -> None:
            if not self._collecting:
                return
            if j > self._next:
                raise StepError(
                    f"stage {j} of rank {self._worker} got a gradient after its sum had been "
                    "sent; allowed: one backward that reaches each parameter once; do not call "
                    "backward inside training_step or backward hooks, and use "
                    "torch.utils.checkpoint with use_reentrant=False"
                )
            refuse_sparse(j, parameter.grad)
            self._counts[j] += 1
            while self._next > 0 and self._is_complete(self._next):
                self._take_next()

        return count

    def _is_complete(self, j: int) -> bool:
        is_followed = j not in self._lasting or any(self._counts[:j])
        return self._counts[j] == self._trained[j] and is_followed

    def _take_next(self) -> None:
        j, self._next = self._next, self._next - 1
        grads = [p.grad for p in self._holders[j]]
        for p in self._holders[j]:
            p.grad = None
        self._hand_over(j, grads)
        if self._updated:
            for name, p in zip(self._updated[j], self._parameters[j], strict=True):
                leave(p, name, self)


@final
class Entrances:
    """Call ``enter(j)`` before the first module of each stage runs in a step.

    The module that begins a stage has a hook, and so has every module that owns parameters of
    it: where a step skips the first one (a dropped layer), the next one enters.

    Args:
        enter: does what the program has before F(.,j), and for stages skipped before it.
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
        self._open, self._order = True, []

    def close(self, t: int, entered: int) -> None:
        """End a step's forward and check what it did.

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


@final
class StepHooks:
    """Tell the engine when the worker comes to what the user's step computes by itself."""

    def __init__(self, enter: Callable[[Action], None]) -> None:
        self.forward = enter

    def backward(self, a: Action) -> None:
        """Have been run by autograd."""

    def update(self, a: Action) -> None:
        """Have been made, with all that are due at the same place."""

    def tell(self, a: Action) -> None:
        """Have been told by the step itself."""
