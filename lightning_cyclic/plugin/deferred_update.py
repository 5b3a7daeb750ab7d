"""Deferred updates: apply the gradients of step t later, with the hyper-parameters of step t."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cyclic.compat import Trainer, call, is_overridden
from lightning_cyclic.errors import ConfigurationError, StepError
from lightning_cyclic.plugin.optimizers import (
    Values,
    Written,
    changed_values,
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
from lightning_cyclic.runtime.torch_functions import user_line
from lightning_cyclic.runtime.weight_forms import ALL, WeightForms

if TYPE_CHECKING:
    from lightning_cyclic.compat import Trainer


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


@final
class DeferredUpdates:
    """Remember an optimizer's hyper-parameters by step, and apply updates with them.

    Args:
        clip: "stage" clips each stage by its own norm, "global" by the norm over all stages.
        parameters_of: stage -> its parameters on this worker.
        total_norm: (step, parameters) -> the norm over all stages.
        lag: steps by which an update, or what reads its hyper-parameters, is late at most.
        is_scaled: whether norms are taken before hooks run, to look for overflows.
        may_log: whether all ranks run the hooks of an update in its own step, and once.
    """

    def __init__(  # noqa: PLR0913  (whose updates, of what, how clipped and how late)
        self,
        trainer: Trainer,
        preset: str,
        clip: str,
        reductions: HeldReductions,
        parameters_of: Callable[[int], Sequence[nn.Parameter]],
        total_norm: Callable[[int, Sequence[nn.Parameter]], Tensor],
        lag: int = 2,
        *,
        is_scaled: bool = False,
        forms: WeightForms = ALL,
        may_log: Callable[[], bool] = lambda: False,
    ) -> None:
        self._may_log = may_log
        self._trainer = trainer
        self.updated: list[nn.Parameter] = []  # whose whole gradients hooks see
        self._preset = preset
        self._gradients = HiddenGradients(trainer, preset)
        self._gradients.hide_behind_backward()
        self._reductions = reductions
        self._clip = clip
        self._remembered: dict[int, _Remembered] = {}
        self._newest = -1  # step of an update whose counts of steps the groups have
        self._added: set[str] = set()  # keys that the first update brought
        self._counted: set[str] = set()  # keys that updates change
        self._lag = lag
        self._parameters_of = parameters_of
        self._total_norm = total_norm
        self._is_scaled = is_scaled
        self._forms = forms
        self._measured: list[tuple[nn.Parameter, Mark]] = []  # as norms saw them

    def remember(self, t: int, optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
        """Keep the hyper-parameters of step ``t``, before a scheduler moves on."""
        now = self._trainer.global_step
        self._remembered[t] = _Remembered(values_of(optimizer), kwargs, now)
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

    def put_groups(self, t: int, groups: Values) -> None:
        self._remembered[t] = _Remembered(groups, {}, self._trainer.global_step)

    def groups_of(self, t: int) -> Values:
        return self._remembered[t].groups

    def require(self, t: int) -> None:
        """Refuse that step ``t`` is run without an update."""
        if t not in self._remembered:
            raise no_update(self._preset, t)

    def apply(self, t: int, stages: Sequence[int], *, skips: bool = False) -> None:
        """Run hooks, clipping and the optimizer on the gradients of the given stages.

        Args:
            stages: whose gradients are in ``p.grad``.
            skips: leave the optimizer out, as a gradient scaler does that finds an overflow.
        """
        trainer, optimizer = self._trainer, self._optimizer
        remembered = self._remembered[t]
        updated = [p for j in stages for p in self._parameters_of(j)]
        with (
            _hyper_parameters(optimizer, remembered.groups, self._added),
            _counting(trainer, remembered.global_step),
            self._forms.updating(updated),
            self._reductions.refused(),
            nullcontext() if self._may_log() else refused_in_update(trainer, self._preset),
        ):
            self.updated = list(map(self._forms.weight, updated))
            if self._is_scaled:
                self._measured = [(p, Mark.of(p.grad)) for p in updated]
            with self.unchanged():
                with self._gradients.in_hook("on_before_optimizer_step", self.updated):
                    call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
                    call._call_lightning_module_hook(
                        trainer, "on_before_optimizer_step", optimizer
                    )
                self.updated = []
                self._clip_gradients(t, stages)
            self._measured = []  # which would keep their memory
            if skips:
                return
            check_parted(optimizer, updated, self._preset)
            written = Written(optimizer)
            profiled = trainer.profiler.profile(  # type: ignore[attr-defined]
                f"[Strategy]{type(trainer.strategy).__name__}.deferred_optimizer_step"
            )
            alone = without_closure(optimizer, self._preset)
            with profiled, _holding(optimizer, updated), alone:
                optimizer.step(**remembered.kwargs)
            found = written.find()
        self._count(t, optimizer, found)

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

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._clip == "stage":
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)
            return
        self._check_measured()
        total = self._total_norm(self._t, parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, total)

    def _check_measured(self) -> None:
        """Refuse gradients that are others than those whose norms all have been told."""
        for p, grad in self._measured:
            if not grad.is_of(p.grad):
                raise StepError(
                    f"gradients were changed in step {self._t} before they were clipped by their "
                    "norm (in on_before_optimizer_step or configure_gradient_clipping), but with "
                    "precision='16-mixed' other ranks have been told their norms before, to skip "
                    "steps together; allowed: gradients that are changed elsewhere; change them "
                    "in a hook of the tensors (tensor.register_hook), clip with "
                    "clip_norm='stage', or use precision='bf16-mixed'"
                )

    @property
    def _optimizer(self) -> Optimizer:
        return self._trainer.strategy.optimizers[0]

    def _clip_gradients(self, t: int, stages: Sequence[int]) -> None:
        self._t = t
        each = [list(self._parameters_of(j)) for j in stages]
        if self._clip == "global":
            each = [[p for ps in each for p in ps]]
        for parameters in each:
            with _only(parameters, [p for ps in each for p in ps]):
                self._configured_clipping()

    def _configured_clipping(self) -> None:
        call._call_lightning_module_hook(
            self._trainer,
            "configure_gradient_clipping",
            self._optimizer,
            gradient_clip_val=self._trainer.gradient_clip_val,
            gradient_clip_algorithm=self._trainer.gradient_clip_algorithm,
        )


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


@contextmanager
def _only(parameters: Sequence[nn.Parameter], among: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hide the gradients of all others, so that clipping sees one stage."""
    kept = {id(p) for p in parameters}
    hidden = [(p, p.grad) for p in among if id(p) not in kept]
    for p, _ in hidden:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in hidden:
            p.grad = grad
