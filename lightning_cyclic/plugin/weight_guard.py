"""The weight guard: notice what hooks and callbacks change of the weights between steps.

Where workers read different versions of a stage, a change of what the module shows between two
steps reaches some versions and not others. It gave other weights in silence, and is refused by
name. What is frozen or unfrozen is taken over (FreezingWatch). The comparison of the first step
sees nothing of it: it ends before hooks run, and looks at one step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cyclic.compat import Trainer
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.bits import Mark
from lightning_cyclic.runtime.weight_forms import WeightForms
from lightning_cyclic.runtime.weight_watch import WeightWatch


@final
class WeightGuard:
    """Compare the parameters at the begin of a step with those at the end of the last one.

    What is changed and changed back, as weights that are exchanged for their average during
    validation, is no change: behind a flush, the bits are compared.

    Args:
        optimizer: returns the optimizer, whose state is compared as well, where updates of steps
            may be on their way. [none is]
        has_versions: whether there are any but the one that is shown; else only parameters
            themselves may not be replaced, and what is changed of them counts.
    """

    def __init__(
        self,
        named: Callable[[], Mapping[str, nn.Parameter]],
        preset: str,
        optimizer: Callable[[], Optimizer] | None = None,
        *,
        has_versions: bool = True,
    ) -> None:
        self._has_versions = has_versions
        self._read = named
        self._preset = preset
        self._optimizer = optimizer
        self._state: list[Mark] | None = None  # what it was; None where nothing is on its way
        self._named: dict[str, nn.Parameter] = {}
        self._watch = WeightWatch(0, stays_in_place=True, changed=self._changed)
        self._steps = 0
        self._is_at_end = False  # of all steps: others may look at weights, and exchange them

    def note(self) -> None:
        """Note what the parameters are behind a step, at 0.5 us each."""
        if not self._named:
            self._named = dict(self._read())
        self._steps += 1
        self._is_at_end = False
        self._state = None
        if self._optimizer is not None:
            self._state = list(map(Mark.of, _state_of(self._optimizer())))
        if self._has_versions:
            self._watch.begin(self._steps, [self._named])

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Run the body, which brings steps to an end, behind which other code may look at weights.

        Where they are at an end already, it may have exchanged them, and will change them back.

        Raises:
            ConfigurationError: something has changed before.
        """
        if self._is_at_end:
            with self._watch.changing(()):
                yield
            return
        self.check()
        yield
        self._named, self._state = dict(self._read()), None
        if self._has_versions:
            self._watch.begin(self._steps, [self._named], may_change_back=True)
        self._is_at_end = True

    def forget(self) -> None:
        """Take the parameters as they will be: they are about to be loaded."""
        self._watch.stop()
        self._named, self._state, self._is_at_end = {}, None, False

    def check(self) -> None:
        """Refuse what has changed since."""
        if self._optimizer is not None and self._state is not None:
            now = _state_of(self._optimizer())
            if len(now) != len(self._state) or not all(map(Mark.is_of, self._state, now)):
                self._watch.stop()
                self._refuse_state()
        self._state = None  # which would keep the memory of state that moves
        if self._is_at_end:
            self._check_names(dict(self._read()))
        self._watch.end()

    def _check_names(self, now: dict[str, nn.Parameter]) -> None:
        changed = [n for n in self._named | now if self._named.get(n) is not now.get(n)]
        if changed:
            self._watch.stop()
            raise ConfigurationError(
                f"parameter {changed[0]!r} was replaced, added or removed between two steps by a "
                "hook or a callback (as pruning does); allowed: the same parameters throughout "
                "one fit; do it before fit, or use strategy='ddp'"
            )

    def _refuse_state(self) -> NoReturn:
        raise ConfigurationError(
            "the state of the optimizer was changed between two steps by a hook or a callback, "
            f"but under preset {self._preset!r} updates of the steps before are still to be made; "
            "allowed: changes in validation, where an epoch ends, and before fit; make them "
            "there, in the optimizer's step(), or use strategy='1f1b' or 'ddp'"
        )

    def _changed(self, name: str, rank: int, t: int) -> ConfigurationError:
        return ConfigurationError(
            f"parameter {name!r} was changed between two steps by a hook or a callback, but under "
            f"preset {self._preset!r} workers read several versions of it, which the change does "
            "not reach; allowed: changes before fit, or changes that are taken back before the "
            "next step; make them in the optimizer's step(), or use strategy='1f1b' or 'ddp'"
        )


def _state_of(optimizer: Optimizer) -> list[Any]:
    return [x for state in optimizer.state.values() for x in state.values()]


_is_trained = attrgetter("requires_grad")


@final
class FreezingWatch:
    """Notice that other parameters are trained than in the last step.

    Args:
        forms: what the optimizer has in the place of weights.
    """

    def __init__(self, trainer: Trainer, forms: WeightForms) -> None:
        self._trainer = trainer
        self._forms = forms
        self._parameters: list[nn.Parameter] = []
        self._seen: tuple[list[bool], list[int]] = ([], [])
        self._trained = self._note()

    def _note(self) -> dict[str, nn.Parameter]:
        module, groups = self._trainer.lightning_module, self._trainer.optimizers[0].param_groups
        self._parameters = list(module.parameters())
        self._seen = self._look()
        held = {id(p) for group in groups for p in group["params"]}
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        return {n: p for n, p in trained.items() if id(self._forms.trained(p)) in held}

    @property
    def has_changed(self) -> bool:
        return self._look() != self._seen

    def agree(self, session: Any) -> None:
        """Take what is trained now for known, if all other ranks train it, too.

        Raises:
            ConfigurationError: on every rank, where ranks train different parameters.
        """
        before, self._trained = self._trained, self._note()
        changed = [n for n in before | self._trained if (n in before) != (n in self._trained)]
        how = f", as it did with {changed[0]!r}" if changed else ""
        what = f"to freeze or unfreeze parameters{how}"
        _require_same(list(map(set, session.assembly.share(list(self._trained), what))))

    def _look(self) -> tuple[list[bool], list[int]]:
        optimizer = self._trainer.optimizers[0]
        # absent parameters know it, too; as plain ones they say it in a tenth of the time
        with torch._C.DisableTorchFunctionSubclass():
            trained = list(map(_is_trained, self._parameters))
        return trained, [len(group["params"]) for group in optimizer.param_groups]


def _require_same(everyone: list[Collection[str]]) -> None:
    for rank, names in enumerate(everyone):
        different = sorted({*names} ^ {*everyone[0]})
        if different:
            here, there = (rank, 0) if different[0] in names else (0, rank)
            raise ConfigurationError(
                f"parameter {different[0]!r} is trained on rank {here} and frozen on rank "
                f"{there}; allowed: the same trained parameters on every rank; freeze and "
                "unfreeze alike everywhere, by the epoch or the step, not by the rank or its batch"
            )
