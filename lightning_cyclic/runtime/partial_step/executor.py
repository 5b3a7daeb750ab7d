"""The executor: carry out one worker's program, action by action.

F(i,j), B(i,j)   what the stage runs of the user's step
SEND, RECV       packets, gradients and what else the mail takes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.partial_step.holdings import Holdings
from lightning_cyclic.runtime.partial_step.mail import Mail, ReadState, WriteState
from lightning_cyclic.runtime.partial_step.packets import Gradients, Lesson, Packet
from lightning_cyclic.runtime.partial_step.parcels import ParcelPost
from lightning_cyclic.runtime.partial_step.side_effects import SideEffects
from lightning_cyclic.runtime.partial_step.site import Site
from lightning_cyclic.runtime.partial_step.stage_step import Micro, Outcome, StageStep
from lightning_cyclic.runtime.partial_step.versions import Versions


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
        self._stage = StageStep(site, plan, holdings, effects, seed, remat, versions)
        self._mail = Mail(post, holdings, plan, self._stage.kind_of)

    # ------------------------------------------------------------------ running

    def prepare(
        self, t: int, micro: Mapping[int, Micro], call: Callable[[Any], Any], *, training: bool
    ) -> None:
        """Take in the micro-batches of step ``t`` and how the user's step is called."""
        self._stage.prepare(t, micro, call, training=training)

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
        return self._stage.take_outcomes(t)

    @property
    def learnt(self) -> Mapping[str, Lesson]:
        """Return what micro-batches have taught here, and nobody was told of yet."""
        return self._stage.learnt

    def adopt(self, learnt: Mapping[str, Lesson]) -> None:
        """Take what micro-batches taught for the next ones."""
        self._stage.adopt(learnt)

    def exchange_state(self, read: ReadState, write: WriteState) -> None:
        """Send the optimizer's state of a stage with its parameters, to those who predict."""
        self._mail.read_state, self._mail.write_state = read, write

    def forget(self, t: int) -> None:
        """Forget the micro-batches of step ``t``, behind their last backward; and older ones."""
        self._stage.forget(t)

    # ------------------------------------------------------------------ stages and the mail

    def _forward(self, a: Action) -> None:
        assert a.i is not None
        packets, key = self._mail.packets, (a.t, a.i, a.j)
        packet = self._stage.forward(a, lambda: packets.pop(key, None) or Packet())
        if packet is not None:
            packet.tapes = self._mail.remembered(a, packet.tapes)
            packets[a.t, a.i, a.j + 1] = packet

    def _backward(self, a: Action) -> None:
        assert a.i is not None
        gone = self._stage.backward(a, lambda: self._take_gradients(a))
        self._mail.keep_tied(a.t, a.i, gone.tied)
        if a.j > 0:
            self._mail.grads[a.t, a.i, a.j - 1] = gone.crossed

    def _take_gradients(self, a: Action) -> Gradients:
        assert a.i is not None
        mail, i = self._mail, a.i
        lent = [n for n, _ in self.holdings.lent(a.j) if (a.t, i, n) in mail.tied]
        tied = {n: mail.tied.pop((a.t, i, n)) for n in lent}
        return Gradients(mail.grads.pop((a.t, i, a.j), {}), tied)


def _is_other(a: Action) -> bool:
    new_version = a.payload in (Payload.P, Payload.V) and a.kind is Kind.RECV
    return a.kind is Kind.UPDATE or a.payload is Payload.L or new_version
