"""The parameters of one worker: those of its stages; all others are absent (absent.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import PlanError, StepError
from lightning_cyclic.runtime.absent import Home, come_back, leave
from lightning_cyclic.runtime.torch_functions import user_line
from lightning_cyclic.runtime.weight_forms import ALL, WeightForms

if TYPE_CHECKING:
    from lightning_cyclic.runtime.stages.cuts import Cuts


@final
class Ownership:
    """Say which parameters a worker has, and move their gradients."""

    def __init__(
        self, module: nn.Module, cuts: Cuts, stages: Sequence[int], forms: WeightForms = ALL
    ) -> None:
        self._module = module
        self.stages = tuple(stages)
        self._named = dict(module.named_parameters())
        self._cuts = cuts
        self._forms = forms
        self._stage_of = {n: j for j, names in enumerate(cuts.parameters) for n in names}
        held = set(stages)
        users = {n: set(cuts.tied.get(n, ())) | {j} for n, j in self._stage_of.items()}
        self.foreign = tuple(n for n in self._named if not users.get(n, held) & held)
        self._is_freed = False
        self._home: Home | None = None
        self.kept: dict[str, Tensor] | None = None  # what others hold, as it was given up
        away = [(j, n) for j, names in enumerate(cuts.buffers) if j not in held for n in names]
        self.stale = tuple(
            n for j, n in away if n in cuts.changed and not (n in cuts.repeated and max(held) > j)
        )
        """Names of the buffers that other workers' steps change."""

    @property
    def own(self) -> list[nn.Parameter]:
        """Return the parameters that this worker updates, in the module's order."""
        return list(self.named().values())

    def named(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self._named.items() if self._stage_of.get(n) in self.stages}

    def here(self) -> dict[str, nn.Parameter]:
        """Return all parameters that have their values here, by name: tied ones, too."""
        foreign = set(self.foreign)
        return {n: p for n, p in self._named.items() if n not in foreign}

    def owned(self, j: int) -> list[nn.Parameter]:
        """Return the parameters of stage ``j``: those that it is the first to use."""
        return [self._named[n] for n in self._cuts.parameters[j]]

    @property
    def has_ties(self) -> bool:
        return bool(self._cuts.tied)

    def lent(self, j: int) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of stage ``j`` that later stages use too."""
        return [(n, self._named[n]) for n in self._cuts.tied if self._stage_of[n] == j]

    def borrowed(self, j: int) -> list[str]:
        """Return the names of the parameters of earlier stages that stage ``j`` uses too."""
        return [
            n for n, stages in self._cuts.tied.items() if j in stages and self._stage_of[n] != j
        ]

    def lenders(self, j: int) -> set[int]:
        """Return the earlier stages of which stage ``j`` uses parameters."""
        return {self._stage_of[n] for n in self.borrowed(j)}

    def versioned(self, besides: Collection[str]) -> dict[int, dict[str, nn.Parameter]]:
        """Return stage -> name -> parameter of which a worker keeps versions.

        Args:
            besides: names of parameters that count, though they are not trained.
        """
        stages = {j: self.trained(j, besides) for j in self.stages}
        for k in self.stages:  # of stages of other workers, what is tied to own ones
            for j, tied in self.tied_to(k).items():
                if j not in self.stages:
                    stages.setdefault(j, {}).update(tied)
        return stages

    def readers(self, stages: Iterable[int]) -> dict[int, list[int]]:
        """Return for each of some stages the own ones that read its parameters."""
        return {j: [k for k in self.stages if k == j or j in self.lenders(k)] for j in stages}

    def tied_to(self, k: int) -> dict[int, dict[str, nn.Parameter]]:
        """Return the trained parameters of earlier stages that stage ``k`` uses, too."""
        found: dict[int, dict[str, nn.Parameter]] = {}
        for n in self.borrowed(k):
            if self._named[n].requires_grad:
                found.setdefault(self._stage_of[n], {})[n] = self._named[n]
        return found

    def refuse_ties(self, weights: str) -> None:
        """Refuse trained parameters that stages share, where each would read them otherwise.

        Raises:
            PlanError: with the first of them.
        """
        tied = self._cuts.tied.items()
        n, stages = next(((n, s) for n, s in tied if self._named[n].requires_grad), (None, ()))
        if n is None:
            return
        raise PlanError(
            f"weights {weights!r} with {n!r}, which stages {list(stages)} share: each would "
            "predict it otherwise; allowed: parameters that belong to one stage, or other "
            "weights; let one stage have its modules, stages=[...]"
        )

    def trained(self, j: int, besides: Collection[str] = ()) -> dict[str, nn.Parameter]:
        """Return the parameters of stage ``j`` that are trained, and some others, by name."""
        named = {n: self._named[n] for n in self._cuts.parameters[j]}
        return {n: p for n, p in named.items() if p.requires_grad or n in besides}

    def shared(self, first: int, stages: Sequence[int]) -> list[nn.Parameter]:
        """Return the parameters of stage ``first`` that some of ``stages`` use too."""
        users = set(stages)
        return [p for n, p in self.lent(first) if users & set(self._cuts.tied[n])]

    def changing(self, j: int) -> list[Tensor]:
        """Return the buffers of stage ``j`` that training changes."""
        names = [n for n in self._cuts.buffers[j] if n in self._cuts.changed]
        return [self._module.get_buffer(n).detach() for n in names]

    @contextmanager
    def apart(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """Keep the gradients that the body gives some tied parameters apart; by name."""
        borrowed = {n: self._forms.trained(self._named[n]) for n in names}
        before = [p.grad for p in borrowed.values()]
        for p in borrowed.values():
            p.grad = None
        taken: dict[str, Tensor] = {}
        yield taken
        for (n, p), grad in zip(borrowed.items(), before, strict=True):
            if p.grad is not None:
                taken[n] = p.grad
            p.grad = grad

    @contextmanager
    def unheard(self, names: Iterable[str]) -> Iterator[None]:
        """Keep gradients that the body makes from hooks, which see them when they are added."""
        hooked = [
            (p, attribute, hooks)
            for p in map(self._named.__getitem__, names)
            for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks")
            if (hooks := getattr(p, attribute)) and self._forms.trained(p) is p
        ]
        for p, attribute, _ in hooked:
            setattr(p, attribute, None)
        try:
            yield
        finally:
            for p, attribute, hooks in hooked:
                setattr(p, attribute, hooks)

    def as_weight(self, name: str, grad: Tensor) -> tuple[nn.Parameter, Tensor]:
        """Return a parameter, and its gradient as autograd takes it."""
        p = self._named[name]
        return p, self._forms.as_weight(p, grad)

    # ------------------------------------------------------------------ memory

    def free_foreign(self, home: Home) -> None:
        """Give up the memory of what other workers hold; its home is told who reads it."""
        if self._is_freed:
            return
        for n in self.foreign:
            p = self._named[n]
            if self.kept is not None:
                self.kept[n] = p.data
            p.data = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
            p.grad = None
        self._is_freed, self._home = True, home
        for n, x in self._away():
            leave(x, n, home)

    def give_up(self) -> None:
        """Let what other workers hold be not a number: training has failed, and nobody has it."""
        for _, x in self._away() if self._is_freed else ():
            come_back(x)
            if x.is_floating_point():
                x.data = x.detach().new_full((), torch.nan).expand(x.shape)

    def restore(self) -> None:
        if not self._is_freed:
            return
        for _, x in self._away():
            come_back(x)
        for n in self.foreign:
            p = self._named[n]
            p.data = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        self._is_freed = False

    @contextmanager
    def whole_as_kept(self) -> Iterator[None]:
        """Let the body find what others hold as it was given up last."""
        if not self._is_freed:
            yield
            return
        assert self.kept is not None
        assert self._home is not None
        for _, x in self._away():
            come_back(x)
        for n in self.foreign:
            self._named[n].data = self.kept[n]
        self._is_freed = False
        try:
            yield
        finally:
            self.free_foreign(self._home)

    def _away(self) -> Iterator[tuple[str, Tensor]]:
        for n in self.foreign:
            yield n, self._named[n]
        for n in self.stale:
            yield n, self._module.get_buffer(n)

    @property
    def is_freed(self) -> bool:
        return self._is_freed


@final
class ForeignWeights:
    """Have what other workers have here behind a flush, and absent else.

        behind a flush    all workers gather what they lack; the next step lets it go again
        elsewhere         who reads them is told their name, stage and worker, and where to read
        do not fit        the same: a worker that has never had the whole module (meta.py) never
                          gets it

    Args:
        stage_of: name -> stage, of parameters and of the buffers that training changes.
        rank_of_stage: stage -> rank of the worker that updates it.
        fits: whether a worker may have the whole module.
        gather: returns all parameters and buffers that change, by name; all call it together.
    """

    def __init__(
        self,
        module: nn.Module,
        stage_of: Mapping[str, int],
        ownership: Ownership,
        rank_of_stage: Callable[[int], int],
        fits: bool,
        gather: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._module = module
        self._stage_of = stage_of
        self._ownership = ownership
        self._rank_of_stage = rank_of_stage
        self.fits = fits
        self._gather = gather
        self.is_running = False  # a part of the program

    @property
    def are_here(self) -> bool:
        return not self._ownership.is_freed

    def bring(self) -> None:
        """Have the whole module on every worker until the next step; all workers must call it.

        Where it does not fit, do nothing: who reads what is absent is told.
        """
        if self.are_here or not self.fits:
            return
        came = self._gather()
        with torch.inference_mode(mode=False), torch.no_grad():
            self._ownership.restore()
            named = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
            for n in (*self._ownership.foreign, *self._ownership.stale):
                named[n].copy_(came[n])

    def leave(self) -> None:
        self._ownership.free_foreign(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the body, a part of the program, without foreign weights."""
        self.leave()
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    # ------------------------------------------------------------------ who reads what is absent

    def read(self, names: Sequence[str]) -> NoReturn:
        """Refuse that an absent parameter or buffer is read.

        Raises:
            StepError: with its stage, and the rank that has it.
        """
        j = self._stage_of[names[0]]
        raise StepError(
            f"{user_line()} reads {names[0]!r} of stage {j}, which rank {self._rank_of_stage(j)} "
            f"has and this rank has not, {self._why}"
        )

    @property
    def _why(self) -> str:
        if not self.fits:
            return (
                "as all parameters together exceed memory_limit_bytes; allowed: parameters of a "
                "rank's own stages; behind training read a checkpoint folder, or raise "
                "memory_limit_bytes"
            )
        if self.is_running:
            return (
                "in the middle of a step; allowed: reads of the whole module in hooks of "
                "validation and at the end of epochs; or let one stage have what is read and the "
                "code that reads it, stages=[...]"
            )
        return (
            "between steps; allowed: reads of the whole module in hooks of validation and at the "
            "end of epochs, where each rank has it; elsewhere do it on all ranks, under "
            "`with trainer.strategy.whole():`"
        )

    def read_gradient(self, name: str) -> None:
        """Refuse to read the gradient of a foreign parameter, which is None here.

        Raises:
            StepError: unless steps are under way, in which updates are made.
        """
        if not self.is_running:
            j = self._stage_of[name]
            raise StepError(
                f"{user_line()} reads the gradient of {name!r} of stage {j}, which rank "
                f"{self._rank_of_stage(j)} has; allowed: gradients of a rank's own stages, whose "
                "parameters are [n for n, j in trainer.strategy.stage_of.items() if j in "
                "trainer.strategy.own_stages]; read those, or use strategy='ddp' for this run"
            )
