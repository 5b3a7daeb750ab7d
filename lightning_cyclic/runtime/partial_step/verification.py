"""Verification: the first steps of a fit are compared, bit by bit, with the user's own step.

    rank 0        runs the plain step, micro-batch by micro-batch, before the step; undoes it
    all workers   run the step in stages, and note what they do
    all workers   send what they have noted, as digests; rank 0 compares; all hear of it

Nothing has been trained by then. Weights are those of the step on all workers, whatever the weight
rule, as there is one version of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.plan.passes.sums import source_of_sum
from lightning_cyclic.runtime.bits import unseen
from lightning_cyclic.runtime.gradient_store import takes
from lightning_cyclic.runtime.partial_step.call_router import CallRouter
from lightning_cyclic.runtime.partial_step.evidence import NOTHING, Evidence, Item, Notes
from lightning_cyclic.runtime.partial_step.losses import loss_of
from lightning_cyclic.runtime.partial_step.plain_run import PlainRun
from lightning_cyclic.runtime.partial_step.stage_step import Outcome
from lightning_cyclic.runtime.randomness import Randomness, undisturbed
from lightning_cyclic.runtime.snapshot import Print, Snapshot, print_of, prints, tensor_print
from lightning_cyclic.runtime.sum_dtypes import SumDtypes
from lightning_cyclic.runtime.values.trees import map_tensors
from lightning_cyclic.runtime.weight_forms import WeightForms

MOST_KINDS = 8  # of batches that look otherwise than those before, that are compared
_MOST_SHOWN = 2


class Part(NamedTuple):
    """Hold one micro-batch of the plain step.

    Args:
        i: its number among those of all replicas.
        batch: what the step is given.
        weight: its share of the step's loss, as a function of a tensor of ones.
    """

    i: int
    batch: Any
    weight: Callable[[Tensor], Tensor]


class Plain(NamedTuple):
    """Hold what the plain step did.

    Args:
        evidence: of it.
        expected: what the caller made of its outcomes, by name.
        again: runs it once more.
    """

    evidence: Evidence
    expected: Mapping[str, Print]
    again: Callable[[], Plain]


@final
class PlainStep:
    """Run the plain step on one process, and leave the module as it was.

    Args:
        module: the whole module.
        router: of its calls.
        stage_of: name -> stage, of parameters and buffers.
        device: of this worker.
        seed: of the randomness.
        held: generators that the module keeps, by name.
        not_state: attributes of the module that are not the user's.
        forms: of weights.
        sums: dtypes of sums of gradients.
        written: names of parameters that the step itself may change.
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
        stages = [stage_of.get(n, 0) for n, _ in module.named_parameters()]
        weights = list(zip(stages, module.parameters(), strict=True))
        self._holders = [*weights, *((j, forms.trained(p)) for j, p in weights)]
        self._written = [p for n, p in module.named_parameters() if n in written]

    def run(
        self, plan: Plan, t: int, parts: Sequence[Part], call: Callable[[Any], Any],
        expect: Callable[[list[Outcome]], Mapping[str, Print]],
    ) -> Plain:  # fmt: skip
        """Run the step for each micro-batch in order; leave everything as it was.

        Args:
            plan: in whose order gradients are added.
            t: number of the step.
            parts: of its batch.
            call: runs the user's step on one of them.
            expect: makes of their outcomes what all workers are to be told.
        """
        before = Snapshot(self._module, self._not_state)
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
        with undone, self._router.open(), self._gradients_apart(), self._weights_kept():
            outcomes: list[Outcome] = []
            sums = PlainSums(plan, t, self._holders, self._dtypes)
            for part in parts:
                with sums.adding(part.i):
                    outcomes.append(self._run_part(t, part, call, notes))
                notes.outcome(part.i, outcomes[-1])
            evidence = notes.evidence() | self._gradient_evidence(sums.totals())
            evidence |= state_evidence(self._module, self._not_state, self._stage_of)
            return evidence, expect(outcomes)

    def _run_part(self, t: int, part: Part, call: Callable[[Any], Any], notes: Notes) -> Outcome:
        randomness = Randomness(self._seed, t, part.i, self._device, self._held)
        run = PlainRun(self._router, part.i, randomness, notes)
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

    @contextmanager
    def _weights_kept(self) -> Iterator[None]:
        """Undo what the step does to weights, where stages allow that it does anything."""
        before = [p.detach().clone() for p in self._written]
        try:
            yield
        finally:
            with torch.no_grad(), unseen(self._written):
                for p, x in zip(self._written, before, strict=True):
                    p.copy_(x)

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


