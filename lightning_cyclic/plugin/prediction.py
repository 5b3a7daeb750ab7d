"""The predictor: guesses weights with the Trainer's optimizer, for forwards that look ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, final

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_cyclic.runtime.prediction.prediction import (
    Displacements,
    Shape,
    check_geometric,
    knows,
    predict,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl

GroupsOf: TypeAlias = Callable[[int, int], list[dict[str, Any]]]
LrsOf: TypeAlias = Callable[[int, int, int], list[list[float]] | None]
_DISPLACEMENT = "lightning_cyclic.displacement"


@final
class Predictor:
    """Look ahead along the optimizer's direction, with the hyper-parameters of the last update.

    An optimizer whose state does not tell where it goes is extrapolated from its last
    displacement, and said so once.

    Args:
        trainer: whose optimizer is asked.
        groups_of: (step, stage) -> hyper-parameters of that update.
        lrs_of: (version, stage, updates) -> learning rates of the updates to come, or None for
            those of the last update throughout.
        shape: "linear" or "geometric".

    Raises:
        ConfigurationError: an optimizer without such a shape.
    """

    def __init__(
        self, trainer: pl.Trainer, groups_of: GroupsOf, lrs_of: LrsOf, shape: Shape
    ) -> None:
        if shape == "geometric":
            check_geometric(trainer.optimizers[0])
        self._trainer = trainer
        self._lrs_of = lrs_of
        self._shape = shape
        self._groups_of = groups_of
        self._displacements = Displacements(say=rank_zero_warn)

    def guess(
        self, j: int, parameters: Sequence[nn.Parameter], v: int, horizon: int
    ) -> list[Tensor]:
        """Return the values that a stage's parameters are about to have.

        Args:
            j: stage.
            parameters: its own.
            v: version that they hold.
            horizon: updates to look ahead.
        """
        if v == 0:  # no update has shown a direction yet
            return [p.detach().clone() for p in parameters]
        groups, lrs = self._groups_of(v - 1, j), self._lrs_of(v, j, horizon)
        # a group that came since has had no update: its parameters stay as they are
        added = self._trainer.optimizers[0].param_groups[len(groups) :]
        return predict(
            self._trainer.optimizers[0],
            parameters,
            horizon,
            groups=[*groups, *added],
            lrs=None if lrs is None else [[*row, *(g["lr"] for g in added)] for row in lrs],
            shape=self._shape,
            fallback=self._displacements,
        )

    @contextmanager
    def noting(
        self, parameters: Sequence[nn.Parameter], groups: Sequence[Mapping[str, Any]]
    ) -> Iterator[None]:
        """Remember how far the body's update moves parameters, where that will be asked for.

        Args:
            parameters: of the stage that is updated.
            groups: hyper-parameters of the update, which may be another step's than today's.
        """
        optimizer = self._trainer.optimizers[0]
        if knows(optimizer):
            yield
            return
        before = [p.detach().clone() for p in parameters]
        rates = {
            id(p): values["lr"]
            for group, values in zip(optimizer.param_groups, groups, strict=False)
            for p in group["params"]
        }
        yield
        for p, values in zip(parameters, before, strict=True):
            if id(p) in rates:
                self._displacements.note(p, values, p, rates[id(p)])

    # ------------------------------------------------------------------ replicas

    def read_state(self, parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor], Any]:
        """Return what guesses are made of beside weights, for replicas that do not update.

        Returns:
            Tensors; for each parameter the names of its tensors and its plain values.
        """
        optimizer, tensors, facts = self._trainer.optimizers[0], [], []
        for p in parameters:
            state = dict(optimizer.state.get(p, {}))
            if p in self._displacements.directions:
                state[_DISPLACEMENT] = self._displacements.directions[p]
            names = [n for n, x in state.items() if isinstance(x, Tensor)]
            tensors += [state[n] for n in names]
            facts.append([names, {n: x for n, x in state.items() if n not in names}])
        return tensors, facts

    def write_state(
        self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor], facts: Any
    ) -> None:
        """Take what :meth:`read_state` returned on another worker."""
        optimizer, rest = self._trainer.optimizers[0], iter(tensors)
        for p, (names, plain) in zip(parameters, facts, strict=True):
            state = {n: next(rest) for n in names}
            if _DISPLACEMENT in state:
                self._displacements.directions[p] = state.pop(_DISPLACEMENT)
            if state or plain:
                optimizer.state[p] = state | plain

    # ------------------------------------------------------------------ checkpoints

    def state(self, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return name -> last displacement, of this worker's parameters."""
        directions = self._displacements.directions
        return {n: directions[p] for n, p in named.items() if p in directions}

    def put_state(self, state: Mapping[str, Tensor], named: Mapping[str, Any]) -> None:
        """Take last displacements from a checkpoint."""
        for n, p in named.items():
            if n in state:
                self._displacements.directions[p] = state[n].to(p.device)
