"""Old gradients: guesses for forwards that look ahead, and the correction of late updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, final

from torch import Tensor, nn

from lightning_cyclic.compat import rank_zero_warn
from lightning_cyclic.runtime.prediction.guesses import guesses, knows

if TYPE_CHECKING:
    import lightning.pytorch as pl

GroupsOf: TypeAlias = Callable[[int], list[dict[str, Any]]]
_DISPLACEMENT = "lightning_cyclic.displacement"


@final
class Predictor:
    """Look ahead along the optimizer's direction, with the hyper-parameters of the last update.

    An optimizer whose state does not tell where it goes is extrapolated from its last
    displacement, and said so once: a buffer of the size of the weights, which knows of weight
    decay, clipping and whatever else the update did.

    Args:
        trainer: whose optimizer is asked.
        groups_of: step -> hyper-parameters of its update.
    """

    def __init__(self, trainer: pl.Trainer, groups_of: GroupsOf) -> None:
        self._trainer = trainer
        self._groups_of = groups_of
        self._displacements: dict[nn.Parameter, Tensor] = {}
        self._has_said = False

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
        optimizer, groups = self._trainer.optimizers[0], self._groups_of(v - 1)
        # a group that came since has had no update: its parameters stay as they are
        groups = [*groups, *optimizer.param_groups[len(groups) :]]
        return list(guesses(optimizer, parameters, horizon, groups, self._displacements))

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
        self._say_once(type(optimizer).__name__)
        before = [p.detach().clone() for p in parameters]
        yield
        rates = {
            p: float(values["lr"])
            for group, values in zip(optimizer.param_groups, groups, strict=False)
            for p in group["params"]
        }
        for p, values in zip(parameters, before, strict=True):
            if rate := rates.get(p, 0.0):  # at a rate of 0 the direction before it stays
                self._displacements[p] = (values - p.detach()) / rate

    def _say_once(self, name: str) -> None:
        if not self._has_said:
            self._has_said = True
            rank_zero_warn(
                f"the state of {name} does not tell where its updates go, so weights are "
                "predicted from their last displacement; read from the state: SGD with momentum, "
                "Adam, AdamW"
            )

    # ------------------------------------------------------------------ replicas

    def read_state(self, parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor], Any]:
        """Return what guesses are made of beside weights, for replicas that do not update.

        Returns:
            Tensors; for each parameter the names of its tensors and its plain values.
        """
        optimizer, tensors, facts = self._trainer.optimizers[0], [], []
        for p in parameters:
            state = dict(optimizer.state.get(p, {}))
            if p in self._displacements:
                state[_DISPLACEMENT] = self._displacements[p]
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
                self._displacements[p] = state.pop(_DISPLACEMENT)
            if state or plain:
                optimizer.state[p] = state | plain

    # ------------------------------------------------------------------ checkpoints

    def state(self, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return name -> last displacement, of this worker's parameters."""
        directions = self._displacements
        return {n: directions[p] for n, p in named.items() if p in directions}

    def put_state(self, state: Mapping[str, Tensor], named: Mapping[str, Any]) -> None:
        """Take last displacements from a checkpoint."""
        for n, p in named.items():
            if n in state:
                self._displacements[p] = state[n].to(p.device)
