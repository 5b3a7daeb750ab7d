"""Freezing and unfreezing between steps, taken over by all ranks at once.

Ranks that hold several versions of a stage have made their plans for what is trained. Where that
changes (BaseFinetuning, or a hook that calls ``requires_grad_``), they finish the updates in
flight, compare notes, and go on with other plans. The rule of the preset stays what it is: what
was frozen has had the same values in all versions. It is no check that the comparison of the first
step could make: what it notices, between any two steps, is carried out.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter
from typing import Any, final

import torch
from torch import nn

from lightning_cyclic.compat import Trainer
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.agreement import gather_texts
from lightning_cyclic.runtime.weight_forms import WeightForms

_is_trained = attrgetter("requires_grad")


@final
class FreezingWatch:
    """Notice that other parameters are trained than in the last step.

    Args:
        trainer: set up but for this; its module and its optimizer say what is trained.
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
        """Say whether something was frozen, unfrozen, or given to the optimizer since."""
        return self._look() != self._seen

    def agree(self, session: Any) -> None:
        """Take what is trained now for known, if all other ranks train it, too.

        Args:
            session: whose workers agree; all must call it.

        Raises:
            ConfigurationError: on every rank, where ranks train different parameters.
        """
        before, self._trained = self._trained, self._note()
        changed = [n for n in before | self._trained if (n in before) != (n in self._trained)]
        if session.group is None:
            return
        what = f", as it did with {changed[0]!r}" if changed else ""
        with session.naming_peers(f"to freeze or unfreeze parameters{what}"):
            texts = gather_texts("\n".join(self._trained), session.group)
        _require_same([set(text.splitlines()) for text in texts])

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