@final
class PlainSums:
    """Add gradients of micro-batches as workers would: each its own, and to what comes.

    Args:
        plan: says which worker runs what, and where sums go.
        t: number of the step.
        holders: stages, and parameters of them.
        dtypes: of sums.
    """

    def __init__(
        self, plan: Plan, t: int, holders: Sequence[tuple[int, nn.Parameter]], dtypes: SumDtypes
    ) -> None:
        self._plan = plan
        self._t = t
        self._holders = holders
        self._dtypes = dtypes
        self._sums: dict[tuple[int, int], Tensor | None] = {}  # by worker and holder

    @contextmanager
    def adding(self, i: int) -> Iterator[None]:
        """Let the body, the backward of a micro-batch, add to the sums."""
        workers = [self._plan.worker_of(i, j, self._t) for j, _ in self._holders]
        aside: dict[int, Tensor] = {}
        for k, (_, p) in enumerate(self._holders):
            grad = self._sums.get((workers[k], k))
            if grad is not None and not takes(p, grad):
                aside[k], grad = grad, None
            p.grad = grad
        yield
        for k, (j, p) in enumerate(self._holders):
            w, grad = workers[k], self._added(aside.get(k), p.grad)
            before = source_of_sum(self._plan, self._action(i, j), w)
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


# ---------------------------------------------------------------------- what is noted of a step


def gradient_evidence(j: int, names: Sequence[str], grads: Sequence[Tensor | None]) -> Evidence:
    """Return the sums of gradients of a stage.

    Args:
        j: the stage.
        names: of its parameters.
        grads: of these.
    """
    return {
        Item("gradient", -1, j, 0, name): NOTHING if grad is None else tensor_print(grad)
        for name, grad in zip(names, grads, strict=True)
    }


def state_evidence(
    module: nn.Module, not_state: frozenset[str], stage_of: Mapping[str, int]
) -> Evidence:
    """Return what the module keeps beside its weights.

    Generators of random numbers are compared where stages end (Notes.end).
    """
    buffers = {name for name, _ in module.named_buffers()}
    return {
        Item(
            "buffer" if name in buffers else "attribute", -1, stage_of.get(name, -1), 0, name
        ): found
        for name, found in prints(module, not_state).items()
    }


def as_text(evidence: Evidence) -> str:
    """Write evidence down, to be sent."""
    return json.dumps([[*item, *found] for item, found in evidence.items()])


def from_text(text: str) -> Evidence:
    """Read what :func:`as_text` wrote."""
    num = len(Item._fields)
    return {Item(*row[:num]): Print(*row[num:]) for row in json.loads(text)}


# ---------------------------------------------------------------------- comparing


class Difference(NamedTuple):
    """Hold one item that is another in the step in stages than in the plain one."""

    item: Item
    plain: Print
    staged: Print


def differences(
    plain: Evidence, by_rank: Sequence[Evidence], *, replicas: int, moves: bool
) -> list[Difference]:
    """Compare, in the order in which things happen.

    What stages, losses and gradients are is asked of the worker that has them. What a module keeps
    is to be right on a worker whose code has changed it; buffers on all that have them. Replicas
    see batches of their own, and keep what they like; the last of them has the buffers.

    Args:
        plain: of the plain step.
        by_rank: of all workers, in the order of ranks.
        replicas: how many there are.
        moves: whether buffers go from worker to worker, so that the last one has them.
    """
    found = []
    items = dict.fromkeys([*plain, *(item for e in by_rank for item in e)])
    for item in sorted(items, key=_order):
        if item.kind == "attribute" and replicas > 1:
            continue
        wanted = plain.get(item, NOTHING)
        given = [e[item] for e in by_rank if item in e] or [NOTHING]
        if item.kind == "attribute" or (item.kind == "buffer" and moves):
            given += [NOTHING] * (len(given) < len(by_rank))
            seen = next((x for x in given if x.bits == wanted.bits), given[0])
        else:
            seen = next((x for x in given if x.bits != wanted.bits), given[0])
        if seen.bits != wanted.bits:
            found.append(Difference(item, wanted, seen))
    return found


