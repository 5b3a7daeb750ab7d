"""The verifier of one worker: which steps are compared, and what is noted of them here.

prepare   before a step: say whether it is compared; rank 0 keeps the weights of others
begin     when its micro-batches are known: rank 0 runs the plain step
...       the step itself: notes of stages, gradients as soon as they are whole
finish    all workers together: compare, and go on or refuse
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

from torch import Tensor, nn

from lightning_cyclic.errors import StepError, VerificationError
from lightning_cyclic.runtime.gradient_store import Gradients
from lightning_cyclic.runtime.partial_step.evidence import (
    Difference,
    Evidence,
    Item,
    Notes,
    as_text,
    differences,
    from_text,
    gradient_evidence,
    state_evidence,
    told_differences,
    unlike_itself,
    words,
)
from lightning_cyclic.runtime.partial_step.micro_batches import shares_of
from lightning_cyclic.runtime.partial_step.own_stages import OwnStages
from lightning_cyclic.runtime.partial_step.packets import Outcome
from lightning_cyclic.runtime.partial_step.plain_step import Part, Plain, PlainStep
from lightning_cyclic.runtime.partial_step.stage_step import StageStep
from lightning_cyclic.runtime.snapshot import Print
from lightning_cyclic.runtime.values.plain import decode, encode
from lightning_cyclic.runtime.values.split import MicroBatch, signature

_TO_COMPARE = "to compare a step"
_MOST_KINDS = 8  # of batches that look otherwise than those before, that are compared
Expect = Callable[[Sequence[Outcome], Sequence[int]], Mapping[str, Print]]


@final
class Verifier:
    """Compare the first steps of a session, and batches that look otherwise, with plain ones."""

    def __init__(
        self, own: OwnStages, step: StageStep, plain: PlainStep, held: Mapping[str, Any], t: int
    ) -> None:
        self._own = own
        self._step = step
        self._plain_step = plain
        self._held = held
        self.num_compared = 0
        self._left = own.config.verify  # steps
        self._kinds: set[str] = set()
        self._num_kinds = 0
        self.not_compared: list[str] = []  # why steps were not, or not found equal
        self._notes: Notes | None = None  # of the step under way, if it is compared
        self._again: Notes | None = None
        self._gradients: Evidence = {}
        self._state: Evidence = {}
        self._plain: Plain | None = None
        self._before: list[tuple[nn.Parameter, Tensor]] = []  # as they were before the step
        self._num_micro = 0
        self._t = 0  # of the step that is compared
        if self.runs_plainly and self._may_compare(t):
            own.ownership.kept = {}

    @property
    def runs_plainly(self) -> bool:
        """Say whether this worker runs the plain steps: the one on rank 0, if it can have all."""
        own = self._own
        return own.rank == 0 and own.config.verify > 0 and own.foreign.fits

    @property
    def is_comparing(self) -> bool:
        return self._notes is not None

    def _may_compare(self, t: int) -> bool:
        """Say whether a step reads one version of all weights, and more are asked for."""
        return self._left > 0 and (self._own.plan.weights == "sync" or t == 0)

    # ------------------------------------------------------------------ before a step

    def prepare(self, t: int, batch: Any, *, is_first: bool) -> None:
        """Decide whether step ``t``, which is next, is compared."""
        own = self._own
        if own.config.verify == 0 or not is_first:
            return
        wants = self._may_compare(t)
        if not wants and self._left > 0:
            self._say_once(
                f"Step {t} is not compared with the plain one: preset "
                f"{own.plan.preset!r} reads weights of several "
                "versions by now."
            )
            self._left = 0
        # of several workers some would not know that a batch looks new to another
        if own.assembly.is_alone and own.plan.weights == "sync":
            kind = signature(batch)
            if kind not in self._kinds and self._kinds and self._num_kinds < _MOST_KINDS:
                wants, self._num_kinds = True, self._num_kinds + 1
            self._kinds.add(kind)
        if wants:
            self._left = max(self._left - 1, 0)
            self._begin_notes()

    def _begin_notes(self) -> None:
        own = self._own
        self._notes = Notes(self._held, own.device)
        self._again = Notes(self._held, own.device)
        self._gradients, self._state = {}, {}
        if own.foreign.fits and not own.assembly.is_alone:
            own.foreign.bring()  # on all workers, for the one that runs the plain step
        if self.runs_plainly:
            own.ownership.kept = {}

    def begin(
        self, t: int, parts: Sequence[MicroBatch], accumulate: int, call: Callable[[Any], Any],
        expect: Expect,
    ) -> None:  # fmt: skip
        """Run the plain step, on rank 0; all workers must call it."""
        own = self._own
        step = self._step
        step.notes, step.notes_again = self._notes, self._again
        step.noted = self._t = t if self.is_comparing else -1
        step.runs_again = self.is_comparing and not self._own.foreign.fits
        if not self.is_comparing:
            return
        everyone = self._parts_of_all(t, parts, accumulate)
        self._num_micro = len(parts) * own.config.replicas
        self._plain = None
        if step.runs_again:
            self._say_once(
                "The first step is not compared with the plain one, as the whole module is not "
                "to be on one worker (memory_limit_bytes): each stage is run twice, and compared "
                "with itself."
            )
        elif self.runs_plainly and everyone is not None:
            sizes = [part.size for part in parts]

            def expected(outcomes: list[Outcome]) -> Mapping[str, Print]:
                return expect(outcomes[:: own.config.replicas], sizes)

            plan = own.plan if own.flows else own.plan_of(len(parts))
            whole = own.ownership.whole_as_kept
            with whole() if own.ownership.foreign else nullcontext():
                self._plain = self._plain_step.run(plan, t, everyone, call, expected)
            if own.flows:  # by the time that anything is compared, it has been trained
                self._before = [(p, p.detach().clone()) for p in own.ownership.own]

    def _parts_of_all(
        self, t: int, parts: Sequence[MicroBatch], accumulate: int
    ) -> list[Part] | None:
        own = self._own
        replicas = own.config.replicas
        each = [[(part.batch, part.size) for part in parts]]
        if replicas > 1:
            each = self._gathered(parts)
            if not each:
                return None
        found = []
        for q, replica in enumerate(each):
            # of its own, not by Batches.shares, which is among what is compared
            shares = shares_of([size for _, size in replica], replicas * accumulate)
            if own.config.scaled is not None:
                shares = [own.config.scaled(t, share) for share in shares]
            found += [
                Part(i * replicas + q, batch, share, size)
                for i, ((batch, size), share) in enumerate(zip(replica, shares, strict=True))
            ]
        return sorted(found, key=lambda part: part.i)

    def _gathered(self, parts: Sequence[MicroBatch]) -> list[list[tuple[Any, int]]]:
        own = self._own
        mine: dict[str, Any] = {}
        if own.worker_of(own.plan.num_stages - 1) == own.worker:
            try:
                for k, part in enumerate(parts):
                    tensors, facts = encode(part.batch, "a batch")
                    mine[f"{k:06}"] = [list(tensors), json.dumps(facts), part.size]
            except StepError as error:
                mine = {"error": str(error)}
        came = [one for one in own.assembly.collect(mine, _TO_COMPARE) or () if one]
        failed = next((one["error"] for one in came if "error" in one), None)
        if failed is not None:
            self._say_once(f"The first step is not compared with the plain one: {failed}")
            return []
        return [
            [(decode(x[0], json.loads(x[1])), x[2]) for _, x in sorted(one.items())]
            for one in came
        ]

    # ------------------------------------------------------------------ within a step

    def note_gradients(self, j: int, grads: Gradients) -> None:
        """Note the sums of gradients of a stage, when they are whole."""
        if self.is_comparing:
            self._gradients |= gradient_evidence(j, self._own.cuts.parameters[j], grads)

    def note_state(self) -> None:
        """Note what the module keeps, before hooks of an update change that."""
        if self.is_comparing and not self._state:
            own = self._own
            not_state = own.config.not_state
            self._state = state_evidence(own.module, not_state, self._stage_of)

    # ------------------------------------------------------------------ behind a step

    def finish(self, told: Mapping[str, Print]) -> None:
        """Compare; all workers must call it.

        Raises:
            VerificationError: on every worker, with what differs first.
        """
        notes, again, own = self._notes, self._again, self._own
        if notes is None or again is None:
            return
        self.note_state()
        self._notes = self._again = None
        self._step.notes = self._step.notes_again = None
        self._step.noted = -1
        mine = notes.evidence()
        found = _of_reruns(mine, again.evidence())
        mine |= self._gradients | self._state
        texts = own.assembly.share(as_text(mine), _TO_COMPARE)
        plain, self._plain = self._plain, None
        try:
            self.num_compared += own.assembly.ask_first(
                lambda: self._check(plain, texts, told, found), _TO_COMPARE
            )
        finally:
            own.ownership.kept, self._before = None, []

    def _check(
        self, plain: Plain | None, texts: Sequence[str], told: Mapping[str, Print],
        found: Sequence[Difference],
    ) -> bool:  # fmt: skip
        """Refuse what differs, unless the plain step differs from itself by as much.

        Returns:
            Whether the step was found equal to a plain one.
        """
        if plain is not None:
            by_rank = [from_text(text) for text in texts]
            found = [*found, *self._differences(plain.evidence, by_rank)]
            found += told_differences(plain.expected, told)
        if not found:
            return plain is not None
        by_itself = set() if plain is None else set(self._by_itself(plain))
        rest = [d for d in found if d.item not in by_itself]
        if rest:
            raise VerificationError(self._words(rest))
        self._say_once(unlike_itself(found[0], self._num_micro))
        return False

    def _differences(self, plain: Evidence, by_rank: Sequence[Evidence]) -> list[Difference]:
        replicas, plan = self._own.config.replicas, self._own.plan
        moves = replicas > 1 or plan.axes.placement.takes_turns
        return differences(plain, by_rank, replicas=replicas, moves=moves)

    def _by_itself(self, plain: Plain) -> list[Item]:
        now = [p.data for p, _ in self._before]
        for p, x in self._before:
            p.data = x
        try:
            with self._own.ownership.whole_as_kept():
                second = plain.again()
        finally:
            for (p, _), x in zip(self._before, now, strict=True):
                p.data = x
        pairs = self._differences(plain.evidence, [second.evidence])
        told = told_differences(plain.expected, second.expected)
        return [d.item for d in (*pairs, *told)]

    def _words(self, found: Sequence[Difference]) -> str:
        own = self._own
        return words(found, self._num_micro, self._t, starts=own.cuts.starts)

    @property
    def _stage_of(self) -> Mapping[str, int]:
        return {n: j for j, names in enumerate(self._own.cuts.buffers) for n in names}

    def _say_once(self, text: str) -> None:
        if text not in self.not_compared:
            self.not_compared.append(text)
            self._own.config.say(text)


def _of_reruns(first: Evidence, again: Evidence) -> list[Difference]:
    calls = {item: x for item, x in again.items() if item.kind in ("call", "draws")}
    return [
        Difference(item, first[item], x)
        for item, x in calls.items()
        if item in first and first[item].bits != x.bits
    ]
