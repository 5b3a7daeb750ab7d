"""F and B of one stage: the user's step, run as far as one stage, and its backward.

    F(i,j)   run the step for stage j; keep the graph's beginning (entry) and ends (edges)
    B(i,j)   one backward from the ends, with the gradients that came for them; or its halves:
    I(i,j)   the same, but for the gradients of weights, which are put off
    W(i,j)   those

What came from other stages is asked for when it is needed, and what goes to them is returned: how
it travels is no concern of this file. Gradients of the stage's own parameters are left in
``p.grad``, as if the whole step had been run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import (
    GradientEdge,
    _engine_run_backward,
    get_gradient_edge,
    saved_tensors_hooks,
)

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.plan.roles import adds_at_once
from lightning_cyclic.runtime import generators
from lightning_cyclic.runtime.bits import kept, put
from lightning_cyclic.runtime.cast_copies import CastCopies
from lightning_cyclic.runtime.partial_step.call_router import CallRouter
from lightning_cyclic.runtime.partial_step.evidence import Notes
from lightning_cyclic.runtime.partial_step.ghosts import Handle
from lightning_cyclic.runtime.partial_step.graph_tier import GraphTier
from lightning_cyclic.runtime.partial_step.losses import check_loss, loss_of
from lightning_cyclic.runtime.partial_step.micro_batches import BatchReads, noted, noting
from lightning_cyclic.runtime.partial_step.module_state import ModuleState, Seen, Visit
from lightning_cyclic.runtime.partial_step.observed import Observation
from lightning_cyclic.runtime.partial_step.ownership import Ownership
from lightning_cyclic.runtime.partial_step.packets import Gradients, Lesson, Outcome, Packet
from lightning_cyclic.runtime.partial_step.passage import Entry, Habit, Habits, Passage
from lightning_cyclic.runtime.partial_step.run import Run
from lightning_cyclic.runtime.partial_step.segments import Resumed
from lightning_cyclic.runtime.partial_step.sharing import Sharing
from lightning_cyclic.runtime.partial_step.split_backward import Pieces, Weights, edge_of
from lightning_cyclic.runtime.partial_step.tape import Delivery
from lightning_cyclic.runtime.partial_step.unit_schedules import Follower, UnitSchedules
from lightning_cyclic.runtime.partial_step.versions import Version, Versions
from lightning_cyclic.runtime.randomness import Randomness, undisturbed
from lightning_cyclic.runtime.values.trees import map_tensors
from lightning_cyclic.runtime.weight_watch import WeightWatch


class Micro(NamedTuple):
    """Hold one micro-batch.

    Args:
        weight: its share of the step's loss, as a function of a tensor of ones.
        kind: what its tensors look like, sizes included.
        reads: what Python has read of it; None where that takes no time.
        where: names it for errors in it; empty for evaluation.
        size: of how many samples it is.
    """

    batch: Any
    weight: Callable[[Tensor], Tensor]
    kind: str
    family: str
    reads: BatchReads | None = None
    where: str = ""
    size: int = 1


@dataclass(slots=True, kw_only=True)
class _Cell:
    entry: Entry | None = None
    edges: dict[Handle, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    versions: tuple[Version, ...] = ()  # whose stand-ins the graph holds
    found: list[Seen] = field(default_factory=list)  # of what the module keeps, behind F
    pieces: Pieces | None = None  # of a backward that is split
    own: dict[str, Tensor] = field(default_factory=dict)  # made at I, of tied parameters
    again: _Again | None = None  # if it is run again


class _Again(NamedTuple):
    packet: Packet
    habit: Habit
    captured: frozenset[Handle]


_NOTHING: AbstractContextManager[None] = nullcontext()


@final
class StageStep:
    """Run forwards and backwards of the stages of one worker.

    Args:
        state: what the module keeps, which running a stage again must not change twice.
        may_skip: whether the step may return None: then there is nothing to go back through.
    """

    casts: CastCopies | None = None  # where the step runs under autocast
    watch: WeightWatch | None = None  # of weights that have versions, whenever the step runs
    held: Mapping[str, Any] = MappingProxyType({})  # generators that the module keeps
    noted = -1  # the step whose runs are noted
    notes: Notes | None = None  # of its forwards
    notes_again: Notes | None = None  # of stages that are run again for their backward
    runs_again = False  # whether all are
    still: Mapping[str, Tensor] = MappingProxyType({})  # buffers that it watches, too
    say: Callable[[str], None] = print
    schedules: UnitSchedules | None = None  # of what is run again, unit by unit
    graphs: GraphTier | None = None  # if what they save leaves memory meanwhile

    def __init__(
        self,
        router: CallRouter,
        plan: Plan,
        ownership: Ownership,
        state: ModuleState,
        seed: int,
        remat: str = "never",
        versions: Versions | None = None,
        may_skip: bool = False,
    ) -> None:
        self.learnt: dict[str, Lesson] = {}
        self._router = router
        self._plan = plan
        self._ownership = ownership
        self._state = state
        self._seed = seed
        self._remat = remat
        self._versions = versions
        self._may_skip = may_skip
        self._lessons: dict[str, Lesson] = {}
        self._outcomes: dict[tuple[int, int], Outcome] = {}  # on the last stage's worker
        self._micro: dict[tuple[int, int], Micro] = {}
        self._calls: dict[int, Callable[[Any], Any]] = {}  # by step
        self._training = True
        self._cells: dict[tuple[int, int, int], _Cell] = {}  # by step, micro-batch, stage
        self._habits = Habits(router)
        self._here = ownership.here()
        self._weights: dict[int, Weights] = {}  # of stages whose backwards are split
        self._told: set[int] = set()  # of which stages something was said
        self._put_off: dict[tuple[int, int, int], _Cell] = {}  # from I to W
        self._borrowing = {j for j in range(plan.num_stages) if ownership.borrowed(j)}

    # ------------------------------------------------------------------ micro-batches

    def prepare(
        self, t: int, micro: Mapping[int, Micro], call: Callable[[Any], Any], *, training: bool
    ) -> None:
        """Take in the micro-batches of step ``t`` and how the user's step is called."""
        self._micro |= {(t, i): m for i, m in micro.items()}
        self._calls[t] = call
        self._training = training
        if self.casts is not None and self._versions is None:  # else each has parameters apart
            self.casts.forget()

    def kind_of(self, a: Action) -> str:
        """Return what the tensors of an action's micro-batch look like."""
        return self._of(a).kind

    def size_of(self, a: Action) -> int:
        """Return how many samples an action's micro-batch has."""
        return self._of(a).size

    def take_outcomes(self, t: int) -> dict[int, Outcome]:
        """Return what the micro-batches of step ``t`` gave, in their order; none elsewhere."""
        taken = sorted(k for k in self._outcomes if k[0] == t)
        return {k[1]: self._outcomes.pop(k) for k in taken}

    def adopt(self, learnt: Mapping[str, Lesson]) -> None:
        """Take what micro-batches taught for the next ones."""
        self._lessons |= learnt
        self.learnt = {}

    def forget(self, t: int) -> None:
        """Forget the micro-batches of step ``t``, behind their last backward; and older ones."""
        self._micro = {k: m for k, m in self._micro.items() if not _is_over(k[0], t)}
        self._calls = {k: call for k, call in self._calls.items() if not _is_over(k, t)}

    # ------------------------------------------------------------------ forward

    def forward(self, a: Action, take_packet: Callable[[], Packet]) -> Packet | None:
        """Run F(i,j).

        Returns:
            What crosses to the next stage; None behind the last.
        """
        cell, micro = _Cell(), self._of(a)
        follower = self._follower(a, micro, cell)
        looks = isinstance(follower, Observation)
        again = self._training and (looks or self._is_run_again(a))
        passage = Passage(take_packet, self._lessons.get(micro.family), copied=again)
        visit = self._state.begin(a.j, runs_again=again)
        saving = _discard() if again else self._saving(a)
        if saving is _NOTHING and not (self._versions or follower):  # which costs nothing
            run, output = self._pass(a, micro, passage, visit, cell)
        else:
            following = self._router.followed(follower) if follower else _NOTHING
            with saving, self._showing(a, cell), following:
                run, output = self._pass(a, micro, passage, visit, cell)
        gone = self._finish_forward(a, run, cell, passage, output, visit)
        assert a.i is not None
        of = None if gone is None else (a.t, a.i)
        cell.found.append(self._state.end(a.j, visit, of))
        if isinstance(follower, Observation):
            assert self.schedules is not None
            inputs = sum(x.nbytes for h, x in passage.packet.tensors.items())
            self.schedules.learn(a.j, micro.kind, follower, inputs)
        return gone

    def _saving(self, a: Action) -> AbstractContextManager[None]:
        """Return what looks after what autograd saves in a forward."""
        if self.graphs is not None and self._training and self.graphs.moves(a):
            return self.graphs.saving(a, self.casts)
        return self.casts.shared() if self.casts else _NOTHING

    def _follower(self, a: Action, micro: Micro, cell: _Cell) -> Follower | None:
        """Return what follows the units of a stage of which some are run again."""
        if self.schedules is None or not self._training or self._is_run_again(a):
            return None
        moments = partial(self._moment, a.j, cell.found)
        return self.schedules.follower(a.j, micro.kind, moments)

    def _moment(self, j: int, found: list[Seen], path: str) -> Resumed:
        """Note what a unit is about to find, for a run of it again.

        Args:
            found: what the whole forward has found, behind its end; no cell, which has the graph.
        """
        every = [*generators.of_process(self._router.device).values(), *self.held.values()]
        states = generators.states_of(every)
        buffers = self._state.changing_within(j, path)
        copies = [b.detach().clone() for b in buffers]

        @contextmanager
        def resumed() -> Iterator[None]:
            again = self._state.again(j, found[0]) if found else kept(buffers)
            with undisturbed(self._router.device, self.held), again:
                generators.put(states)
                put(buffers, copies)
                yield

        return resumed

    def _pass(
        self, a: Action, micro: Micro, passage: Passage, visit: Visit, cell: _Cell
    ) -> tuple[Run, Any]:
        """Run the step as habit has it; begin again where it proves wrong before the stage."""
        kind, habits = micro.kind, self._habits
        habit = habits.get(kind, a.j) or habits.begin(kind, a.j, passage.packet.tapes)
        while True:
            run = self._new_run(a, habit, partial(passage.deliver, habit), micro.reads)
            try:
                with self._state.hiding(), self._split(a, cell):
                    output = run(self._step(a, micro))
            except Exception:
                if run.is_real or habit.fits(passage.packet.tapes):
                    raise
            else:
                if not run.was_misled:
                    return run, output
            self._state.begin_anew(visit)
            if micro.reads is not None:
                micro.reads.forget()
            habit = habits.begin(kind, a.j, passage.packet.tapes)

    def _split(self, a: Action, cell: _Cell) -> AbstractContextManager[None]:
        """Note what the backward puts off, where it is split; not of what is run again."""
        assert a.i is not None
        is_first = a.kind is Kind.F and (not self._training or self._is_run_again(a))
        if is_first or not self._plan.axes.schedule.is_split(a.i, a.j):
            return _NOTHING
        cell.pieces = Pieces(self._weights.setdefault(a.j, Weights()), self._of(a).family)
        return cell.pieces.cut_out()

    def _new_run(
        self, a: Action, habit: Habit, take: Callable[[], Delivery | None],
        reads: BatchReads | None,
    ) -> Run:  # fmt: skip
        assert a.i is not None
        randomness = Randomness(self._seed, a.t, a.i, self._router.device, self.held)
        run = Run(self._router, a.j, habit.replays, take, randomness, reads)
        if a.t == self.noted and self._training:
            run.i, run.notes = a.i, self.notes if a.kind is Kind.F else self.notes_again
        return run

    def _step(self, a: Action, micro: Micro) -> Callable[[], Any]:
        """Return the user's step on a batch that its code may change: it is run once a stage."""
        batch = map_tensors(torch.clone, micro.batch)
        return partial(noted, _place(a, micro), self._calls[a.t], batch)

    def _of(self, a: Action) -> Micro:
        assert a.i is not None
        return self._micro[a.t, a.i]

    def _showing(self, a: Action, cell: _Cell) -> AbstractContextManager[None]:
        if self._versions is None or not self._training:
            return _NOTHING
        return self._showing_versions(self._versions, a, cell)

    @contextmanager
    def _showing_versions(self, versions: Versions, a: Action, cell: _Cell) -> Iterator[None]:
        if a.kind is Kind.F:
            showing = versions.shown(a, sorted({a.j, *self._ownership.lenders(a.j)}))
        else:
            showing = versions.shown_again(a, cell.versions)
        with showing as cell.versions, self._watching(a, cell):
            yield

    def _watching(self, a: Action, cell: _Cell) -> AbstractContextManager[None]:
        if self.watch is None:
            return _NOTHING
        return self.watch.watching(a.t, [*cell.versions, self._here, self.still])

    def _finish_forward(
        self, a: Action, run: Run, cell: _Cell, passage: Passage, output: Any, visit: Visit
    ) -> Packet | None:
        assert a.i is not None
        passage.entry.pass_changes_on()
        gone = None
        if a.j == self._plan.num_stages - 1:
            self._finish_last(a, run, passage, output, visit)
        else:
            gone = passage.packet_behind(run)
        if not self._training:
            return gone
        if passage.copied:
            cell.again = _Again(passage.packet, passage.habit, frozenset(run.record.captured))
        else:
            self._keep(a, cell, run, passage.entry, output)
        self._cells[a.t, a.i, a.j] = cell
        return gone

    def _keep(self, a: Action, cell: _Cell, run: Run, entry: Entry, output: Any) -> None:
        cell.entry = entry
        cell.edges = {h: edge_of(x) for h, x in run.record.captured.items() if x.requires_grad}
        entry.values = {}
        if run.target == self._plan.num_stages - 1 and not self._skips(output):
            cell.loss = loss_of(output)
        if cell.pieces is not None and cell.pieces.looks:
            loss = [] if cell.loss is None else [cell.loss]
            self._say_what_is_whole(a.j, cell.pieces.look_at([*cell.edges.values(), *loss]))

    def _say_what_is_whole(self, j: int, whole: Sequence[Tensor]) -> None:
        """Say once how many weights of a stage are in no split backward, and what that costs."""
        num = sum(p.numel() for p in whole if p.dim() > 1)  # others take no time
        if num and j not in self._told:
            self._told.add(j)
            trained = self._ownership.trained(j).values()
            self.say(
                f"stage {j}: gradients of {num:,} of its {sum(p.numel() for p in trained):,} "
                "trained weights cannot be put off: those within torch.utils.checkpoint and "
                "compiled blocks, and of modules other than linear layers, convolutions and "
                "embeddings. They are made with the gradient of the stage's input, for which the "
                "stage before waits, as in 1f1b"
            )

    def _skips(self, output: Any) -> bool:
        return self._may_skip and output is None

    def _finish_last(
        self, a: Action, run: Run, passage: Passage, output: Any, visit: Visit
    ) -> None:
        assert a.i is not None
        if self._training and not self._skips(output):
            check_loss(output, a.t)
        what = "training_step" if self._training else "the step"
        changes = self._state.changes(visit, run.filled, what)
        logs = [(name, _detached(run.filled(value)), kw) for name, value, kw in run.logs]
        run.logs = []  # they hold graphs
        self._outcomes[a.t, a.i] = Outcome(_without_graph(output), logs, changes)
        if a.t == self.noted and self._training and self.notes is not None:
            self.notes.outcome(a.i, self._outcomes[a.t, a.i])
        if passage.lesson is None:
            family, packet = self._of(a).family, passage.packet
            used = passage.used(run)
            self.learnt[family] = Lesson.merge(self.learnt.get(family), packet.tapes, used)

    def _is_run_again(self, a: Action) -> bool:
        assert a.i is not None
        if self._remat == "except_last" and not (self.runs_again and a.t == self.noted):
            return a.i < self._plan.num_microbatches - self._plan.replicas
        return self._remat == "always" or (self.runs_again and a.t == self.noted)

    # ------------------------------------------------------------------ backward

    def backward(self, a: Action, take_gradients: Callable[[], Gradients]) -> Gradients:
        """Run B(i,j), or I(i,j).

        Args:
            a: the backward.
            take_gradients: gives those of what crossed to later stages, and of parameters that
                they borrow from this one.

        Returns:
            The gradients of what crossed from earlier stages, and of parameters that this one
            borrows from them.
        """
        assert a.i is not None
        cell = self._cells.pop((a.t, a.i, a.j))
        if self.graphs is not None:
            self.graphs.take(a)
        if a.kind is Kind.I:
            self._put_off[a.t, a.i, a.j] = cell
        if cell.again is None:
            gone = self._backward_of(a, cell, take_gradients())
            cell.found.clear()  # graphs that nothing has gone back through may live on
            return gone
        with self._state.again(a.j, cell.found[0]):  # the backward may look at buffers, too
            self._run_again(a, cell, cell.again)
            return self._backward_of(a, cell, take_gradients())

    def _backward_of(self, a: Action, cell: _Cell, came: Gradients) -> Gradients:
        roots: list[Any] = []
        root_grads: list[Tensor] = []
        if cell.loss is not None and cell.loss.requires_grad:
            roots.append(cell.loss)
            root_grads.append(self._of(a).weight(torch.ones_like(cell.loss)))
        crossed = came.crossed
        for h, edge in cell.edges.items():
            if h in crossed:
                roots.append(edge)
                root_grads.append(crossed[h])
        for p, grad in self._tied_roots(a.j, cell, came.tied) if came.tied else ():
            roots.append(get_gradient_edge(p))
            root_grads.append(grad)
        with noting(_place(a, self._of(a))):
            taken = self._accumulated(a, cell, tuple(roots), tuple(root_grads)) if roots else {}
        assert cell.entry is not None
        return Gradients(cell.entry.grads, taken)

    def _accumulated(
        self, a: Action, cell: _Cell, roots: tuple[Any, ...], grads: tuple[Tensor, ...]
    ) -> Mapping[str, Tensor]:
        """Run the backward; return the gradients of borrowed parameters, which are kept apart."""
        if a.kind is Kind.I:
            assert cell.pieces is not None
            kept, own = self._kept_for_weight_gradients(a, cell.pieces), self._ownership
            with own.unheard(kept), own.apart(kept) as cell.own, cell.pieces.first_half():
                _run_backward(roots, grads)
            return {}
        if self._versions is None and a.j not in self._borrowing:  # no context costs nothing
            _run_backward(roots, grads)
            return {}
        with self._apart(a.j) as taken, self._accumulating(cell), self._watching(a, cell):
            _run_backward(roots, grads)
        return taken

    def weight_gradients(self, a: Action, tied: Mapping[str, Tensor]) -> Gradients:
        """Run W(i,j).

        Args:
            tied: gradients of parameters of the stage that later ones borrow.

        Returns:
            The gradients of parameters that this one borrows.
        """
        assert a.i is not None
        cell = self._put_off.pop((a.t, a.i, a.j))
        assert cell.pieces is not None
        others = self._tied_roots(a.j, cell, tied) if tied else []
        with noting(_place(a, self._of(a))), self._apart(a.j) as taken:
            for name in self._ownership.borrowed(a.j):
                if name in cell.own:
                    taken[name] = cell.own.pop(name)
            own = [self._ownership.as_weight(n, x) for n, x in cell.own.items()]
            cell.pieces.second_half([*others, *own])
        return Gradients({}, taken)

    def _kept_for_weight_gradients(self, a: Action, pieces: Pieces) -> list[str]:
        """Name the parameters whose gradients, if I makes them, are added when W does its own.

        Those of tied ones come behind what later stages have; and where each micro-batch is added
        to what comes from elsewhere, this one's must not be among those of the one before. Nor
        may those come before it that other micro-batches put off, but the first of a kind makes.
        """
        trained, weights = self._ownership.trained(a.j), self._weights[a.j]
        lent = {name for name, _ in self._ownership.lent(a.j)}
        apart = [
            name for name, p in trained.items()
            if name in lent or ((pieces.looks or self.schedules) and p in weights)
        ]  # fmt: skip
        own = apart if adds_at_once(self._plan, a) else [*trained]
        return [*own, *self._ownership.borrowed(a.j)]

    def _run_again(self, a: Action, cell: _Cell, again: _Again) -> None:
        packet, habit, captured = again
        entry = Entry(packet.tensors, packet.with_grad, copied=False)
        sharing = Sharing.of(packet.shared, packet.stale)
        delivery = Delivery(entry.values, captured, None, habit.likely(None), sharing)
        run = self._new_run(a, habit, lambda: delivery, self._of(a).reads)
        with torch.enable_grad(), self._showing(a, cell), self._split(a, cell):
            output = run(self._step(a, self._of(a)))
        self._keep(a, cell, run, entry, output)
        cell.again = None

    def _apart(self, j: int) -> AbstractContextManager[dict[str, Tensor]]:
        if j not in self._borrowing:
            return nullcontext({})
        return self._ownership.apart(self._ownership.borrowed(j))

    def _accumulating(self, cell: _Cell) -> AbstractContextManager[None]:
        return self._versions.backward(cell.versions) if self._versions else _NOTHING

    def _tied_roots(
        self, j: int, cell: _Cell, tied: Mapping[str, Tensor]
    ) -> list[tuple[nn.Parameter, Tensor]]:
        shown = {n: q for version in cell.versions for n, q in version.items()}
        lent = self._ownership.lent(j)
        return [(shown.get(name, p), tied[name]) for name, p in lent if name in tied]


def _run_backward(roots: tuple[Any, ...], grads: tuple[Tensor, ...]) -> None:
    """Do what torch.autograd.backward does, but for what it checks of gradients in Python."""
    _engine_run_backward(
        roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _place(a: Action, micro: Micro) -> str:
    what = "forward" if a.kind is Kind.F else "backward"
    return f"{micro.where}, stage {a.j}, {what}" if micro.where else ""


def _is_over(step: int, t: int) -> bool:
    return step == t or 0 <= step < t  # evaluations count downward from -1


def _without_graph(output: Any) -> Any:
    return map_tensors(Tensor.detach, output)


def _detached(value: Any) -> Any:
    """Return a logged value without the graph, which would keep what autograd saved."""
    return value.detach() if isinstance(value, Tensor) else value


def _discard() -> AbstractContextManager[Any]:
    """Let autograd save nothing: the stage is run again before its backward."""
    return saved_tensors_hooks(lambda x: None, _nothing_saved)


def _nothing_saved(x: Any) -> Tensor:
    raise AssertionError("a graph whose stage is run again was used")
