"""Verification: the first steps of a fit are compared, bit by bit, with the user's own step.

    rank 0        runs the plain step, micro-batch by micro-batch, before the step; undoes it
    all workers   run the step in stages, and note what they do
    all workers   send what they have noted, as digests; rank 0 compares; all hear of it

Nothing has been trained by then. Weights are those of the step on all workers, whatever the weight
rule, as there is one version of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.plan.roles import source_of_sum
from lightning_cyclic.runtime.bits import kept
from lightning_cyclic.runtime.codecs.activations import AbstractCrossingCodec
from lightning_cyclic.runtime.codecs.coded import Codes
from lightning_cyclic.runtime.gradient_store import SumDtypes, takes
from lightning_cyclic.runtime.partial_step.call_router import CallRouter, Unit
from lightning_cyclic.runtime.partial_step.evidence import (
    NOTHING,
    Evidence,
    Item,
    Notes,
    state_evidence,
)
from lightning_cyclic.runtime.partial_step.ghosts import tensors_in
from lightning_cyclic.runtime.partial_step.losses import loss_of
from lightning_cyclic.runtime.partial_step.packets import Outcome
from lightning_cyclic.runtime.partial_step.plain_crossings import PlainCrossings
from lightning_cyclic.runtime.randomness import Randomness, undisturbed
from lightning_cyclic.runtime.snapshot import Print, Snapshot, print_of, tensor_print
from lightning_cyclic.runtime.torch_functions import known, leave_modes, num_modes
from lightning_cyclic.runtime.values.trees import map_tensors, tensors
from lightning_cyclic.runtime.weight_forms import WeightForms


class Part(NamedTuple):
    """Hold one micro-batch of the plain step.

    Args:
        weight: its share of the step's loss, as a function of a tensor of ones.
        size: of how many samples it is.
    """

    i: int
    batch: Any
    weight: Callable[[Tensor], Tensor]
    size: int


class Plain(NamedTuple):
    """Hold what the plain step did."""

    evidence: Evidence
    expected: Mapping[str, Print]
    again: Callable[[], Plain]


@final
class PlainStep:
    """Run the plain step on one process, and leave the module as it was.

    Args:
        stage_of: name -> stage, of parameters and buffers.
        sums: dtypes of sums of gradients.
        codes: of gradients, if a codec changes them; this changes nothing of what they keep.
        activations: what changes those that cross from stage to stage, if anything does.
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        module: nn.Module,
        router: CallRouter,
        stage_of: Mapping[str, int],
        device: torch.device,
        seed: int,
        held: Mapping[str, Any],
        not_state: frozenset[str],
        forms: WeightForms,
        sums: SumDtypes,
        codes: Codes | None,
        activations: AbstractCrossingCodec | None,
        written: frozenset[str],
    ) -> None:
        self._module = module
        self._router = router
        self._stage_of = stage_of
        self._device = device
        self._seed = seed
        self._held = held
        self._not_state = not_state
        self._forms = forms
        self._dtypes = sums
        self._codes = self._codes_before = codes
        self._activations = activations
        stages = [stage_of.get(n, 0) for n, _ in module.named_parameters()]
        weights = list(zip(stages, module.parameters(), strict=True))
        self._holders = [*weights, *((j, forms.trained(p)) for j, p in weights)]
        # what the step does to weights, where stages allow that it does anything, is undone
        self._written = [p for n, p in module.named_parameters() if n in written]

    def run(
        self, plan: Plan, t: int, parts: Sequence[Part], call: Callable[[Any], Any],
        expect: Callable[[list[Outcome]], Mapping[str, Print]],
    ) -> Plain:  # fmt: skip
        """Run the step for each micro-batch in order; leave everything as it was."""
        before = Snapshot(self._module, self._not_state)
        self._codes_before = self._codes and self._codes.copied()
        parts = [part._replace(batch=map_tensors(torch.clone, part.batch)) for part in parts]
        evidence, expected = self._run(before, plan, t, parts, call, expect)

        def again() -> Plain:
            now = Snapshot(self._module, self._not_state)
            before.restore()
            try:
                return Plain(*self._run(before, plan, t, parts, call, expect), again)
            finally:
                now.restore()

        return Plain(evidence, expected, again)

    def _run(
        self, before: Snapshot, plan: Plan, t: int, parts: Sequence[Part],
        call: Callable[[Any], Any], expect: Callable[[list[Outcome]], Mapping[str, Print]],
    ) -> tuple[Evidence, Mapping[str, Print]]:  # fmt: skip
        try:
            return self._run_parts(plan, t, parts, call, expect)
        except Exception as error:  # which the step in stages will raise, too, with its place
            return {Item("raised", -1, -1, 0, type(error).__name__): print_of(str(error))}, {}
        finally:
            before.restore()

    def _run_parts(
        self, plan: Plan, t: int, parts: Sequence[Part], call: Callable[[Any], Any],
        expect: Callable[[list[Outcome]], Mapping[str, Print]],
    ) -> tuple[Evidence, Mapping[str, Print]]:  # fmt: skip
        notes = Notes(self._held, self._device)
        undone = undisturbed(self._device, self._held)
        with undone, self._router.open(), self._gradients_apart(), kept(self._written):
            outcomes: list[Outcome] = []
            codes = self._codes_before and self._codes_before.copied()
            coded = None if codes is None else self._coding(codes)
            sums = PlainSums(plan, t, self._holders, self._dtypes, coded)
            for part in parts:
                if codes is not None:
                    codes.begin(part.i)
                with sums.adding(part.i):
                    outcomes.append(self._run_part(t, part, call, notes))
                notes.outcome(part.i, outcomes[-1])
            evidence = notes.evidence() | self._gradient_evidence(sums.totals())
            evidence |= state_evidence(self._module, self._not_state, self._stage_of)
            return evidence, expect(outcomes)

    def _coding(self, codes: Codes) -> Coding:
        """Return what makes of a gradient of a holder what its owner would have of a worker."""
        names = [name for name, _ in self._module.named_parameters()]
        trained = {id(p) for _, p in self._holders[: len(names)]}

        def coded(i: int, k: int, grad: Tensor) -> Tensor:
            is_again = k >= len(names) and id(self._holders[k][1]) in trained
            return grad if is_again else codes.through(i, names[k % len(names)], grad)

        return coded

    def _run_part(self, t: int, part: Part, call: Callable[[Any], Any], notes: Notes) -> Outcome:
        randomness = Randomness(self._seed, t, part.i, self._device, self._held)
        codec = self._activations
        crossings = None if codec is None else PlainCrossings(codec, part.size)
        run = PlainRun(self._router, part.i, randomness, notes, crossings)
        output = run(partial(call, map_tensors(torch.clone, part.batch)))
        if output is not None:
            loss = loss_of(output, t)
            if loss.requires_grad:
                torch.autograd.backward(loss, part.weight(torch.ones_like(loss)))
        logs = [(name, map_tensors(Tensor.detach, value), kw) for name, value, kw in run.logs]
        return Outcome(map_tensors(Tensor.detach, output), logs, [])

    @contextmanager
    def _gradients_apart(self) -> Iterator[None]:
        """Let parameters have their own gradients again behind the body."""
        before = [(p, p.grad) for _, p in self._holders]
        try:
            yield
        finally:
            for p, grad in before:
                p.grad = grad

    def _gradient_evidence(self, totals: Sequence[Tensor | None]) -> Evidence:
        found: Evidence = {}
        num = len(totals) // 2
        named = enumerate(self._module.named_parameters())
        for (k, (name, p)), (j, _) in zip(named, self._holders, strict=False):
            # of what is compressed, the first has none where this worker updates it
            weight, grad, trained = totals[k], totals[num + k], self._forms.trained(p)
            if weight is not None and (trained is p or grad is None):
                grad = self._forms.compress(p, weight)
            if grad is not None and not takes(trained, grad):
                grad = grad.to(trained.dtype)
            item = Item("gradient", -1, j, 0, name)
            found[item] = NOTHING if grad is None else tensor_print(grad)
        return found


