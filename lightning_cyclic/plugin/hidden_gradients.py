"""Hidden gradients: those that a hook may not read, since they are not what it takes them for.

Replicated workers, and steps that flow into each other, update stage by stage: each gradient is
whole for a moment, on one worker. A hook that read all of them, to log their norm, got some of
them, its own part of them, or nothing. Now it gets those that are whole, or an error. The
comparison of the first step sees sums of gradients, but not what a hook makes of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import nn

from lightning_cyclic.compat import Trainer, is_overridden
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.absent import Home, come_back, home_of, leave
from lightning_cyclic.runtime.partial_step.ghosts import user_line


@final
class HiddenGradients:
    """Refuse reads of gradients in hooks.

    Args:
        trainer: whose callbacks and module have the hooks.
        preset: name of the plan, for errors.
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
            hook: its name.
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
        """Let values be read, if they are here."""
        away = [n for n in names if self._homes[n] is not None]
        if away and (home := self._homes[away[0]]) is not None:  # they have one home
            home.read(away)

    def read_gradient(self, name: str) -> None:
        """Refuse.

        Raises:
            ConfigurationError: always.
        """
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
