"""Summaries: what one worker has of a step, told to all workers of its replica.

The last stage's worker has the loss, what the step returned and what it logged. It makes a
summary of them, which travels; all workers read the same in it, and log the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

from torch import Tensor

from lightning_cyclic.compat import LightningModule
from lightning_cyclic.errors import StepError
from lightning_cyclic.plugin.records import (
    Log,
    Record,
    Recorder,
    from_summary,
    further_outputs,
    to_summary,
    weighted_mean,
)
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.partial_step.evidence import log_print
from lightning_cyclic.runtime.partial_step.losses import loss_of
from lightning_cyclic.runtime.partial_step.packets import Outcome
from lightning_cyclic.runtime.partial_step.session import StagewiseSession
from lightning_cyclic.runtime.snapshot import Print, print_of
from lightning_cyclic.runtime.values.plain import decode, encode
from lightning_cyclic.runtime.values.trees import flatten


class StepOutcome(NamedTuple):
    """Hold what every worker is told of a training step.

    Args:
        loss: mean over the samples of the batch, shape (); None if the step gave none for any of
            its micro-batches.
        returned: what the step returned besides the loss.
        records: what it logged.
        stops: 0 if no worker of the replica was asked to stop; where steps flow, else the step
            before which all do.
    """

    loss: Tensor | None
    returned: dict[str, Any]
    records: list[Record]
    stops: int


@final
class Summaries:
    """Write summaries where a step ends, and read them on every worker."""

    def __init__(
        self, module: LightningModule, session: StagewiseSession, reductions: HeldReductions
    ) -> None:
        self._session = session
        self._reductions = reductions
        self._recorder = Recorder(module)
        self.refuses_overflow = True  # no scaler looks for it

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._recorder.holding(self._note), self._reductions.held():
            yield

    def log(self, records: Sequence[Record]) -> None:
        self._recorder.replay(records)

    # ------------------------------------------------------------------ training

    def of_step(self, outcomes: Sequence[Outcome], sizes: Sequence[int], *, stops: int) -> Message:
        """Summarise a training step.

        Raises:
            StepError: a loss that is not finite, or a value that cannot be sent.
        """
        loss, returned, records, _ = self._together(outcomes, sizes)
        mean = [] if loss is None else [loss]
        if self.refuses_overflow and mean:
            self._session.losses.put(mean[0], partial(self._check_finite, self._session.t))
        further, structure = encode(returned, "what training_step returned")
        logged, logs = to_summary(records)
        return Message(
            [*mean, *further, *logged], [len(mean), len(further), structure, logs, stops]
        )

    def _together(self, outcomes: Sequence[Outcome], sizes: Sequence[int]) -> StepOutcome:
        given = [(x.output, n) for x, n in zip(outcomes, sizes, strict=True)]
        given = [(output, n) for output, n in given if output is not None]  # None: skipped
        outputs, of_given = [output for output, _ in given], [n for _, n in given]
        losses = [loss_of(output).detach().reshape(()) for output in outputs]
        mean = weighted_mean(losses, of_given) if losses else None
        records = self._recorder.combine([x.logs for x in outcomes], sizes)
        return StepOutcome(mean, further_outputs(outputs, of_given), records, 0)

    def expect(self, outcomes: Sequence[Outcome], sizes: Sequence[int]) -> dict[str, Print]:
        """Return what is to be told of the plain step, as :meth:`prints` gives it."""
        return self.prints(self._together(outcomes, sizes))

    def prints(self, told: StepOutcome) -> dict[str, Print]:
        """Return what was told of a step, to be compared by name.

        Replicas have metrics of their own, which see their own micro-batches alone.
        """
        found = {} if told.loss is None else {"the loss": print_of(told.loss)}
        for k, x in enumerate(flatten(told.returned)[0]):
            found[f"output {k} of training_step"] = print_of(x)
        is_alone = self._session.config.replicas == 1
        for record in (r for r in told.records if is_alone or r.metric is None):
            found[f"self.log({record.name!r})"] = log_print(record.value, record.arguments)
        return found

    def read_step(self, summary: Message) -> StepOutcome:
        has_loss, num, structure, logs, stops = summary.facts
        loss = summary.tensors[0] if has_loss else None
        others = summary.tensors[has_loss:]
        returned = decode(others[:num], structure)
        return StepOutcome(loss, returned, from_summary(others[num:], logs), stops)

    def _check_finite(self, t: int, loss: float) -> None:
        """Look at the value where it is, once a step: the other workers wait for nothing new."""
        if not math.isfinite(loss):
            raise StepError(
                f"the loss of rank {self._session.rank} is {loss} in step "
                f"{t}; allowed: a finite loss, since every worker would train on "
                "the result; lower the learning rate, clip gradients, or look for the batch with "
                "Trainer(detect_anomaly=True)"
            )

    # ------------------------------------------------------------------ evaluation

    def of_output(self, outcomes: Sequence[Outcome]) -> Message:
        """Summarise the one outcome of a step of evaluation."""
        (outcome,) = outcomes
        tensors, structure = encode(outcome.output, "the output of a step")
        logged, logs = to_summary(self._recorder.combine([outcome.logs], [1]))
        return Message([*tensors, *logged], [len(tensors), structure, logs])

    def tell_output(self, summary: Message) -> Any:
        num, structure, logs = summary.facts
        self.log(from_summary(summary.tensors[num:], logs))
        return decode(summary.tensors[:num], structure)

    def tell_whole(self, step: Callable[[], Any]) -> Any:
        """Run a step on the whole module, as before training; log as :meth:`tell_output` does."""
        logs: list[Log] = []
        with self._recorder.holding(lambda *log: logs.append(log)):
            output = step()
        self.log(self._recorder.combine([logs], [1]))
        return output

    # ------------------------------------------------------------------ the user's step

    def _note(self, name: str, value: Any, arguments: dict[str, Any]) -> None:
        router = self._session.router
        if router is None or (run := router.run) is None:  # the survey, or a metric's own code
            return
        if run.depth and run.target < router.num_stages - 1:
            raise StepError(
                f"self.log({name!r}, ...) is called inside a module of stage {run.target}, where "
                "the other workers do not look; allowed: logging in training_step and in the "
                "LightningModule's own forward; return the value and log it there"
            )
        run.logs.append((name, value, arguments))
