"""The executor: carry out one worker's program, stage by stage, on an unmodified step.

    F(i,j)       run the step for stage j; keep the graph's beginning (entry) and ends (edges)
    B(i,j)       one backward from the ends, with the gradients that came for them
    SEND, RECV   packets, gradients and what else the mail takes

Gradients are left in ``p.grad``, as if the whole step had been run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.partial_step.chance import Chance
from lightning_cyclic.runtime.partial_step.entry import Entry
from lightning_cyclic.runtime.partial_step.ghosts import Handle
from lightning_cyclic.runtime.partial_step.holdings import Holdings
from lightning_cyclic.runtime.partial_step.losses import check_loss, loss_of
from lightning_cyclic.runtime.partial_step.mail import Key, Mail, ReadState, WriteState
from lightning_cyclic.runtime.partial_step.packets import Lesson, Packet
from lightning_cyclic.runtime.partial_step.parcels import ParcelPost
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
class Executor:
    """Run programs of one worker.

    Args:
        site: the module.
        plan: whose programs are run.
        post: how messages travel.
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
        post: ParcelPost,
        holdings: Holdings,
        effects: SideEffects,
        seed: int,
        remat: str = "never",
        versions: Versions | None = None,
    ) -> None:
        self.site = site
        self.plan = plan
        self.holdings = holdings
        self.outcomes: dict[tuple[int, int], Outcome] = {}  # on the last stage's worker
        self.lessons: dict[str, Lesson] = {}
        self.learnt: dict[str, Lesson] = {}
        self._effects = effects
        self._seed = seed
        self._remat = remat
        self._versions = versions
        self._micro: dict[tuple[int, int], Micro] = {}
        self._calls: dict[int, Callable[[Any], Any]] = {}  # by step
        self._training = True
        self._cells: dict[Key, _Cell] = {}
        self._mail = Mail(post, holdings, plan, self._kind)

    # ------------------------------------------------------------------ running

    def prepare(
        self, t: int, micro: Mapping[int, Micro], call: Callable[[Any], Any], *, training: bool
    ) -> None:
        """Take in the micro-batches of step ``t`` and how the user's step is called."""
        self._micro |= {(t, i): m for i, m in micro.items()}
        self._calls[t] = call
        self._training = training

    def run(
        self,
        actions: Iterable[Action],
        others: Callable[[Action], None] | None = None,
        done: Callable[[Action], None] | None = None,
    ) -> None:
        """Carry out actions in their order.

        Args:
            actions: F, B and messages.
            others: carries out what else there is: updates, new versions and outcomes.
            done: is told of each action that was not for ``others``, when it is over.
        """
        actions = list(actions)
        with self.site.open():
            for n, a in enumerate(actions):
                if others is not None and _is_other(a):
                    others(a)
                    continue
                if a.kind is Kind.RECV:
                    self._mail.receive(actions, n)
                elif a.kind is Kind.SEND:
                    self._mail.send(a)
                elif a.kind is Kind.F:
                    self._forward(a)
                elif a.kind is Kind.B:
                    self._backward(a)
                if done is not None:
                    done(a)

    def receive(self, a: Action) -> None:
        """Take in the message of one action."""
        self._mail.receive([a], 0)

    def take_outcomes(self, t: int) -> list[Outcome]:
        """Return what the micro-batches of step ``t`` gave, in their order; none elsewhere."""
        taken = sorted(k for k in self.outcomes if k[0] == t)
        return [self.outcomes.pop(k) for k in taken]

    def adopt(self, learnt: Mapping[str, Lesson]) -> None:
        """Take what micro-batches taught for the next ones."""
        self.lessons |= learnt
        self.learnt = {}

    def exchange_state(self, read: ReadState, write: WriteState) -> None:
        """Send the optimizer's state of a stage with its parameters, to those who predict."""
        self._mail.read_state, self._mail.write_state = read, write

    def forget(self, t: int) -> None:
        """Forget the micro-batches of step ``t``, behind their last backward; and older ones."""
        self._micro = {k: m for k, m in self._micro.items() if not _is_over(k[0], t)}
        self._calls = {k: call for k, call in self._calls.items() if not _is_over(k, t)}

    def _kind(self, a: Action) -> str:
        assert a.i is not None
        return self._micro[a.t, a.i].kind

    # ------------------------------------------------------------------ forward

    def _forward(self, a: Action) -> None:
        assert a.i is not None
        t, i, j = a.t, a.i, a.j
        packet = self._mail.packets.pop((t, i, j), None) or Packet()
        micro = self._micro[t, i]
        lesson = None if packet.learning else self.lessons.get(micro.family)
        if lesson is not None and tuple(map(names, packet.tapes)) != lesson.paths[:j]:
            lesson = None
        again = self._training and self._is_run_again(a)
        entry = Entry(packet.tensors, packet.with_grad, copied=again)
        run = self._new_run(a, packet, entry, lesson)
        cell = _Cell(packet=packet)
        call = self._calls[t]
        with _discard() if again else nullcontext(), self._showing(a, cell):
            output = run(lambda: call(_fresh(micro.batch)))
        self._finish_forward(a, run, cell, entry, output, lesson, again)

    @contextmanager
    def _showing(self, a: Action, cell: _Cell) -> Iterator[None]:
        """Let the parameters of a stage have the version that the plan says."""
        if self._versions is None or not self._training:
            yield
            return
        if a.kind is Kind.F:
            showing = self._versions.shown(a, sorted({a.j, *self.holdings.lenders(a.j)}))
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
            self.site,
            a.j,
            tapes=packet.tapes,
            received=entry.values,
            wanted=again if lesson is None else lesson.wanted(a.j),
            path=None if lesson is None or a.j >= len(lesson.paths) else lesson.paths[a.j],
            sharing=Sharing(packet.shared, packet.stale),
            chance=Chance(self._seed, a.t, a.i, self.site.device),
        )

    def _finish_forward(
        self, a: Action, run: Run, cell: _Cell, entry: Entry, output: Any,
        lesson: Lesson | None, again: bool,
    ) -> None:  # fmt: skip
        assert a.i is not None
        t, i, j, packet = a.t, a.i, a.j, cell.packet
        entry.pass_changes_on()
        is_last = j == self.plan.num_stages - 1
        used = packet.used | dict.fromkeys(run.used, j)
        if run.has_strayed and lesson is not None:  # what stages before used was not asked for
            used = {h: last for h, last in lesson.last_use.items() if h[0] < j} | used
            lesson = None
        if is_last:
            self._finish_last(a, run, packet, output, used, lesson)
        else:
            packet_out = self._packet_out(a, run, packet, entry, used, learning=lesson is None)
            self._mail.packets[t, i, j + 1] = packet_out
        if not self._training:
            return
        if again:
            cell.again = frozenset(run.captured)
        else:
            self._keep(cell, run, entry, output)
            cell.packet = replace(packet, tensors={})
        self._cells[t, i, j] = cell

    def _keep(self, cell: _Cell, run: Run, entry: Entry, output: Any) -> None:
        cell.entry = entry
        cell.edges = {h: get_gradient_edge(x) for h, x in run.captured.items() if x.requires_grad}
        entry.values = {}
        if run.target == self.plan.num_stages - 1:
            cell.loss = loss_of(output)

    def _packet_out(
        self, a: Action, run: Run, packet: Packet, entry: Entry, used: dict[Handle, int],
        *, learning: bool,
    ) -> Packet:  # fmt: skip
        handles = sorted(run.captured)
        return Packet(
            tensors={h: run.captured[h].detach() for h in handles},
            with_grad=frozenset(h for h in handles if run.captured[h].requires_grad),
            tapes=self._mail.remembered(a, (*packet.tapes, tuple(run.tape))),
            used=used if learning else {},
            learning=learning,
            shared=groups_of(run.captured, entry.values, packet.shared),
            stale={h: line for h, line in run.sharing.stale.items() if h in run.captured},
        )

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
        self.outcomes[a.t, a.i] = Outcome(_without_graph(output), logs)
        if lesson is None:
            family = self._micro[a.t, a.i].family
            self.learnt[family] = Lesson.merge(self.learnt.get(family), packet.tapes, used)

    def _is_run_again(self, a: Action) -> bool:
        assert a.i is not None
        if self._versions is not None and self._versions.recomputes(a):
            return True
        if self._remat == "except_last":
            return a.i < self.plan.num_micro - self.plan.width
        return self._remat == "always"

    # ------------------------------------------------------------------ backward

    def _backward(self, a: Action) -> None:
        assert a.i is not None
        t, i, j = a.t, a.i, a.j
        cell = self._cells.pop((t, i, j))
        if cell.again is None:
            self._backward_of(a, cell)
        else:
            with self._effects.undone(j):  # behind the backward, which may look at buffers
                self._run_again(a, cell)
                self._backward_of(a, cell)

    def _backward_of(self, a: Action, cell: _Cell) -> None:
        assert a.i is not None
        t, i, j = a.t, a.i, a.j
        grads = self._mail.grads.pop((t, i, j), {})
        roots: list[Any] = []
        root_grads: list[Tensor] = []
        if cell.loss is not None and cell.loss.requires_grad:
            roots.append(cell.loss)
            root_grads.append(self._micro[t, i].weight(torch.ones_like(cell.loss)))
        for h, edge in cell.edges.items():
            if h in grads:
                roots.append(edge)
                root_grads.append(grads[h])
        for p, grad in self._tied_roots(t, i, j, cell):
            roots.append(get_gradient_edge(p))
            root_grads.append(grad)
        with self.holdings.apart(j) as taken, self._accumulating(cell):
            if roots:
                torch.autograd.backward(roots, root_grads)
        self._mail.keep_tied(t, i, taken)
        assert cell.entry is not None
        self._mail.grads[t, i, j - 1] = cell.entry.grads

    def _run_again(self, a: Action, cell: _Cell) -> None:
        assert a.i is not None
        batch, call = self._micro[a.t, a.i].batch, self._calls[a.t]
        entry = Entry(cell.packet.tensors, cell.packet.with_grad, copied=False)
        run = self._new_run(a, cell.packet, entry, None, cell.again)
        with torch.enable_grad(), self._showing(a, cell):
            output = run(lambda: call(_fresh(batch)))
        self._keep(cell, run, entry, output)
        cell.packet = Packet()

    def _accumulating(self, cell: _Cell) -> AbstractContextManager[None]:
        return self._versions.backward(cell.versions) if self._versions else nullcontext()

    def _tied_roots(
        self, t: int, i: int, j: int, cell: _Cell
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the gradients that later stages have for parameters of this one."""
        shown = {n: q for version in cell.versions for n, q in version.items()}
        return [
            (shown.get(name, p), self._mail.tied.pop((t, i, name)))
            for name, p in self.holdings.lent(j)
            if (t, i, name) in self._mail.tied
        ]


def _is_over(step: int, t: int) -> bool:
    return step == t or 0 <= step < t  # evaluations count downward from -1


def _is_other(a: Action) -> bool:
    new_version = a.payload in (Payload.P, Payload.V) and a.kind is Kind.RECV
    return a.kind is Kind.UPDATE or a.payload is Payload.L or new_version


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
