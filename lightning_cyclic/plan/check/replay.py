"""Replay programs on integers: receives block, and whatever an action takes must be there.

This is the runtime without tensors. A worker holds versions, activations and partial sums as
names; a message carries a name from one worker to another, in order per payload.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NoReturn, final

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program
from lightning_cyclic.plan.check.refusal import refuse
from lightning_cyclic.plan.passes.ties import (
    first_users,
    gradient_sources,
    later_users,
    reads_tied,
    version_readers,
)

if TYPE_CHECKING:
    from lightning_cyclic.plan import Plan

_Channel = tuple[int, int, Payload]  # from, to, payload


def replay(plan: Plan, programs: tuple[Program, ...]) -> None:
    """Run all programs to their ends.

    Raises:
        ValidationError: a worker waits for ever, messages do not pair up in order, or an action
            takes something that is not there.
    """
    channels: dict[_Channel, deque[Action]] = defaultdict(deque)
    workers = [_Worker(plan, w, program, channels) for w, program in enumerate(programs)]
    turns = [True]
    while any(turns):
        turns = [worker.run() for worker in workers]
    for worker in workers:
        worker.check_end()
    for (source, _, _), channel in channels.items():
        for a in channel:
            refuse(
                plan,
                a,
                source,
                given="sent but never received",
                allowed="as many receives as sends, worker by worker",
                todo="add the receive, or use the programs of make_plan(...)",
            )


@final
class _Worker:
    """Run the program of one worker as far as it gets."""

    def __init__(
        self, plan: Plan, w: int, program: Program, channels: dict[_Channel, deque[Action]]
    ) -> None:
        self.plan = plan
        self.w = w
        self.program = program
        self.channels = channels
        self.position = 0
        self.versions = {(j, 0) for j in range(plan.num_stages) if self._starts_with(j)}
        self.done: set[tuple[Kind | Payload, int, int, int]] = set()  # what, t, i, j
        self.gathered: dict[int, int | None] = {}  # for which version of a stage there is room
        self.sums: dict[tuple[int, int], int] = defaultdict(lambda: -1)  # t, j: up to i
        self.tied: set[tuple[int, int | None, int, int | None]] = set()  # W: t, i, j, peer
        self.shared: set[tuple[Payload, int]] = set()  # D and L: t
        self.replica = plan.axes.placement.replica(w)

    def _starts_with(self, j: int) -> bool:
        """Say whether the worker has the first version of a stage."""
        return not self.plan.axes.sharding.gathers or self.plan.owner(j) == self.w

    def run(self) -> bool:
        """Run until the end or until a message is missing; say whether anything was run."""
        start = self.position
        while self.position < len(self.program):
            a = self.program[self.position]
            if a.kind is Kind.RECV and not self._channel(a):
                break
            _STEPS[a.kind](self, a)
            self.position += 1
        return self.position > start

    def check_end(self) -> None:
        """Check that nothing is left to do."""
        if self.position < len(self.program):
            a = self.program[self.position]
            self._refuse(a, "waits for ever for its message", "a send that is not behind it")
        last = self.plan.num_steps
        for j in range(self.plan.num_stages):
            if self._uses(j) and (j, last) not in self.versions:
                a = self.program[-1]
                self._refuse(a, f"ends without version {last} of stage {j}", "the last version")
        steps = {key[1] for key in self.done if key[0] is Kind.F}
        for t in sorted(steps) if self.w != self.replica[-1] else ():
            if (Payload.L, t) not in self.shared:
                self._refuse(self.program[-1], f"ends without losses of step {t}", "those of all")

    def _uses(self, j: int) -> bool:
        """Say whether the worker needs the last version of a stage, or of what is tied to it."""
        holders = self.plan.axes.placement.workers_of(j)
        return self.w in holders or self.w in version_readers(self.plan, j)

    def _channel(self, a: Action) -> deque[Action]:
        assert a.peer is not None
        assert a.payload is not None
        ends = (self.w, a.peer) if a.kind is Kind.SEND else (a.peer, self.w)
        return self.channels[*ends, a.payload]

    def _forward(self, a: Action) -> None:
        self._need_version(a)
        self._need(a, a.j == 0 or self._has(a, Kind.F, a.j - 1) or self._has(a, Payload.A, a.j))
        self._need(a, not self._is_handed_buffers(a) or self._has(a, Payload.R, a.j))
        self._need(a, self._begins(a.t) or (Payload.D, a.t) in self.shared)
        tied = ((j, reads_tied(self.plan, a, j)) for j in first_users(self.plan, a.j))
        self._need(a, all(version in self.versions for version in tied))
        self._mark(a, Kind.F)

    def _backward(self, a: Action) -> None:
        self._need_version(a)
        is_last = a.j == self.plan.num_stages - 1
        self._need(a, self._has(a, Kind.F, a.j))
        self._need(a, is_last or self._has(a, Kind.B, a.j + 1) or self._has(a, Payload.G, a.j))
        sources = gradient_sources(self.plan, a, self.w)
        self._need(a, all((a.t, a.i, a.j, source) in self.tied for source in sources))
        self._mark(a, Kind.B)
        self._extend_sum(a.t, a.j)

    def _send(self, a: Action) -> None:
        if a.payload in (Payload.P, Payload.V):
            self._need_version(a)
            self._need(a, self.w in self.plan.axes.placement.workers_of(a.j))
        self._need(a, self._is_there(a))
        self._channel(a).append(a)

    def _is_there(self, a: Action) -> bool:
        """Say whether what a message without a version carries is there."""
        match a.payload:
            case Payload.S | Payload.T:
                return self.sums[a.t, a.j] == (self._last_micro if a.i is None else a.i)
            case Payload.A | Payload.G:
                kind, j = (Kind.F, a.j - 1) if a.payload is Payload.A else (Kind.B, a.j + 1)
                return self._has(a, kind, j)
            case Payload.W:
                users = [k for k in later_users(self.plan, a.j) if self._runs(a, k)]
                return bool(users) and all(self._has(a, Kind.B, k) for k in users)
            case Payload.D:
                return self._begins(a.t)
            case Payload.L:
                return self._has_losses(a.t)
            case _:
                return True

    def _begins(self, t: int) -> bool:
        """Say whether the worker is the one that has the batch of a step."""
        return self.w == self.plan.beginner(self.w, t)

    def _runs(self, a: Action, j: int) -> bool:
        return self.plan.worker_of(a.i or 0, j, a.t) == self.w

    def _has_losses(self, t: int) -> bool:
        """Say whether all forwards of a step that end on this worker have been run."""
        j, micros = self.plan.num_stages - 1, range(self.plan.num_micro)
        own = [i for i in micros if self.plan.worker_of(i, j, t) == self.w]
        return bool(own) and all((Kind.F, t, i, j) in self.done for i in own)

    @property
    def _last_micro(self) -> int:
        return self.plan.num_micro - 1

    def _receive(self, a: Action) -> None:
        sent = self._channel(a).popleft()
        if (sent.t, sent.i, sent.j, sent.v) != (a.t, a.i, a.j, a.v):
            self._refuse(a, f"takes what was sent as {sent}", "receives in the order of the sends")
        match a.payload:
            case Payload.P | Payload.V:
                self._receive_version(a)
            case Payload.S | Payload.T:
                self.sums[a.t, a.j] = self._last_micro if a.i is None else a.i
                self._extend_sum(a.t, a.j)
            case Payload.W:
                self._need(a, (a.t, a.i, a.j, a.peer) not in self.tied)
                self.tied.add((a.t, a.i, a.j, a.peer))
            case Payload.D | Payload.L:
                self._need(a, (a.payload, a.t) not in self.shared)
                self.shared.add((a.payload, a.t))
            case _:
                assert a.payload is not None
                self._mark(a, a.payload)

    def _receive_version(self, a: Action) -> None:
        assert a.v is not None
        self._need(a, not self.plan.axes.sharding.gathers or self.gathered.get(a.j) == a.v)
        holds = self.w in self.plan.axes.placement.workers_of(a.j)
        self._need(a, holds == (a.payload is Payload.P))
        self.versions.add((a.j, a.v))

    def _update(self, a: Action) -> None:
        assert a.v is not None
        if self.plan.owner(a.j) != self.w:
            self._refuse(a, "updates somebody else's stage", f"worker {self.plan.owner(a.j)}")
        self._need(a, a.v == a.t + 1)
        self._need(a, (a.j, a.v - 1) in self.versions and (a.j, a.v) not in self.versions)
        self._need(a, self.sums[a.t, a.j] == self._last_micro)
        self.versions.add((a.j, a.v))

    def _gather(self, a: Action) -> None:
        """Make room: the bytes come with the next receive."""
        self._need(a, a.j not in self.gathered)
        self.gathered[a.j] = a.v

    def _free(self, a: Action) -> None:
        self._need_version(a)
        self._need(a, self.gathered.pop(a.j, None) == a.v)
        self.versions = {(j, v) for j, v in self.versions if j != a.j}

    def _extend_sum(self, t: int, j: int) -> None:
        """Add own gradients to the sum in the order of micro-batches, as far as they go.

        Where replicas sum their own, add the whole of these to the sum of the replicas before.
        """
        if self.plan.sums_by_replica:
            number, num_micro = self.replica[0] // len(self.replica), self.plan.num_micro
            end = num_micro - self.plan.width + number
            own = range(number, num_micro, self.plan.width)
            has_before = number == 0 or self.sums[t, j] == end - 1
            if has_before and all((Kind.B, t, i, j) in self.done for i in own):
                self.sums[t, j] = end
            return
        while (Kind.B, t, self.sums[t, j] + 1, j) in self.done:
            self.sums[t, j] += 1

    def _has(self, a: Action, what: Kind | Payload, j: int) -> bool:
        return (what, a.t, a.i or 0, j) in self.done

    def _is_handed_buffers(self, a: Action) -> bool:
        """Say whether the buffers that an F starts from come from another worker."""
        k = a.t * self.plan.num_micro + (a.i or 0)
        if a.j not in self.plan.relayed or k == 0:
            return False
        t, i = divmod(k - 1, self.plan.num_micro)
        return self.plan.worker_of(i, a.j, t) != self.w

    def _mark(self, a: Action, what: Kind | Payload) -> None:
        self._need(a, not self._has(a, what, a.j))
        self.done.add((what, a.t, a.i or 0, a.j))

    def _need_version(self, a: Action) -> None:
        if (a.j, a.v) not in self.versions:
            held = sorted(v for j, v in self.versions if j == a.j)
            self._refuse(
                a, f"takes version {a.v} of stage {a.j}, which is not there", f"one of {held}"
            )

    def _need(self, a: Action, is_there: bool) -> None:
        if not is_there:
            self._refuse(
                a,
                "runs before what it needs is there, or twice",
                "F after F of the stage before, B after F and B of the stage behind, sums in the "
                "order of micro-batches, UPDATE after the version before and the whole sum",
            )

    def _refuse(self, a: Action, given: str, allowed: str) -> NoReturn:
        todo = "move or correct it, or use the programs of make_plan(...)"
        refuse(self.plan, a, self.w, given=given, allowed=allowed, todo=todo)


_STEPS: Final[dict[Kind, Callable[[_Worker, Action], None]]] = {
    Kind.F: _Worker._forward,
    Kind.B: _Worker._backward,
    Kind.SEND: _Worker._send,
    Kind.RECV: _Worker._receive,
    Kind.UPDATE: _Worker._update,
    Kind.GATHER: _Worker._gather,
    Kind.FREE: _Worker._free,
}