Coding = Callable[[int, int, Tensor], Tensor]  # (micro-batch, number of a holder, gradient)


@final
class PlainSums:
    """Add gradients of micro-batches as workers would: each its own, and to what comes.

    Args:
        coded: what a codec makes of the gradient of a micro-batch. [nothing does]
    """

    def __init__(
        self, plan: Plan, t: int, holders: Sequence[tuple[int, nn.Parameter]], dtypes: SumDtypes,
        coded: Coding | None = None,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._t = t
        self._holders = holders
        self._dtypes = dtypes
        self._coded = coded
        self._sums: dict[tuple[int, int], Tensor | None] = {}  # by worker and holder

    @contextmanager
    def adding(self, i: int) -> Iterator[None]:
        """Let the body, the backward of a micro-batch, add to the sums."""
        workers = [self._plan.worker_of(i, j, self._t) for j, _ in self._holders]
        aside: dict[int, Tensor] = {}
        for k, (_, p) in enumerate(self._holders):
            grad = self._sums.get((workers[k], k))
            if grad is not None and (self._coded is not None or not takes(p, grad)):
                aside[k], grad = grad, None
            p.grad = grad
        yield
        for k, (j, p) in enumerate(self._holders):
            own = p.grad
            if own is not None and self._coded is not None:
                own = self._coded(i, k, own)
            w, grad = workers[k], self._added(aside.get(k), own)
            before = source_of_sum(self._plan, self._action(i, j))
            if before is not None:
                came = self._sums.pop((before, k), None)
                sent = None if came is None else self._dtypes.narrowed(came)
                grad = self._added(sent, grad)
            self._sums[w, k] = grad

    def totals(self) -> list[Tensor | None]:
        """Return the sums of the last micro-batch, of the holders, where owners have them."""
        found: list[Tensor | None] = []
        last = self._plan.num_microbatches - 1
        for k, (j, _) in enumerate(self._holders):
            w = self._plan.worker_of(last, j, self._t)
            grad = self._sums.get((w, k))
            travels = grad is not None and self._plan.owner(j) != w
            found.append(self._dtypes.narrowed(grad) if travels and grad is not None else grad)
        return found

    def _action(self, i: int, j: int) -> Action:
        return Action(kind=Kind.B, t=self._t, i=i, j=j)

    def _added(self, total: Tensor | None, own: Tensor | None) -> Tensor | None:
        if total is None or own is None:
            return own if total is None else total
        dtype = self._dtypes.of_addition(total.dtype, own.dtype)
        return total.to(dtype) + own


@final
class PlainRun:
    """Run a step for one micro-batch.

    Args:
        crossings: what regions have of earlier ones. [what these have]
    """

    depth = 0
    region = 0
    is_plain = True

    def __init__(
        self, router: CallRouter, i: int, randomness: Randomness, notes: Notes,
        crossings: PlainCrossings | None = None,
    ) -> None:  # fmt: skip
        self.router = router
        self.target = router.num_stages - 1  # as a run that goes to the end of the step
        self.logs: list[tuple[str, Any, dict[str, Any]]] = []
        self._i = i
        self._randomness = randomness
        self._notes = notes
        self._crossings = crossings

    def __call__(self, step: Callable[[], Any]) -> Any:
        router, depth = self.router, num_modes()
        router.begin(self)
        try:
            self._enter(0)
            router.watch.insert(depth)
            output = step()
            self._leave()
            self.logs = [(name, self._crossed(x), more) for name, x, more in self.logs]
            return self._crossed(output)
        finally:
            router.end()
            leave_modes(depth)

    def call(self, unit: Unit, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.reach(unit.path, unit.begins)
        if unit.is_split:
            return original(*args, **kwargs)
        args, kwargs = self._crossed((args, kwargs))
        given = [tensor_print(x) for x in tensors_in(args, kwargs)]
        router, self.depth = self.router, 1
        is_aside = router.watch.step_aside()
        router.look(None)
        try:
            result = original(*args, **kwargs)
        finally:
            router.look(self)
            self.depth = 0
            if is_aside:
                router.watch.come_back()
        self._notes.call(self._i, self.region, unit.event, given, tensors(result))
        self._note_made(args, kwargs, result)
        return result

    def function(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        about = known(func)
        if about.is_metadata:
            return func(*args, **kwargs)
        args, kwargs = self._crossed((args, kwargs))
        with self._randomness.of_glue() if about.is_random else nullcontext():
            result = func(*args, **kwargs)
        self._note_made(args, kwargs, result)
        return result

    def _crossed(self, value: Any) -> Any:
        """Return a value as the stage that is under way would have it."""
        return value if self._crossings is None else self._crossings.at(self.region, value)

    def _note_made(self, *values: Any) -> None:
        if self._crossings is not None:  # also what a call has changed: it may have gradients now
            self._crossings.note(values, self.region)

    def reach(self, path: str, stage: int) -> None:
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
