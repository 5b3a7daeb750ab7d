"""Updates: from gradients in ``p.grad`` of some stages to new weights, within a step or later.

    gradients    the scale of the loss is taken out of them
    hooks        on_before_optimizer_step, and clipping
    decision     stages whose gradients overflowed stay as they are
    step         the optimizer's, of all others

A pipeline with a flush makes the update of all its stages within ``optimizer_step``, as Lightning
does. Elsewhere the program makes that of step t, stage by stage, up to some steps later, with the
hyper-parameters of step t, while hooks of later steps have run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cyclic.compat import Trainer, call, is_overridden
from lightning_cyclic.errors import ConfigurationError, StepError
from lightning_cyclic.plugin.optimizers import (
    Values,
    Written,
    changed_values,
    check_groups,
    check_parted,
    copied,
    noted_values,
    put_values,
    values_of,
    without_closure,
)
from lightning_cyclic.plugin.records import refused_in_update
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.runtime.absent import Home, come_back, home_of, leave
from lightning_cyclic.runtime.bits import Mark
from lightning_cyclic.runtime.gradient_store import hidden
from lightning_cyclic.runtime.torch_functions import user_line
from lightning_cyclic.runtime.weight_forms import WeightForms


@final
class HiddenGradients:
    """Refuse reads of gradients in hooks.

    Replicated workers, and steps that flow into each other, update stage by stage: each gradient
    is whole for a moment, on one worker. A hook that read all of them, to log their norm, got some
    of them, its own part of them, or nothing. Now it gets those that are whole, or an error.
    """

    def __init__(self, trainer: Trainer, preset: str) -> None:
        self._trainer = trainer
        self._preset = preset
        self._hook = ""
        self._homes: dict[str, Home | None] = {}  # of parameters that other workers have
        self._used: dict[str, bool] = {}

    @contextmanager
    def in_hook(self, hook: str, shown: Iterable[nn.Parameter] = ()) -> Iterator[None]:
        """Run the body, which calls a hook, with only some gradients to be read.

        Args:
            shown: parameters whose gradients are whole.
        """
        if not self._is_used(hook):
            yield
            return
        self._hook = hook
        kept = {id(p) for p in shown}
        named = self._trainer.lightning_module.named_parameters()
        hidden = {n: p for n, p in named if p.requires_grad and id(p) not in kept}
        self._homes = {n: home_of(p) for n, p in hidden.items()}
        for n, p in hidden.items():
            leave(p, n, self)
        try:
            yield
        finally:
            for n, p in hidden.items():
                if home_of(p) is self:  # else it has been fetched meanwhile
                    come_back(p)
                    if (home := self._homes[n]) is not None:
                        leave(p, n, home)

    def hide_behind_backward(self) -> None:
        """Hide all of them in on_after_backward, until a training takes its methods back."""
        plugin = self._trainer.precision_plugin
        own = type(plugin).post_backward  # calls the hook

        def post_backward(*args: Any, **kwargs: Any) -> Any:
            with self.in_hook("on_after_backward"):
                return own(plugin, *args, **kwargs)

        vars(plugin)["post_backward"] = post_backward

    def read(self, names: Sequence[str]) -> None:
        away = [n for n in names if self._homes[n] is not None]
        if away and (home := self._homes[away[0]]) is not None:  # they have one home
            home.read(away)

    def read_gradient(self, name: str) -> None:
        raise ConfigurationError(
            f"{user_line()} reads the gradient of {name!r} in {self._hook}, which under preset "
            f"{self._preset!r} is not whole there: stages are updated one by one, each where its "
            "gradients are summed; allowed: in on_before_optimizer_step, which is called for each "
            "of a rank's stages, the gradients of that stage, those of "
            "trainer.strategy.updated_parameters; read these, or let the callback "
            "lightning_cyclic.GradientNorms log norms"
        )

    def _is_used(self, hook: str) -> bool:
        if hook not in self._used:
            callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
            whose = [self._trainer.lightning_module, *callbacks]
            self._used[hook] = any(is_overridden(hook, x) for x in whose)
        return self._used[hook]


Stages: TypeAlias = Mapping[int, Sequence[nn.Parameter]]  # what the optimizer has of each


class Owner(Protocol):
    """Know the gradients of a rank's stages, and those of all others."""

    def update_together(self) -> bool:
        """Say whether every rank runs the hooks of an update in its own step, and once."""

    def parameters_of(self, j: int) -> Sequence[nn.Parameter]:
        """Return what the optimizer has of a stage."""

    def total_norm(self, t: int, order: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm over all stages of a step, reduced in this order of parameters."""

    def overflowed(self, t: int, stages: Stages) -> Collection[int]:
        """Take the scale out of gradients; return the stages whose own are not finite."""

    def skipped(self, t: int, stages: Sequence[int], own: Collection[int]) -> Collection[int]:
        """Return which of the stages stay as they are, since these own ones overflowed."""

    def changing(self, t: int, stages: Stages) -> AbstractContextManager[None]:
        """Let the body change the parameters of stages."""


@final
class Updates:
    """Make updates, each with the hyper-parameters of its step.

    Args:
        clip: "stage" clips each stage by its own norm, "global" by the norm over all stages.
        lag: steps by which an update, or what reads its hyper-parameters, is late at most; None
            where it is made within ``optimizer_step``.
        told_before: whether norms of gradients are taken, and told, before hooks run.
    """

    def __init__(
        self,
        trainer: Trainer,
        preset: str,
        clip: str,
        owner: Owner,
        reductions: HeldReductions,
        forms: WeightForms,
        lag: int | None,
        *,
        told_before: bool = False,
    ) -> None:
        self._trainer = trainer
        self._preset = preset
        self._clip = clip
        self._owner = owner
        self._reductions = reductions
        self._forms = forms
        self._lag = lag
        self._told_before = told_before
        self.updated: list[nn.Parameter] = []  # whose whole gradients hooks see
        self._gradients = HiddenGradients(trainer, preset)
        if lag is not None:
            self._gradients.hide_behind_backward()
        self._t = -1  # of the update under way
        self._remembered: dict[int, _Remembered] = {}
        self._newest = -1  # step of an update whose counts of steps the groups have
        self._added: set[str] = set()  # keys that the first update brought
        self._counted: set[str] = set()  # keys that updates change
        self._measured: list[tuple[nn.Parameter, Mark]] = []  # as norms saw them
        self._num_groups: int | None = None  # since its gradients are made

    def remember(self, t: int, optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
        """Keep the hyper-parameters of step ``t``, before a scheduler moves on."""
        now = self._trainer.global_step
        self._remembered[t] = _Remembered(values_of(optimizer), kwargs, now)
        assert self._lag is not None
        for old in [k for k in self._remembered if k < t - self._lag]:
            del self._remembered[old]
        # schedulers warn when they step before the optimizer; its step is only later
        optimizer._opt_called = True  # type: ignore[attr-defined]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Run the body, the user's step or hooks of an update, for which it is too late or early.

        Raises:
            ConfigurationError: it has changed a hyper-parameter, besides what updates count.
        """
        optimizer = self._optimizer
        before = noted_values(optimizer)
        yield
        for values, noted in zip(changed_values(optimizer, before), before, strict=True):
            key = next((k for k in values if k in noted and k not in self._counted), None)
            if key is not None:
                raise ConfigurationError(
                    f"{key!r} of a parameter group of the optimizer was changed from "
                    f"{noted[key].value} to {values[key]} within a step, by training_step or a "
                    f"hook of its backward or update, but under preset {self._preset!r} ranks run "
                    "steps at other times than they update; allowed: hyper-parameters that change "
                    "between steps; use a scheduler, on_train_batch_start or the module's "
                    "optimizer_step, or strategy='1f1b'"
                )

    def expect_groups(self) -> None:
        """Note which groups the gradients are for that the next update needs, unless it is noted.

        To be called where it is decided: a group that comes later has none of them.
        """
        if self._num_groups is None:
            self._num_groups = len(self._optimizer.param_groups)

    def require_groups(self) -> None:
        """Refuse that groups have come since.

        Raises:
            ConfigurationError: some have.
        """
        expected, self._num_groups = self._num_groups, None  # a step may have no gradients
        if expected is not None:
            check_groups(self._optimizer, expected)

    def put_groups(self, t: int, groups: Values) -> None:
        self._remembered[t] = _Remembered(groups, {}, self._trainer.global_step)

    def groups_of(self, t: int) -> Values:
        return self._remembered[t].groups

    def require(self, t: int) -> None:
        """Refuse that step ``t`` is run without an update."""
        if t not in self._remembered:
            raise no_update(self._preset, t)

    def apply(self, t: int, stages: Sequence[int]) -> Collection[int]:
        """Update stages by step ``t``, whose gradients are in ``p.grad``, when it may be over.

        Returns:
            Those that stay as they were.
        """
        trainer, optimizer, remembered = self._trainer, self._optimizer, self._remembered[t]
        is_in_step = self._owner.update_together()
        with (
            _hyper_parameters(optimizer, remembered.groups, self._added),
            _counting(trainer, remembered.global_step),
            self._reductions.refused(),
            nullcontext() if is_in_step else refused_in_update(trainer, self._preset),
            self.making(t, stages) as updated,
        ):
            if updated:
                profiled = trainer.profiler.profile(  # type: ignore[attr-defined]
                    f"[Strategy]{type(trainer.strategy).__name__}.deferred_optimizer_step"
                )
                parameters = [p for ps in updated.values() for p in ps]
                alone = without_closure(optimizer, self._preset)
                with profiled, _holding(optimizer, parameters), alone:
                    optimizer.step(**remembered.kwargs)
        self._count(t, optimizer, self._found)
        return set(stages).difference(updated)

    def stepping(self, stages: Stages, kwargs: dict[str, Any]) -> Callable[[int], None]:
        """Return what calls the optimizer for one stage of those in the making.

        Each call begins with what the step before has left in groups: counts, most often.
        """
        optimizer = self._optimizer
        begun, noted = values_of(optimizer), noted_values(optimizer)
        # schedulers ask for it, also of a replica that has no stage to update
        optimizer._opt_called = True  # type: ignore[attr-defined]

        def step(j: int) -> None:
            changed = changed_values(optimizer, noted)
            for group, values, keys in zip(optimizer.param_groups, begun, changed, strict=True):
                for key in keys.keys() - values.keys():
                    del group[key]
                group.update({key: copied(values[key]) for key in keys if key in values})
            check_parted(optimizer, stages[j], self._preset)
            with _holding(optimizer, stages[j]), without_closure(optimizer, self._preset):
                optimizer.step(**kwargs)

        return step

    @contextmanager
    def making(self, t: int, stages: Sequence[int]) -> Iterator[Stages]:
        """Prepare an update by gradients in ``p.grad``; the body calls the optimizer.

        Yields:
            What is updated; nothing, where the gradients of all stages overflowed.
        """
        optimizer, self._t, self._found = self._optimizer, t, []
        each = {j: self._owner.parameters_of(j) for j in stages}
        parameters = [p for j in stages for p in each[j]]
        with ExitStack() as changing:
            changing.enter_context(self._forms.updating(parameters, follows=self._lag is None))
            overflowed = self._owner.overflowed(t, each)
            if self._told_before:
                self._measured = [(p, Mark.of(p.grad)) for p in parameters]
            with nullcontext() if self._lag is None else self.unchanged():
                self._run_hooks(parameters)
                self._clip_gradients(list(each.values()), parameters)
            if self._lag is None:  # else the gradients of a later step are being made
                self.require_groups()
            self._measured = []  # which would keep their memory
            skipped = self._owner.skipped(t, stages, overflowed)
            updated = {j: each[j] for j in stages if j not in skipped}
            if updated:
                for p in (p for j in skipped for p in each[j]):
                    p.grad = None
                parameters = [p for ps in updated.values() for p in ps]
                check_parted(optimizer, parameters, self._preset)
                changing.enter_context(self._owner.changing(t, updated))
            written = Written(optimizer)
            yield updated
            self._found = written.find()

    def _run_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        hook = "on_before_optimizer_step"
        hidden: AbstractContextManager[None] = nullcontext()
        if self._lag is not None:
            self.updated = list(map(self._forms.weight, parameters))
            hidden = self._gradients.in_hook(hook, self.updated)
        with hidden:
            call._call_callback_hooks(self._trainer, hook, self._optimizer)
            call._call_lightning_module_hook(self._trainer, hook, self._optimizer)
        self.updated = []

    def _count(self, t: int, optimizer: Optimizer, found: Values) -> None:
        """Let the next step have what an update has counted.

        Every stage begins step t with the same counts, and leaves the same ones to step t + 1,
        whose hyper-parameters may be remembered already.
        """
        if not any(found):
            return
        following = self._remembered[t + 1].groups if t + 1 in self._remembered else []
        self._counted.update(*found)
        for values, new in zip(following, found, strict=False):
            values.update({k: copied(v) for k, v in new.items()})
        if t >= self._newest:
            self._newest = t
            for group, new in zip(optimizer.param_groups, found, strict=False):
                self._added |= new.keys() - group.keys()
                group.update(new)

    def _clip_gradients(
        self, each: Sequence[Sequence[nn.Parameter]], every: Sequence[nn.Parameter]
    ) -> None:
        for parameters in each if self._clip == "stage" else [every]:
            with _only(parameters, every):
                call._call_lightning_module_hook(
                    self._trainer,
                    "configure_gradient_clipping",
                    self._optimizer,
                    gradient_clip_val=self._trainer.gradient_clip_val,
                    gradient_clip_algorithm=self._trainer.gradient_clip_algorithm,
                )

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the gradients that are in ``p.grad``, as one process that has all would."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._clip == "stage":
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)
            return
        self._check_measured()
        total = self._owner.total_norm(self._t, parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, total)

    def _check_measured(self) -> None:
        """Refuse gradients that are others than those whose norms all have been told."""
        for p, grad in self._measured:
            if not grad.is_of(p.grad):
                raise StepError(
                    f"gradients were changed in step {self._t} before they were clipped by their "
                    "norm (in on_before_optimizer_step or configure_gradient_clipping), but under "
                    f"preset {self._preset!r} other stages or ranks know their norms already; "
                    "allowed: gradients that are changed elsewhere; change them in a hook of the "
                    "tensors (tensor.register_hook), clip with clip_norm='stage', or use "
                    "strategy='1f1b'"
                )

    @property
    def _optimizer(self) -> Optimizer:
        return self._trainer.strategy.optimizers[0]


