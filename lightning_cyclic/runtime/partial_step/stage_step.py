"""F and B of one stage: the user's step, run as far as one stage, and its backward.

    F(i,j)   run the step for stage j; keep the graph's beginning (entry) and ends (edges)
    B(i,j)   one backward from the ends, with the gradients that came for them

What came from other stages is asked for when it is needed, and what goes to them is returned: how
it travels is no concern of this file. Gradients of the stage's own parameters are left in
``p.grad``, as if the whole step had been run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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
from lightning_cyclic.runtime.partial_step.chance import Chance
from lightning_cyclic.runtime.partial_step.entry import Entry
from lightning_cyclic.runtime.partial_step.ghosts import Handle
from lightning_cyclic.runtime.partial_step.holdings import Holdings
from lightning_cyclic.runtime.partial_step.losses import check_loss, loss_of
from lightning_cyclic.runtime.partial_step.packets import Gradients, Lesson, Packet
from lightning_cyclic.runtime.partial_step.run import Run
from lightning_cyclic.runtime.partial_step.sharing import Sharing, groups_of
from lightning_cyclic.runtime.partial_step.side_effects import SideEffects
from lightning_cyclic.runtime.partial_step.site import Site
from lightning_cyclic.runtime.partial_step.tape import names
from lightning_cyclic.runtime.partial_step.versions import Version, Versions
from lightning_cyclic.runtime.values.trees import map_tensors


class Micro(NamedTuple):
    """Hold one micro-batch.

    Args:
        batch: what the step is given.
        weight: its share of the step's loss, as a function of a tensor of ones.
        kind: what its tensors look like, sizes included.
        family: the same without sizes.
    """

    batch: Any
    weight: Callable[[Tensor], Tensor]
    kind: str
    family: str


class Outcome(NamedTuple):
    """Hold what the last stage got from one micro-batch."""

    output: Any
    logs: list[tuple[str, Any, dict[str, Any]]]


@dataclass(slots=True, kw_only=True)
class _Cell:
    """Hold what B(i,j) needs of F(i,j)."""

    packet: Packet
    entry: Entry | None = None
    edges: dict[Handle, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    again: frozenset[Handle] | None = None  # what to capture when it is run again
    versions: tuple[Version, ...] = ()  # whose stand-ins the graph holds


@final
class StageStep:
    """Run forwards and backwards of the stages of one worker.

    Args:
        site: the module.
        plan: which stages there are, and what is run again.
        holdings: the parameters that this worker has.
        effects: what running a stage again must not repeat.
        seed: of the randomness.
        remat: "never", "always" or "except_last".
        versions: of the parameters, where forwards read older ones too.
    """

    def __init__(
        self,
        site: Site,
        plan: Plan,
        holdings: Holdings,
        effects: SideEffects,
        seed: int,
        remat: str = "never",
        versions: Versions | None = None,
    ) -> None:
        self.learnt: dict[str, Lesson] = {}
        self._site = site
        self._plan = plan
        self._holdings = holdings
        self._effects = effects
        self._seed = seed
        self._remat = remat
        self._versions = versions
        self._lessons: dict[str, Lesson] = {}
        self._outcomes: dict[tuple[int, int], Outcome] = {}  # on the last stage's worker
        self._micro: dict[tuple[int, int], Micro] = {}
        self._calls: dict[int, Callable[[Any], Any]] = {}  # by step
        self._training = True
        self._cells: dict[tuple[int, int, int], _Cell] = {}  # by step, micro-batch, stage
        self._borrowing = {j for j in range(plan.num_stages) if holdings.borrowed(j)}

    # ------------------------------------------------------------------ micro-batches

    def prepare(
        self, t: int, micro: Mapping[int, Micro], call: Callable[[Any], Any], *, training: bool
    ) -> None:
        """Take in the micro-batches of step ``t`` and how the user's step is called."""
        self._micro |= {(t, i): m for i, m in micro.items()}
        self._calls[t] = call
        self._training = training

    def kind_of(self, a: Action) -> str:
        """Return what the tensors of an action's micro-batch look like."""
        assert a.i is not None
        return self._micro[a.t, a.i].kind

    def take_outcomes(self, t: int) -> list[Outcome]:
        """Return what the micro-batches of step ``t`` gave, in their order; none elsewhere."""
        taken = sorted(k for k in self._outcomes if k[0] == t)
        return [self._outcomes.pop(k) for k in taken]

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

        Args:
            a: the forward.
            take_packet: gives what crossed from the stage before.

        Returns:
            What crosses to the next stage; None behind the last.
        """
        assert a.i is not None
        packet, micro = take_packet(), self._micro[a.t, a.i]
        lesson = None if packet.learning else self._lessons.get(micro.family)
        if lesson is not None and tuple(map(names, packet.tapes)) != lesson.paths[: a.j]:
            lesson = None
        again = self._training and self._is_run_again(a)
        entry = Entry(packet.tensors, packet.with_grad, copied=again)
        run = self._new_run(a, packet, entry, lesson)
        cell = _Cell(packet=packet)
        call = self._calls[a.t]
        with _discard() if again else nullcontext(), self._showing(a, cell):
            output = run(lambda: call(_fresh(micro.batch)))
        return self._finish_forward(a, run, cell, entry, output, lesson, again)

    @contextmanager
    def _showing(self, a: Action, cell: _Cell) -> Iterator[None]:
        """Let the parameters of a stage have the version that the plan says."""
        if self._versions is None or not self._training:
            yield
            return
        if a.kind is Kind.F:
            showing = self._versions.shown(a, sorted({a.j, *self._holdings.lenders(a.j)}))
        else:
            showing = self._versions.shown_again(a, cell.versions)
        with showing as cell.versions:
            yield

    def _new_run(
        self, a: Action, packet: Packet, entry: Entry, lesson: Lesson | None,
        again: frozenset[Handle] | None = None,
    ) -> Run:  # fmt: skip
        assert a.i is not None
        return Run(
            self._site,
            a.j,
            tapes=packet.tapes,
            received=entry.values,
            wanted=again if lesson is None else lesson.wanted(a.j),
            path=None if lesson is None or a.j >= len(lesson.paths) else lesson.paths[a.j],
            sharing=Sharing(packet.shared, packet.stale),
            chance=Chance(self._seed, a.t, a.i, self._site.device),
        )

    def _finish_forward(
        self, a: Action, run: Run, cell: _Cell, entry: Entry, output: Any,
        lesson: Lesson | None, again: bool,
    ) -> Packet | None:  # fmt: skip
        assert a.i is not None
        j, packet, packet_out = a.j, cell.packet, None
        entry.pass_changes_on()
        used = packet.used | dict.fromkeys(run.used, j)
        if run.has_strayed and lesson is not None:  # what stages before used was not asked for
            used = {h: last for h, last in lesson.last_use.items() if h[0] < j} | used
            lesson = None
        if j == self._plan.num_stages - 1:
            self._finish_last(a, run, packet, output, used, lesson)
        else:
            packet_out = _packet_out(run, packet, entry, used, learning=lesson is None)
        if not self._training:
            return packet_out
        if again:
            cell.again = frozenset(run.captured)
        else:
            self._keep(cell, run, entry, output)
            cell.packet = replace(packet, tensors={})
        self._cells[a.t, a.i, j] = cell
        return packet_out

    def _keep(self, cell: _Cell, run: Run, entry: Entry, output: Any) -> None:
        cell.entry = entry
        cell.edges = {h: get_gradient_edge(x) for h, x in run.captured.items() if x.requires_grad}
        entry.values = {}
        if run.target == self._plan.num_stages - 1:
            cell.loss = loss_of(output)

    def _finish_last(
        self, a: Action, run: Run, packet: Packet, output: Any, used: dict[Handle, int],
        lesson: Lesson | None,
    ) -> None:  # fmt: skip
        assert a.i is not None
        if self._training:
            check_loss(output, a.t)
        logs = [(name, _detached(run.filled(value)), kw) for name, value, kw in run.logs]
        run.logs = []  # they hold graphs
        used |= dict.fromkeys(run.used, a.j)
        self._outcomes[a.t, a.i] = Outcome(_without_graph(output), logs)
        if lesson is None:
            family = self._micro[a.t, a.i].family
            self.learnt[family] = Lesson.merge(self.learnt.get(family), packet.tapes, used)

    def _is_run_again(self, a: Action) -> bool:
        assert a.i is not None
        if self._versions is not None and self._versions.recomputes(a):
            return True
        if self._remat == "except_last":
            return a.i < self._plan.num_micro - self._plan.width
        return self._remat == "always"

    # ------------------------------------------------------------------ backward

    def backward(self, a: Action, take_gradients: Callable[[], Gradients]) -> Gradients:
        """Run B(i,j).

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
        if cell.again is None:
            return self._backward_of(a, cell, take_gradients())
        with self._effects.undone(a.j):  # behind the backward, which may look at buffers
            self._run_again(a, cell)
            return self._backward_of(a, cell, take_gradients())

    def _backward_of(self, a: Action, cell: _Cell, came: Gradients) -> Gradients:
        assert a.i is not None
        roots: list[Any] = []
        root_grads: list[Tensor] = []
        if cell.loss is not None and cell.loss.requires_grad:
            roots.append(cell.loss)
            root_grads.append(self._micro[a.t, a.i].weight(torch.ones_like(cell.loss)))
        for h, edge in cell.edges.items():
            if h in came.crossed:
                roots.append(edge)
                root_grads.append(came.crossed[h])
        for p, grad in self._tied_roots(a.j, cell, came.tied) if came.tied else ():
            roots.append(get_gradient_edge(p))
            root_grads.append(grad)
        with self._apart(a.j) as taken, self._accumulating(cell):
            if roots:
                _run_backward(tuple(roots), tuple(root_grads))
        assert cell.entry is not None
        return Gradients(cell.entry.grads, taken)

    def _run_again(self, a: Action, cell: _Cell) -> None:
        assert a.i is not None
        batch, call = self._micro[a.t, a.i].batch, self._calls[a.t]
        entry = Entry(cell.packet.tensors, cell.packet.with_grad, copied=False)
        run = self._new_run(a, cell.packet, entry, None, cell.again)
        with torch.enable_grad(), self._showing(a, cell):
            output = run(lambda: call(_fresh(batch)))
        self._keep(cell, run, entry, output)
        cell.packet = Packet()

    def _apart(self, j: int) -> AbstractContextManager[dict[str, Tensor]]:
        return self._holdings.apart(j) if j in self._borrowing else nullcontext({})

    def _accumulating(self, cell: _Cell) -> AbstractContextManager[None]:
        return self._versions.backward(cell.versions) if self._versions else nullcontext()

    def _tied_roots(
        self, j: int, cell: _Cell, tied: Mapping[str, Tensor]
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the gradients that later stages have for parameters of this one."""
        shown = {n: q for version in cell.versions for n, q in version.items()}
        lent = self._holdings.lent(j)
        return [(shown.get(name, p), tied[name]) for name, p in lent if name in tied]


def _packet_out(
    run: Run, packet: Packet, entry: Entry, used: dict[Handle, int], *, learning: bool
) -> Packet:
    handles = sorted(run.captured)
    return Packet(
        tensors={h: run.captured[h].detach() for h in handles},
        with_grad=frozenset(h for h in handles if run.captured[h].requires_grad),
        tapes=(*packet.tapes, tuple(run.tape)),
        used=used if learning else {},
        learning=learning,
        shared=groups_of(run.captured, entry.values, packet.shared),
        stale={h: line for h, line in run.sharing.stale.items() if h in run.captured},
    )


def _run_backward(roots: tuple[Any, ...], grads: tuple[Tensor, ...]) -> None:
    """Do what torch.autograd.backward does, but for what it checks of gradients in Python."""
    _engine_run_backward(
        roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _is_over(step: int, t: int) -> bool:
    return step == t or 0 <= step < t  # evaluations count downward from -1


def _fresh(batch: Any) -> Any:
    """Return a batch that the user's code may change, as it is run once for each stage."""
    return map_tensors(torch.clone, batch)


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
