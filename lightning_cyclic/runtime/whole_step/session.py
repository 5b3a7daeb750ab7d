"""A session: one worker's training from the first step to the last.

first step      find the stages (bootstrap), make the plan and the engine in its middle
later steps     the engine
between steps   flush, state, stop
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.absent import is_absent, make_present, num_bytes_of
from lightning_cyclic.runtime.meta import lending
from lightning_cyclic.runtime.session import AbstractSession
from lightning_cyclic.runtime.stages.stage_map import Profile, StageMap, make_stages
from lightning_cyclic.runtime.stages.survey import survey
from lightning_cyclic.runtime.state_tier import ALL_STAYS, StateTiers
from lightning_cyclic.runtime.transport import CountingTransport
from lightning_cyclic.runtime.transport.choice import link
from lightning_cyclic.runtime.values.trees import map_tensors
from lightning_cyclic.runtime.weight_watch import Weights, WeightWatch, changed_within
from lightning_cyclic.runtime.whole_step.bootstrap import FirstStep
from lightning_cyclic.runtime.whole_step.config import SessionConfig
from lightning_cyclic.runtime.whole_step.draws import KeyedDraws
from lightning_cyclic.runtime.whole_step.engine import Engine, Update
from lightning_cyclic.runtime.whole_step.engine_state import EngineState
from lightning_cyclic.runtime.whole_step.tiers import PlannedTiers

_LEAST_BYTES = 3 << 19  # of a fine stage: below, its messages cost more than they overlap
_MOST_FINE = 8


def auto_stages(num_workers: int, num_bytes: int, *, come_and_go: bool = False) -> int:
    """Return the number of stages that "auto" stands for: of sizes alone, never of timing.

    One stage per worker, or two (up to 8 in all) where each has 1.5 MiB: they overlap better where
    bytes take long, but every message has a price of its own (`python -m benchmarks replicated`).

    Args:
        num_workers: how many workers there are.
        num_bytes: bytes of all trained parameters.
        come_and_go: whether optimizer state of stages does, which takes less room in small parts.
    """
    if come_and_go:
        return max(_MOST_FINE, 2 * num_workers)
    fine = 2 * num_workers
    return fine if fine <= _MOST_FINE and num_bytes >= fine * _LEAST_BYTES else num_workers


@final
class Session(AbstractSession):
    """Train one worker's replica.

    Args:
        parameters: name -> parameter, for those that the optimizer trains.
        update: applies the total gradients of a step to the owned stages (step, stages).
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        config: SessionConfig,
        worker: int,
        device: torch.device,
        update: Update,
    ) -> None:
        super().__init__(module, config.assembly, worker, worker, device, _not_relayed)
        self._trained = dict(parameters)
        self._config = config
        self._probe = config.make_plan(1, (), (), 1)  # what does not depend on the stages
        self._is_local = self._probe.axes.weights.is_local  # weights, and buffers, of its own
        # an owner adds up gradients of what is trained when a step begins, and of nothing else
        may_freeze = not self._probe.axes.sharding.gathers
        self._watch = WeightWatch(worker, may_freeze=may_freeze, buffer_changed=_not_relayed)
        self._update = update
        self._seed = config.seed
        self.stop_requested = False
        self._batches = 0  # of the step under way
        self._rounds = 1  # of the plan
        self._weights: Sequence[Weights] = ()  # by stage, when they are known, and the rest
        self.engine: Engine | None = None
        self.stages: StageMap | None = None
        # made here, by all workers at once, so that a failure in the first step has a board
        self.transport = self._new_transport()
        self._first: FirstStep | None = self._new_first_step(parameters)
        # stages that are chosen in the first step are not known in it: it draws as one stage
        named = () if isinstance(config.stages, int | str) else config.stages
        self._draws = KeyedDraws(module, named, device)
        self._has_first_draws = True
        # no worker may ever have the whole module
        self.is_apart = any(map(is_absent, module.parameters()))

    @property
    def looks_first(self) -> bool:
        """Say whether stages are found before the first step, and not in it."""
        return self.is_apart or self._config.tiers is not None or self._is_local

    @property
    def t(self) -> int:
        """Return the step under way, or the number of steps done between steps."""
        return self.engine.t if self.engine else 0

    @property
    @override
    def plan(self) -> Plan | None:
        return self.engine.plan if self.engine is not None else None

    @property
    @override
    def stage_of(self) -> dict[str, int] | None:
        return self.stages.stage_of if self.stages is not None else None

    @property
    @override
    def starts(self) -> tuple[str, ...] | None:
        return None if self.stages is None else self.stages.starts

    @property
    def is_between_steps(self) -> bool:
        """Say whether the batch that comes is the first of its step."""
        return self._batches == 0

    @property
    def batches(self) -> int:
        """Count the batches of the step under way whose forwards have begun."""
        return self._batches

    @property
    @override
    def with_state(self) -> list[nn.Parameter]:
        # what it updates
        engine = self.engine
        if engine is None:
            return []
        assert self.stages is not None
        named, stages = self.named(), self.stages.stages
        weights = (named[n] for j in engine.optimized for n in stages[j].parameters)
        return list(map(self._config.forms.trained, weights))

    @override
    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    @property
    def runs_together(self) -> bool:
        """Say whether all workers run a step's code at once, and none waits for another in it."""
        plan = self.plan or self._probe
        has_buffers = next(self.module.buffers(), None) is not None  # handed on in step 0
        hands_on = has_buffers if self.plan is None else bool(plan.relayed)
        return plan.axes.weights.at_end_of_step and not (plan.axes.sharding.gathers or hands_on)

    @property
    def foreign_names(self) -> frozenset[str]:
        """Return the names of the parameters that are here only now and then, if any are so."""
        shards = None if self.engine is None else self.engine.shards
        return frozenset(shards.foreign if self.is_apart and shards is not None else ())

    @property
    def stopping(self) -> bool:
        return self.engine is not None and self.engine.stopping

    # ------------------------------------------------------------------ steps

    def find_stages(self, batch: Any, step: Callable[[], Any]) -> None:
        """Find the stages before the first step, where memory is short.

        No worker may have the whole module; or weights would be there twice in the first step, as
        its graph holds them where they were before they were laid out by stages.

        Args:
            batch: that this worker has been given.
            step: runs the user's step on a copy of it; it leaves nothing behind, and the
                parameters of a module are there while it is called.
        """
        if not self.looks_first or self.engine is not None:
            return
        first = self._first
        assert first is not None
        counts = self._config.tiers is not None and self._probe.num_workers == 1

        def noted() -> Any:
            # a graph shows what activations take; it would hold weights that are lent, but where
            # one worker counts
            grad = torch.set_grad_enabled(not self.is_apart or counts)
            with grad, first.forward(batch, first=True):
                outputs = step()
            first.note()
            return map_tensors(torch.Tensor.detach, outputs)

        draws = self._draws.keyed(self._seed, self.t, self.worker)
        with draws, lending(self.module, graphs_hold=not counts):
            seen = survey(self.module, noted)  # which puts back what the step changes
        if seen.written and self._probe.num_workers > 1:
            raise changed_within(seen.written[0].name, self.worker, self.t)
        self._start(self._find(), None)
        self._first = None

    def take_rounds(self, rounds: int) -> None:
        """Run so many batches in each step from now on; behind a flush, on all workers at once."""
        self._rounds = rounds
        if self.engine is not None:
            self.engine.follow(self._make_plan())

    @property
    def rounds(self) -> int:
        """Return how many batches a step has, as far as the plan knows."""
        return self._rounds

    @contextmanager
    def forward(self, batch: Any, *, last: bool, ends: bool = False) -> Iterator[None]:
        """Run the body as the training step of one batch.

        Args:
            batch: what the step is given.
            last: False while gradients only accumulate on this worker.
            ends: whether it is this worker's last batch of the epoch.
        """
        first = self._batches == 0
        key = self.worker + (self._batches << 32)  # the micro-batch, and which of its batches
        self._batches = 0 if last else self._batches + 1
        if first:
            self._begin_watch()
        with self._draws.keyed(self._seed, self.t, key):
            if self.engine is not None:
                with self.engine.forward(first=first, last=last):
                    yield
            else:
                with self._first_forward(batch, first=first, last=last):
                    yield
        if last and self.engine is None:
            self._begin()
        if self.engine is not None:
            self.engine.ends = ends
        if last:
            self._still.check(self.t)

    @contextmanager
    def backward(self, loss: Tensor, *, last: bool) -> Iterator[None]:
        """Run the body as the backward of one batch, scaled by 1/num_microbatches.

        Raises:
            StepError: the loss has no graph, or is not finite.
        """
        self._check_loss(loss)
        if self.engine is None:  # accumulating in the very first step: gradients stay in p.grad
            num_microbatches = self._probe.num_microbatches
            _scale_gradient(loss, num_microbatches)
            yield
            return
        if not self._is_local:  # else its micro-batch is its batch
            _scale_gradient(loss, self.engine.plan.num_microbatches // self.engine.plan.rounds)
        with self.engine.backward(last_of_window=last):
            yield

    def end_step(self) -> None:
        assert self.engine is not None
        self.engine.end_step()
        self._watch.end()
        if self._has_first_draws:
            self._draw_by_stages()

    # ------------------------------------------------------------------ between steps

    @override
    def flush(self, *, whole: bool = True) -> None:
        """Finish updates in flight; do nothing behind a failure, when peers may be gone."""
        if self.engine is not None and not self.failed:
            self.losses.settle()
            if not self.engine.is_flushed:
                self._begin_watch()
            self.engine.flush(whole=whole and not self.is_apart)
            self._watch.end()

    @property
    def is_flushed(self) -> bool:
        return self.engine is None or self.engine.is_flushed

    @override
    def own_names(self) -> set[str]:
        # what belongs to no stage is worker 0's
        assert self.engine is not None
        assert self.stages is not None
        own = {n for j in self.engine.owned for n in self.stages.stages[j].parameters}
        if self.worker != 0:
            return own
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return own | ({n for n, _ in named} - self.stages.stage_of.keys())

    @override
    def state(self) -> dict[str, Any] | None:
        if self.engine is None or self.stages is None or self.failed:
            return None
        state = self.engine.state()
        # with parameters sharded each has those of its own stages; else all have all
        writes = self.worker == 0 or self.engine.plan.axes.sharding.gathers
        return {
            "stages": self.stages.as_data(),
            "seed": self._seed,
            **state.as_data(self.worker, has_previous=writes),
        }

    @override
    def resume(self, saved: Mapping[str, Any] | None, *, fits: bool) -> bool:
        if saved is None or not fits:
            self._restart()
            return False
        self._seed = saved["seed"]
        if self.engine is not None:
            self.engine.close()
        state = EngineState.from_data(saved, self.worker)
        self._start(StageMap.from_data(saved["stages"]).training(self._trained), state)
        self._first = None
        return True

    def train_others(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Train other parameters from now on; behind a flush, and on all workers at once.

        What is unfrozen goes to the stage that uses it first. What is frozen stays in its stage,
        without gradients: workers still read older versions of it.

        Args:
            trained: name -> parameter, for all that are trained now.
        """
        if self.stages is None or self.engine is None or self.failed:
            self._trained = dict(trained)
            self._first = self._new_first_step(trained)
            return
        self._trained |= trained
        state = self.engine.state()
        self.engine.close()
        self._start(self.stages.training(trained).relaying(self._normalising()), state)

    def _normalising(self) -> Iterator[tuple[str, str]]:
        """List the statistics of normalising modules that training changes from now on."""
        for path, m in self.module.named_modules():
            if isinstance(m, _NormBase) and m.training and m.track_running_stats:
                yield from ((path, f"{path}.{name}") for name, _ in m.named_buffers())

    def _restart(self) -> None:
        """Take the parameters as they are now for the newest version (they were replaced)."""
        if self.engine is not None:
            assert self.stages is not None
            t = self.engine.t
            self.engine.close()
            self._start(self.stages, EngineState(t=t, previous={}))

    def request_stop(self) -> None:
        """Ask every worker to stop; safe to call from a signal handler."""
        self.stop_requested = True
        if self.engine is not None:
            self.engine.request_stop()

    @property
    @override
    def when(self) -> str:
        return f"in step {self.t}"

    @override
    def _settle(self) -> None:
        """Have sent what a flush has waited for."""

    @override
    def _let_go(self) -> None:
        self._draws.remove()
        if self.engine is not None:
            self.engine.close()

    # ------------------------------------------------------------------ beginning

    @contextmanager
    def _first_forward(self, batch: Any, *, first: bool, last: bool) -> Iterator[None]:
        assert self._first is not None
        if first:
            self._first.receive()
        with self._first.forward(batch, first=first):
            yield
        if last:
            self._first.send()

    def _begin_watch(self) -> None:
        """Notice what changes weights of which others have copies or versions."""
        if self._probe.num_workers == 1:
            return
        groups = self._weights
        if not groups:  # the stages are not known yet
            groups = [{n: p for n, p in self.named().items() if not is_lazy(p)}]
        self._watch.begin(self.t, [*groups, self._still.tensors])

    def _begin(self) -> None:
        self._watch.end()  # before others are waited for
        self._start(self._find(), None)
        assert self.engine is not None
        self._begin_watch()
        self.engine.adopt_forward()
        self._first = None
        self._draw_by_stages()

    def _find(self) -> StageMap:
        assert self._first is not None
        profile = self._first.agree()
        stages = self._make_stages(profile)
        self._first.check_order(stages.stage_of)
        return stages

    def _draw_by_stages(self) -> None:
        self._has_first_draws = False
        self._draws.remove()
        self._draws = KeyedDraws(self.module, self.starts or (), self.device)

    def _make_stages(self, profile: Profile) -> StageMap:
        plan, stages = self._probe, self._config.stages
        held: Mapping[str, nn.Parameter] = self._trained
        if plan.axes.sharding.gathers:  # what is frozen takes as much room
            held, profile = self.named(), profile.as_trained()
        sizes = {n: p.numel() * p.element_size() for n, p in held.items()}
        if stages == "auto":
            num_workers = plan.num_workers
            wanted = auto_stages(
                num_workers, sum(sizes.values()), come_and_go=self._config.tiers is not None
            )
            stages = min(wanted, len(profile.begins))
        assert not isinstance(stages, str)
        if self._config.relay_buffers == "all":
            everywhere = (0, len(profile.units) - 1)
            names = [name for name, _ in self.module.named_buffers()]
            everything = {name: profile.buffers.get(name, everywhere) for name in names}
            profile = replace(profile, buffers=everything)
        return make_stages(profile, sizes, stages)

    def _start(self, stages: StageMap, state: EngineState | None) -> None:
        if self.engine is not None:  # receives posted for the old engine must not match new sends
            self._replace_transport()
        if self._probe.axes.sharding.gathers:
            named = self.named()  # each owner has what is frozen of its stages, too
            trained = {n for n in self._trained if named[n].requires_grad}
            stages = stages.holding(named, trained)
        self.stages = stages
        plan, tiers = self._make_plan(), ALL_STAYS
        if state is not None:
            self._draw_by_stages()
        if self._config.tiers is not None:
            forms = self._config.forms
            planned = PlannedTiers(self._config.tiers, plan, self.module, stages, forms)
            plan, tiers = planned.plan, planned.tiers(self.worker)
        if self.is_apart:
            self._take_own(plan, tiers)
        assert self.transport is not None
        self.engine = Engine(
            self.module, plan, stages, self.transport, self._update, state,
            paced=self._config.paced, aside=self._aside, forms=self._config.forms,
            sums=self._config.sums, codes=self._config.codes, weights=self._config.weights,
            watch=self._watch, flight=self.flight, tiers=tiers,
        )  # fmt: skip
        named = self.named()
        rest = {n: p for n, p in named.items() if n not in stages.stage_of}
        self._weights = [{n: named[n] for n in s.parameters} for s in stages.stages] + [rest]
        if self._config.outcomes is not None:
            self.engine.note_outcomes(self._config.outcomes)
        if self.stop_requested:
            self.engine.request_stop()
        relayed = {name for stage in stages.stages for name in stage.buffers}
        names = [name for name, _ in self.module.named_buffers() if name not in relayed]
        self._still = self._still_buffers(() if self._is_local else names)

    def _new_first_step(self, trained: Mapping[str, nn.Parameter]) -> FirstStep:
        counts = self._config.tiers is not None
        return FirstStep(self.module, trained, self.assembly, counts=counts)

    def _make_plan(self) -> Plan:
        assert self.stages is not None
        stages = self.stages
        until = tuple(stages.stages[j].buffers_final_after for j in stages.relayed)
        if self._config.accumulates:  # forwards of the last batch begin when all of the first end
            until = (len(stages.stages) - 1,) * len(until)
        relayed = stages.relayed
        if self._is_local:
            relayed = until = ()
        return self._config.make_plan(len(stages.stages), relayed, until, self._rounds)

    def _aside(self) -> AbstractContextManager[None]:
        return self._draws.aside()  # of the draws of the step, which others follow

    # ------------------------------------------------------------------ no worker has all

    def _take_own(self, plan: Plan, tiers: StateTiers) -> None:
        assert self.stages is not None
        stage_of = self.stages.stage_of
        named = self.module.named_parameters()
        own = [p for n, p in named if n not in stage_of or plan.owner(stage_of[n]) == self.worker]
        own = [p for p in own if not tiers.moves(p)]
        self._check_fits(sum(map(num_bytes_of, own)))
        make_present(*own)
        for p in own:  # others expect it so
            p.data = p.data.contiguous()
        self.assembly.meet("to have the weights of its stages")

    def _check_fits(self, num_bytes: int) -> None:
        """Refuse to have more for good than this worker may have."""
        limit = self._config.memory_limit_bytes
        if limit is not None and num_bytes > limit:
            raise StepError(
                f"rank {self.worker} is to keep parameters of {num_bytes} bytes, its own stages "
                f"and what is not trained, but memory_limit_bytes={limit}; allowed: parts that "
                "fit; use more ranks, other stages, stages=..., or raise "
                "memory_limit_bytes"
            )

    # ------------------------------------------------------------------ checks

    def _check_loss(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise StepError(
                f"training_step of rank {self.worker} returned a loss without a graph "
                f"(step {self.t}); allowed: a tensor that depends on trained parameters; "
                "do not detach it, and do not compute it under torch.no_grad()"
            )
        if self._config.outcomes is None:
            self.losses.put(loss, partial(self._check_finite, self.t))

    def _check_finite(self, t: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise StepError(
                f"the loss of rank {self.worker} is {loss} in step {t}; "
                "allowed: a finite loss, since every worker would train on the result; lower the "
                "learning rate, clip gradients, or look for the batch with "
                "Trainer(detect_anomaly=True)"
            )

    def _new_transport(self) -> CountingTransport:
        return link(self._config.route, self.device, self.assembly)

    def _replace_transport(self) -> None:
        """Take another transport, behind the making of which no worker needs the old one's."""
        old = self.transport
        assert old is not None
        old.close()
        self.transport = self._new_transport()
        old.disconnect()


def _not_relayed(name: str, rank: int, t: int) -> StepError:
    return StepError(
        f"buffer {name!r} changed in step {t} of rank {rank}, but not in the first step, so it is "
        "not relayed between ranks; allowed: buffers that change from the first step on; or relay "
        'every buffer, relay_buffers="all"'
    )


def _scale_gradient(loss: Tensor, num_microbatches: int) -> None:
    """Divide the gradient at its root, as ``(loss / num_microbatches).backward()`` does."""
    # a hook, so that on_before_backward still sees the loss that training_step returned
    loss.register_hook(lambda grad: grad / num_microbatches)  # type: ignore[no-untyped-call]