class _Remembered(NamedTuple):
    groups: Values
    kwargs: dict[str, Any]
    global_step: int


def no_update(preset: str, t: int) -> StepError:
    return StepError(
        f"the module's optimizer_step did not call optimizer.step(closure) in step {t}, but under "
        f"preset {preset!r} other ranks wait for each update; allowed: an update in every step; "
        "set the learning rate to 0 where one is to be left out, or use strategy='1f1b' or 'ddp'"
    )


@contextmanager
def _counting(trainer: Trainer, global_step: int) -> Iterator[None]:
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    steps = loop.optim_progress.optimizer.step.total
    now, steps.completed = steps.completed, global_step
    try:
        yield
    finally:
        steps.completed = now


@contextmanager
def _hyper_parameters(
    optimizer: Optimizer, groups: Values, added: Collection[str]
) -> Iterator[None]:
    """Let the optimizer have the remembered hyper-parameters, then today's again.

    Groups that have come since have no part: their parameters may hold gradients of any steps.
    """
    everything = optimizer.param_groups
    optimizer.param_groups = then = everything[: len(groups)]
    today = [{k: v for k, v in g.items() if k != "params"} for g in then]
    put_values(optimizer, groups, added)
    try:
        yield
    finally:
        for group, values in zip(then, today, strict=False):  # one may have been added
            for key in group.keys() - values.keys() - {"params"}:
                del group[key]
            group.update(values)
        optimizer.param_groups = everything


@contextmanager
def _holding(optimizer: Optimizer, updated: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let the optimizer hold what it updates alone: it, or its hooks, may change all they see."""
    ids = set(map(id, updated))
    before = [group["params"] for group in optimizer.param_groups]
    for group, held in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [p for p in held if id(p) in ids]
    try:
        yield
    finally:
        for group, held in zip(optimizer.param_groups, before, strict=True):
            group["params"] = held


def _only(
    parameters: Sequence[nn.Parameter], among: Sequence[nn.Parameter]
) -> AbstractContextManager[None]:
    """Hide the gradients of all others, so that clipping sees one stage."""
    kept = {id(p) for p in parameters}
    return hidden(p for p in among if id(p) not in kept)
