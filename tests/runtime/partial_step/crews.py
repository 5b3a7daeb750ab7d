"""Crews: every worker of a plan without a flush, in one process over the local transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan, make_plan
from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig, Summarise
from lightning_cyclic.runtime.partial_step.losses import loss_of
from lightning_cyclic.runtime.partial_step.session import StagewiseSession
from lightning_cyclic.runtime.stages.cuts import choose_cuts
from lightning_cyclic.runtime.stages.survey import survey
from tests.harness.local_transport import LocalTransport, PostOffice

NUM_STEPS = 11
ROWS = 3  # of a micro-batch


def batch(k: int) -> Tensor:
    """Return micro-batch number k."""
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(k))


class Crew:
    """Every worker of a plan, each in a thread of its own.

    Args:
        plan: of the workers.
        make_model: a module with eight layers and a method ``step``.
        make_optimizer: of its parameters.
        remat: "never", "always" or "except_last".
        device: of all workers; on a GPU each has a stream of its own.
        join: (post office, worker, number of workers) -> its transport. [the local one]
        starts: of stages. [of as many layers each]
        **options: of the session's configuration.
    """

    def __init__(
        self, plan: Plan, make_model: Callable[[], Any],
        make_optimizer: Callable[[Any], torch.optim.Optimizer], *, remat: str = "never",
        device: str = "cpu", join: Callable[[PostOffice, int, int], Any] = LocalTransport,
        starts: Sequence[str] = (), **options: Any,
    ) -> None:  # fmt: skip
        self.plan, self.make_optimizer, self.options = plan, make_optimizer, options
        self.make_model, self.device = make_model, torch.device(device)
        model = make_model()
        size = 8 // plan.num_stages
        starts = starts or [f"layers.{k}" for k in range(size, 8, size)]
        self.cuts = choose_cuts(survey(model, lambda: model.step(batch(0))), starts)
        office = PostOffice()
        self.models = [make_model().to(device) for _ in range(plan.num_workers)]
        self.optimizers = [make_optimizer(m.parameters()) for m in self.models]
        self.losses: list[dict[int, float]] = [{} for _ in self.models]
        self.sessions = [
            StagewiseSession(
                model, self._config(w, remat),
                join(office, w, plan.num_workers) if plan.num_workers > 1 else None,
                w, plan.num_workers, self.device,
            )
            for w, model in enumerate(self.models)
        ]  # fmt: skip

    def _config(self, w: int, remat: str) -> StagewiseConfig:
        plan = self.plan
        more = {"replicas": plan.replicas} if plan.replicas > 1 else {}
        options = {"apply": lambda t, j: self.apply(w, t, j)} | self.options

        def planned(num_stages: int, num_microbatches: int, tied: Any, relayed: Any) -> Plan:
            return make_plan(
                plan.preset, num_stages=num_stages, num_workers=plan.num_workers,
                num_microbatches=num_microbatches, tied=tied, relayed=relayed, **more,
            )  # fmt: skip

        return StagewiseConfig(
            make_plan=planned, find_cuts=lambda module, step: self.cuts,
            num_microbatches=plan.num_microbatches // plan.replicas, replicas=plan.replicas,
            remat=remat, seed=0,
            expected_stages=plan.num_stages,
            guess=lambda stage, v, updates: self.guess(w, stage, v, updates), **options,
        )  # fmt: skip

    def apply(self, w: int, t: int, j: int) -> None:
        """Update."""
        self.optimizers[w].step()

    def guess(self, w: int, stage: Sequence[nn.Parameter], v: int, updates: int) -> list[Tensor]:
        """Predict."""
        raise NotImplementedError

    def train(self, flush_after: tuple[int, ...] = ()) -> None:
        """Train all workers for as many steps as there are."""

        def train(w: int) -> None:
            with self._stream():
                self._train(w, flush_after)

        run_all(self.sessions, train)

    def _stream(self) -> AbstractContextManager[Any]:
        if self.device.type == "cpu":
            return nullcontext()
        torch.cuda.synchronize()  # the models are made on another stream
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def step(self, w: int, t: int) -> None:
        """Do what a worker does with the batch of a step."""
        m = self.plan.num_microbatches
        given = torch.cat([batch(t * m + i) for i in range(m)]).to(self.device)
        if w != self.plan.worker_of(0, 0, t):
            given = torch.zeros(1, 6, device=self.device)
        self.sessions[w].train(given, self.models[w].step, summarise)

    def _train(self, w: int, flush_after: tuple[int, ...]) -> None:
        torch.set_num_threads(1)
        session = self.sessions[w]
        session.begin(self.cuts)
        for t in range(NUM_STEPS):
            self.step(w, t)
            if t in flush_after:
                session.flush()
        session.flush()
        arrived = session.take_arrived()
        self.losses[w] = {t: float(summary.tensors[0]) for t, summary in arrived}

    def compare(self, expected: nn.Module) -> None:
        """Compare what each worker holds, bit by bit."""
        compare(self.sessions, expected)


def run_all(sessions: Sequence[StagewiseSession], train: Callable[[int], None]) -> None:
    """Train the worker of each session in a thread of its own."""
    errors: list[BaseException] = []

    def run(w: int) -> None:
        try:
            train(w)
        except BaseException as error:
            errors.append(error)
            sessions[w].fail(error)

    threads = [threading.Thread(target=run, args=(w,)) for w in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def compare(sessions: Sequence[StagewiseSession], expected: nn.Module) -> None:
    """Compare what the worker of each session holds, bit by bit."""
    named = dict(expected.named_parameters()) | dict(expected.named_buffers())
    for session in sessions:
        assert session.cuts is not None
        own = dict(session.module.named_parameters()) | dict(session.module.named_buffers())
        for j in session.own.ownership.stages:
            for name in [*session.cuts.parameters[j], *session.cuts.buffers[j]]:
                assert torch.equal(own[name], named[name]), (session.worker, name)


def summarise(sizes: list[int]) -> Summarise:
    """Return what sums a step up: by the mean of its losses."""
    return lambda outcomes: Message([torch.stack([loss_of(x.output) for x in outcomes]).mean()])
