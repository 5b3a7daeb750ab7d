"""What the user chose of stage-at-a-time training, and the plans that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor, nn

from lightning_cyclic.plan import Plan, program_of
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.batches import first_stage, teller
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.tiers import Tiers
from lightning_cyclic.runtime.codecs.activations import AbstractCrossingCodec
from lightning_cyclic.runtime.codecs.coded import Codes
from lightning_cyclic.runtime.gradient_store import AS_MADE, Gradients, SumDtypes
from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.partial_step.micro_batches import SplitBatch
from lightning_cyclic.runtime.partial_step.packets import Outcome
from lightning_cyclic.runtime.predict import Guess
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.state_homes import AbstractHome
from lightning_cyclic.runtime.weight_forms import ALL, WeightForms
from lightning_cyclic.runtime.whole_step.tiers import TierConfig

Apply = Callable[[int, int], None]  # (step, stage): clip and optimize; gradients are in p.grad
Summarise = Callable[[Sequence[Outcome]], Message]  # called on the last stage's worker alone
ReadState = Callable[[Sequence[nn.Parameter]], tuple[list[Tensor], Any]]
WriteState = Callable[[Sequence[nn.Parameter], Sequence[Tensor], Any], None]
Share = Callable[[Tensor], Tensor]
Scaled = Callable[[int, Share], Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagewiseConfig:
    """Hold what the user chose.

    Args:
        make_plan: (number of stages, micro-batches of all replicas, ties, stages whose buffers
            change) -> plan.
        find_cuts: (module, step) -> where the stages begin; run on worker 0 alone.
        num_microbatches: into how many micro-batches each replica cuts its batch.
        split_batch: cuts a batch in the place of what its tensors say. [none]
        apply: makes a new version of a stage, where steps flow into each other.
        unscale: takes the scale of a step out of gradients of a stage there: (step, gradients).
        scaled: multiplies the share of a micro-batch in the loss of a step there.
        guess: predicts the weights of a stage, for plans that read predicted ones.
        read_state: gives what an owner must tell replicas of a stage, so that they can guess.
        memory_limit_bytes: most bytes of parameters on a worker, also where a hook reads the
            whole module. [any number]
        not_state: attributes of the module that are not the user's. [those of any module]
        is_delayed: whether the plan reads versions older than the newest.
        forms: what of weights is trained, and travels. [all]
        sums: dtypes of sums of gradients.
        codes: of gradients, where a codec makes them smaller. [as they are]
        activations: what makes activations and their gradients smaller where they cross from
            stage to stage. [as they are]
        state_per_param: bytes of optimizer state per byte of parameters.
        make_home: (bytes) -> where what forwards save lies meanwhile. [in memory]
        tiers: where optimizer state lies while it is not used. [in memory]
        timeout_s: limit of waits for what moves, in seconds.
        verify: how many of the first steps are compared with the plain one.
        is_one_stage: whether one worker has all of the module, so that nobody waits for it: a step
            may return no loss then, and a batch that cannot be cut is one micro-batch.
        is_under_autocast: whether the step computes with low-precision copies of the weights.
        expected_stages: how many stages there will be. [0: one per worker of a replica]
    """

    make_plan: Callable[..., Plan]
    find_cuts: Callable[[nn.Module, Callable[[], Any]], Cuts]
    num_microbatches: int
    replicas: int
    remat: str
    seed: int
    apply: Apply | None = None
    split_batch: SplitBatch | None = None
    unscale: Callable[[int, Gradients], None] | None = None
    scaled: Scaled | None = None
    guess: Guess | None = None
    read_state: ReadState | None = None
    write_state: WriteState | None = None
    is_one_stage: bool = False
    is_under_autocast: bool = False
    expected_stages: int = 0
    memory_limit_bytes: int | None = None
    say: Callable[[str], None] = print
    not_state: frozenset[str] = frozenset(vars(nn.Module()))
    is_delayed: bool = False
    forms: WeightForms = ALL
    sums: SumDtypes = AS_MADE
    codes: Codes | None = None
    activations: AbstractCrossingCodec | None = None
    verify: int = 0
    state_per_param: float = 0.0
    make_home: Callable[[int], AbstractHome] | None = None
    tiers: TierConfig | None = None
    timeout_s: float = 1800.0


_EVALUATES = frozenset({Kind.F, Kind.TELL, Payload.D, Payload.A, Payload.L})
_MOVE = frozenset({Kind.EVICT, Kind.FREE, Kind.FETCH})  # what an evaluation does not keep


@final
class Plans:
    """Make plans as they are needed.

    The number of micro-batches decides: a last batch may give fewer than the others, and a batch
    of evaluation is not cut at all.
    """

    def __init__(
        self, config: StagewiseConfig, cuts: Cuts, num_workers: int, frozen: Collection[str] = ()
    ) -> None:
        self._config = config
        self._cuts = cuts
        self._num_workers = num_workers
        # behind a flush they may be unfrozen, and must be exchanged then
        self._constant = frozenset(frozen if config.is_delayed else ())
        self._plans: dict[int, Plan] = {}
        self._evaluation: list[Action] | None = None
        self._tiers: Tiers | None = None
        self.usual = self.of(config.num_microbatches)  # whose batch has as many as asked for

    def move_state(self, tiers: Tiers | None) -> None:
        """Let optimizer state come and go, in any plan."""
        self._tiers = tiers
        self._plans.clear()
        self.usual = self.of(self._config.num_microbatches)

    def of(self, num_microbatches: int) -> Plan:
        if num_microbatches not in self._plans:
            self._plans[num_microbatches] = self._made(num_microbatches)
        return self._plans[num_microbatches]

    def evaluation(self, worker: int, t: int) -> list[Action]:
        """Return the forward of one batch that is not cut."""
        if self._evaluation is None:
            actions = [*program_of(self.of(1)).first(1)[worker], *self._told_besides(worker)]
            self._evaluation = [
                a for a in actions if (a.payload or a.kind) in _EVALUATES and a.kind not in _MOVE
            ]
        return [replace(a, t=t) for a in self._evaluation]

    def _told_besides(self, worker: int) -> list[Action]:
        """Let those know what came out who have no part: where workers take turns, some may."""
        plan = self.of(1)
        programs, replica = program_of(plan).first(1), plan.axes.placement.replica(worker)
        source = teller(plan, worker)
        (tell,) = [a for a in programs[source] if a.kind is Kind.TELL]
        told = {w for w in replica if any(a.kind is Kind.TELL for a in programs[w])}
        idle = {w: first_stage(plan, w) for w in replica if w not in told}
        if worker == source:
            return [message(Kind.SEND, Payload.L, tell, w, j=j) for w, j in idle.items()]
        if worker not in idle:
            return []
        j = idle[worker]
        return [message(Kind.RECV, Payload.L, tell, source, j=j), replace(tell, j=j)]

    def _made(self, num_microbatches: int) -> Plan:
        of_all = num_microbatches * self._config.replicas
        usual = self._plans.get(self._config.num_microbatches)
        if usual is None or not usual.flows:
            made = self._config.make_plan(self._cuts.num_stages, of_all, *self._demands())
            return replace(made, tiers=self._tiers)
        # a batch of evaluation has a flush behind it, and reads the newest weights
        return replace(
            usual, num_microbatches=of_all, schedule="gpipe", weights="sync",
            late_updates=False, norms="none", tiers=None,
        )  # fmt: skip

    def _demands(self) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Return which stages share parameters, and which have buffers that change."""
        cuts = self._cuts
        groups = {stages for n, stages in cuts.tied.items() if n not in self._constant}
        ties = tuple(sorted(groups)) if self._num_workers > 1 else ()
        relayed = tuple(j for j, names in enumerate(cuts.buffers) if cuts.changed & set(names))
        return ties, relayed