_KINDS = (
    "raised",
    "call",
    "draws",
    "loss",
    "output",
    "log",
    "gradient",
    "buffer",
    "attribute",
    "told",
)


def _order(item: Item) -> tuple[int, ...]:
    """Return what items are sorted by: gradients are made from the last stage to the first."""
    kind = _KINDS.index(item.kind)
    group = -1 if item.kind == "raised" else 0 if item.kind in ("call", "draws") else kind
    return group, item.i, -item.j if item.kind == "gradient" else item.j, kind, item.n


def words(
    found: Sequence[Difference], num_microbatches: int, t: int, *, starts: Sequence[str]
) -> str:
    """Say what differs first, where it is made, both values, and what to do."""
    first = found[0]
    also = [_name_of(d.item, num_microbatches) for d in found[1 : _MOST_SHOWN + 1]]
    more = len(found) - 1 - len(also)
    rest = f"; besides: {', '.join(also)}" if also else ""
    rest += f" and {more} more" if more > 0 else ""
    return (
        f"step {t}: {_name_of(first.item, num_microbatches)} is {first.staged.text} where the "
        "step is "
        f"run in stages, but {first.plain.text} where training_step is run on the whole module"
        f"{_bits_remark(first)}{rest}; allowed: steps that come out alike, bit by bit; "
        f"{_todo(first, starts)}, or leave the comparison out with "
        "verify=False, if you know why they differ"
    )


def _bits_remark(d: Difference) -> str:
    if d.plain.text != d.staged.text:
        return ""
    return f" (bits {d.staged.bits[-16:]} and {d.plain.bits[-16:]})"


_NAMES = {
    "raised": "the {name} of training_step",
    "call": "{what} of {name}{stage}{micro}",
    "draws": "how far {name} has drawn{stage}{micro}",
    "log": "the value of self.log({name!r}){micro}",
    "loss": "the loss{micro}",
    "output": "what training_step returned ({name}){micro}",
    "told": "{name} of the whole batch",
    "gradient": "the gradient of {name!r}{stage}",
    "buffer": "the buffer self.{name}{stage}",
    "attribute": "self.{name}{stage}",
}


def _name_of(item: Item, num_microbatches: int) -> str:
    micro = f" in micro-batch {item.i + 1} of {num_microbatches}" if item.i >= 0 else ""
    stage = f" (stage {item.j})" if item.j >= 0 else ""
    return _NAMES[item.kind].format(name=item.name, what=item.what, stage=stage, micro=micro)


def _todo(d: Difference, starts: Sequence[str]) -> str:
    item = d.item
    if item.kind in ("attribute", "buffer"):
        return (
            f"let one stage have all code that uses self.{item.name}, "
            "stages=[...], or change it in a hook between steps"
        )
    if item.kind == "draws":
        return "draw by functions of torch, random or numpy.random, or let the DataLoader draw"
    if item.kind == "call" and item.what.startswith("input") and item.j == 0:
        return (
            "let what the step computes with come with the batch: what it reads elsewhere (a "
            "global, an iterator, a file) is read once more here, and once for each stage"
        )
    if not starts:
        return "use num_microbatches=1"
    return (
        f"let stages begin elsewhere than at {', '.join(map(repr, starts))}, "
        "stages=[...], so that the code around it is in one of them"
    )


def told_differences(expected: Mapping[str, Print], told: Mapping[str, Print]) -> list[Difference]:
    """Compare what a step was told to be with what was to be told."""
    names = dict.fromkeys([*expected, *told])
    pairs = ((n, expected.get(n, NOTHING), told.get(n, NOTHING)) for n in names)
    return [
        Difference(Item("told", -1, -1, k, name), x, y)
        for k, (name, x, y) in enumerate(pairs)
        if x.bits != y.bits
    ]


def unlike_itself(d: Difference, num_microbatches: int) -> str:
    """Say that the plain step does not come out alike when it is run twice."""
    return (
        "training_step on the whole module does not come out alike when it is run twice: "
        f"{_name_of(d.item, num_microbatches)} differs. What is trained in stages may differ by "
        "as much "
        "from the plain step; threads, and atomic additions on a GPU, do that."
    )
