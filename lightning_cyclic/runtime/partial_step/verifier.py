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
from typing import TYPE_CHECKING, Any, final

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
from lightning_cyclic.runtime.partial_step.plain_step import Part, Plain, PlainStep
from lightning_cyclic.runtime.snapshot import Print
from lightning_cyclic.runtime.values.plain import decode, encode
from lightning_cyclic.runtime.values.split import MicroBatch, signature

if TYPE_CHECKING:
    from lightning_cyclic.runtime.partial_step.session import StagewiseSession
    from lightning_cyclic.runtime.partial_step.stage_step import Outcome

_TO_COMPARE = "to compare a step"
_MOST_KINDS = 8  # of batches that look otherwise than those before, that are compared
Expect = Callable[[Sequence["Outcome"], Sequence[int]], Mapping[str, Print]]


@final
class Verifier:
    """Compare the first steps of a session, and batches that look otherwise, with plain ones."""

    def __init__(
        self, session: StagewiseSession, plain: PlainStep, held: Mapping[str, Any]
    ) -> None:
        self._session = session
        self._plain_step = plain
        self._held = held
        self.num_compared = 0
        self._left = session.config.verify  # steps
        self._kinds: set[str] = set()
        self._num_kinds = 0
        self.not_compared: list[str] = []  # why steps were not, or not found equal
        self._notes: Notes | None = None  # of the step under way, if it is compared
        self._again: Notes | None = None
        self._gradients: Evidence = {}
        self._state: Evidence = {}
        self._plain: Plain | None = None
        self._own: list[tuple[nn.Parameter, Tensor]] = []  # as they were before the step
        self._num_micro = 0
        self._t = 0  # of the step that is compared
        if self.runs_plainly and self._may_compare:
            session.ownership.kept = {}

    @property
    def runs_plainly(self) -> bool:
        """Say whether this worker runs the plain steps: the one on rank 0, if it can have all."""
        session = self._session
        return session.rank == 0 and session.config.verify > 0 and session.foreign.fits

    @property
    def is_comparing(self) -> bool:
        return self._notes is not None

    @property
    def _may_compare(self) -> bool:
        """Say whether the next step reads one version of all weights, and more are asked for."""
        session = self._session
        assert session.plan is not None
        return self._left > 0 and (session.plan.weights == "sync" or session.t == 0)

    # ------------------------------------------------------------------ before a step

    def prepare(self, batch: Any, *, is_first: bool) -> None:
        """Decide whether the next step is compared."""
        session = self._session
        if session.config.verify == 0 or not is_first:
            return
        wants = self._may_compare
        if not wants and self._left > 0:
            self._say_once(
                f"Step {session.t} is not compared with the plain one: preset "
                f"{session.plan.preset if session.plan else ''!r} reads weights of several "
                "versions by now."
            )
            self._left = 0
        # of several workers some would not know that a batch looks new to another
        alone = session.assembly.is_alone
        if alone and session.plan is not None and session.plan.weights == "sync":
            kind = signature(batch)
            if kind not in self._kinds and self._kinds and self._num_kinds < _MOST_KINDS:
                wants, self._num_kinds = True, self._num_kinds + 1
            self._kinds.add(kind)
        if wants:
            self._left = max(self._left - 1, 0)
            self._begin_notes()

    def _begin_notes(self) -> None:
        session = self._session
        self._notes = Notes(self._held, session.device)
        self._again = Notes(self._held, session.device)
        self._gradients, self._state = {}, {}
        if self._session.foreign.fits:
            session.bring()  # on all workers, for the one that runs the plain step
        if self.runs_plainly:
            session.ownership.kept = {}

    def begin(
        self, parts: Sequence[MicroBatch], accumulate: int, call: Callable[[Any], Any],
        expect: Expect,
    ) -> None:  # fmt: skip
        """Run the plain step, on rank 0; all workers must call it."""
        session = self._session
        step = session.stage_step
        step.notes, step.notes_again = self._notes, self._again
        step.noted = self._t = session.t if self.is_comparing else -1
        step.runs_again = self.is_comparing and not self._session.foreign.fits
        if not self.is_comparing:
            return
        everyone = self._parts_of_all(parts, accumulate)
        self._num_micro = len(parts) * session.config.replicas
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
                return expect(outcomes[:: session.config.replicas], sizes)

            plan = session.plan_of(len(parts)) if not session.flows else session.plan
            assert plan is not None
            whole = session.ownership.whole_as_kept
            with whole() if session.ownership.foreign else nullcontext():
                self._plain = self._plain_step.run(plan, session.t, everyone, call, expected)
            if session.flows:  # by the time that anything is compared, it has been trained
                self._own = [(p, p.detach().clone()) for p in session.ownership.own]

    def _parts_of_all(self, parts: Sequence[MicroBatch], accumulate: int) -> list[Part] | None:
        session = self._session
        replicas = session.config.replicas
        each = [[(part.batch, part.size) for part in parts]]
        if replicas > 1:
            each = self._gathered(parts)
            if not each:
                return None
        found = []
        for q, replica in enumerate(each):
            # of its own, not by Batches.shares, which is among what is compared
            shares = shares_of([size for _, size in replica], replicas * accumulate)
            if session.config.scaled is not None:
                shares = [session.config.scaled(session.t, share) for share in shares]
            found += [
                Part(i * replicas + q, batch, share)
                for i, ((batch, _), share) in enumerate(zip(replica, shares, strict=True))
            ]
        return sorted(found, key=lambda part: part.i)

    def _gathered(self, parts: Sequence[MicroBatch]) -> list[list[tuple[Any, int]]]:
        session = self._session
        mine: dict[str, Any] = {}
        if session.worker_of(session.program.plan.num_stages - 1) == session.worker:
            try:
                for k, part in enumerate(parts):
                    tensors, facts = encode(part.batch, "a batch")
                    mine[f"{k:06}"] = [list(tensors), json.dumps(facts), part.size]
            except StepError as error:
                mine = {"error": str(error)}
        came = [one for one in session.assembly.collect(mine, _TO_COMPARE) or () if one]
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
            assert self._session.cuts is not None
            self._gradients |= gradient_evidence(j, self._session.cuts.parameters[j], grads)

    def note_state(self) -> None:
        """Note what the module keeps, before hooks of an update change that."""
        if self.is_comparing and not self._state:
            session = self._session
            not_state = session.config.not_state
            self._state = state_evidence(session.module, not_state, self._stage_of)

    # ------------------------------------------------------------------ behind a step

    def finish(self, told: Mapping[str, Print]) -> None:
        """Compare; all workers must call it.

        Raises:
            VerificationError: on every worker, with what differs first.
        """
        notes, again, session = self._notes, self._again, self._session
        if notes is None or again is None:
            return
        self.note_state()
        self._notes = self._again = None
        session.stage_step.notes = session.stage_step.notes_again = None
        session.stage_step.noted = -1
        mine = notes.evidence()
        found = _of_reruns(mine, again.evidence())
        mine |= self._gradients | self._state
        texts = session.assembly.share(as_text(mine), _TO_COMPARE)
        plain, self._plain = self._plain, None
        try:
            self.num_compared += session.assembly.ask_first(
                lambda: self._check(plain, texts, told, found), _TO_COMPARE
            )
        finally:
            session.ownership.kept, self._own = None, []

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
        replicas = self._session.config.replicas
        plan = self._session.plan
        moves = replicas > 1 or (plan is not None and plan.axes.placement.takes_turns)
        return differences(plain, by_rank, replicas=replicas, moves=moves)

    def _by_itself(self, plain: Plain) -> list[Item]:
        now = [p.data for p, _ in self._own]
        for p, x in self._own:
            p.data = x
        try:
            with self._session.ownership.whole_as_kept():
                second = plain.again()
        finally:
            for (p, _), x in zip(self._own, now, strict=True):
                p.data = x
        pairs = self._differences(plain.evidence, [second.evidence])
        told = told_differences(plain.expected, second.expected)
        return [d.item for d in (*pairs, *told)]

    def _words(self, found: Sequence[Difference]) -> str:
        session = self._session
        return words(found, self._num_micro, self._t, starts=session.starts or ())

    @property
    def _stage_of(self) -> Mapping[str, int]:
        cuts = self._session.cuts
        assert cuts is not None
        return {n: j for j, names in enumerate(cuts.buffers) for n in names}

    def _say_once(self, text: str) -> None:
        if text not in self.not_compared:
            self.not_compared.append(text)
            self._session.config.say(text)


def _of_reruns(first: Evidence, again: Evidence) -> list[Difference]:
    calls = {item: x for item, x in again.items() if item.kind in ("call", "draws")}
    return [
        Difference(item, first[item], x)
        for item, x in calls.items()
        if item in first and first[item].bits != x.bits
    ]
