"""Prediction: the weights that an optimizer is about to reach, guessed without stepping it.

A pipeline that updates while micro-batches are in flight runs a forward s updates before its
backward. Weight prediction runs that forward on ``W - sum of lr * direction`` over s updates,
where the direction is what the optimizer would apply again. Directions of torch's optimizers are
read from their state (the table in directions.py); of any other, the last displacement stands in.

Where nothing has moved there is no direction: before an optimizer's first update, and at a
learning rate of 0, forwards read the weights as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_cyclic.errors import ConfigurationError, one_of
from lightning_cyclic.runtime.prediction.directions import (
    RULES,
    Case,
    Guess,
    Rule,
    advance,
    rule_of,
)

Shape = Literal["linear", "geometric"]


@final
class Displacements:
    """Remember the last displacement of each parameter, as a direction for any optimizer.

    It knows of weight decay, clipping and whatever else the update did, for one buffer of the
    size of the weights.

    Args:
        say: takes a sentence, once per optimizer class that has to be predicted so.

    Attributes:
        directions: ``(before - after) / lr`` per parameter; checkpoints must keep it.
    """

    def __init__(self, say: Callable[[str], object] = warnings.warn) -> None:
        self.directions: dict[nn.Parameter, Tensor] = {}
        self._say = say
        self._said: set[type[Optimizer]] = set()

    @torch.no_grad()
    def note(
        self, parameter: nn.Parameter, before: Tensor, after: Tensor, lr: float | Tensor
    ) -> None:
        """Remember an update.

        Args:
            parameter: the parameter that was updated.
            before: its weights before the update.
            after: its weights afterwards; may be the parameter itself.
            lr: the learning rate of the update; at 0 the earlier direction stays.
        """
        if float(lr) != 0:
            self.directions[parameter] = (before.detach() - after.detach()) / float(lr)

    def say_once(self, optimizer: Optimizer) -> None:
        """Say, the first time for this class, that displacements stand in."""
        if type(optimizer) not in self._said:
            self._said.add(type(optimizer))
            self._say(
                f"{_why_not(optimizer)}, so weights are predicted from its last displacement; "
                f"read from the state: {_names(RULES)}"
            )


def knows(optimizer: Optimizer) -> bool:
    """Say whether the optimizer's state alone tells where it would go, for all its groups.

    If not, :func:`predict` needs ``fallback`` or, where :data:`RULES` has the class,
    ``last_gradients``.

    Example:
        >>> weights = [nn.Parameter(torch.ones(2))]
        >>> knows(torch.optim.SGD(weights, momentum=0.9)), knows(torch.optim.SGD(weights))
        (True, False)
    """
    rule = rule_of(optimizer)
    return rule is not None and all(rule.remembers(g) for g in optimizer.param_groups)


def check_geometric(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose way without further gradients is not known.

    Raises:
        ConfigurationError: with the optimizers of which it is.
    """
    rule = rule_of(optimizer)
    if rule is None or rule.geometric is None:
        raise ConfigurationError(
            f"got a geometric horizon with {type(optimizer).__name__}; allowed: "
            f"{_names([k for k, r in RULES.items() if r.geometric])}; use a linear one"
        )


@torch.no_grad()
def predict(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    horizon: int,
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    lrs: Sequence[Sequence[float | Tensor]] | None = None,
    shape: Shape = "linear",
    fallback: Displacements | None = None,
    last_gradients: Mapping[nn.Parameter, Tensor] | None = None,
) -> list[Tensor]:
    """Guess the weights after ``horizon`` more updates.

    Neither parameters, gradients nor optimizer are changed, and ``p.grad`` is not read. Where
    nothing can move, because the horizon or the learning rate is 0 or no update was made yet,
    the guess has the very bits of the weights.

    Where a direction needs the last gradient (SGD and RMSprop without momentum, Adagrad), it is
    taken from ``last_gradients``, else the last displacement of ``fallback`` stands in. Nesterov
    SGD, NAdam and Muon use it if it is given; else they assume the gradient that would leave
    their average of gradients as it is. (Plain SGD gains nothing: on a quadratic of curvature c
    whose gradients are one update old, prediction lowers the largest stable lr * c from 1 to
    0.618; with momentum 0.9 it raises it from 0.1 to 0.270.)

    Args:
        optimizer: whose state is read; the optimizer itself, not a wrapper.
        parameters: the parameters to predict, each in one of the optimizer's groups or frozen.
        horizon: number of updates to look ahead, 0 or more.
        groups: hyper-parameters to use instead of the present ones, parallel to
            ``optimizer.param_groups``; "params" is not needed.
        lrs: learning rate of each update to come for each group, horizon x groups; default: the
            present one throughout.
        shape: "linear" repeats the last direction; "geometric" assumes that no further gradient
            comes, so that momentum fades (SGD, Adam and AdamW only; second moments are held).
        fallback: last displacements, for optimizers that :func:`knows` does not know.
        last_gradients: gradients of the last update, before weight decay.

    Returns:
        New tensors parallel to ``parameters``, each of its parameter's shape and dtype.

    Raises:
        ConfigurationError: a negative horizon, lists of another length, a parameter in no group,
            sparse gradients, an optimizer without such a shape, or an unknown one without
            ``fallback``.

    Source:
        linear: PipeOptim, https://arxiv.org/abs/2312.00839, which names the formula and the
            directions of SGD with momentum, Adam and AdamW; SpecTrain,
            https://arxiv.org/abs/1809.02839, has SGD's. The directions of others are ours, from
            the same idea.
        geometric: FTPipe (USENIX ATC 2021), weight prediction,
            https://github.com/saareliad/FTPipe; so is the learning rate of each update.
        decay, displacements: ours, from the same idea.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
        >>> weight.grad = torch.ones(1)
        >>> sgd.step()
        >>> weight.data, predict(sgd, [weight], 2)
        (tensor([0.9000]), [tensor([0.7000])])
        >>> predict(sgd, [weight], 2, shape="geometric")
        [tensor([0.8250])]
    """
    settings = _settings(optimizer, groups)
    rates = _rates(horizon, lrs, settings)
    if shape not in ("linear", "geometric"):
        raise ConfigurationError(
            one_of(shape, ["linear", "geometric"], "prediction shape", 'use shape="linear"')
        )
    member = {p: n for n, g in enumerate(optimizer.param_groups) for p in g["params"]}
    guide = _Guide(optimizer, rule_of(optimizer), shape, fallback, last_gradients)
    guesses = []
    for index, p in enumerate(parameters):
        n = member.get(p)
        if n is None:
            _check_frozen(index, p)
        if n is None or not any(rates[n]):
            guesses.append(p.detach().clone())
        else:
            guesses.append(guide.guess(index, p, settings[n], rates[n]))
    return guesses


@final
class _Guide(NamedTuple):
    """Predict one parameter at a time, by the optimizer's rule or by the last displacement."""

    optimizer: Optimizer
    rule: Rule | None
    shape: Shape
    fallback: Displacements | None
    last_gradients: Mapping[nn.Parameter, Tensor] | None

    def guess(
        self, index: int, p: nn.Parameter, group: Mapping[str, Any], lrs: Sequence[float]
    ) -> Tensor:
        """Return the weights of the ``index``-th parameter after as many updates as ``lrs``."""
        gradient = None if self.last_gradients is None else self.last_gradients.get(p)
        state = self.optimizer.state.get(p, {})  # by [p] an entry would be made
        case = Case(weights=p.detach(), state=state, group=group, lrs=lrs, gradient=gradient)
        guess = self._guess_from_state(case)
        if guess is None:
            return self._guess_from_displacement(p, lrs)
        _check_tensors(index, case)
        return _in_reals(guess, case)

    def _guess_from_state(self, case: Case) -> Guess | None:
        if self.shape == "geometric":
            check_geometric(self.optimizer)
            assert self.rule is not None
            return self.rule.geometric
        if self.rule is None:
            return None
        known = self.rule.remembers(case.group) or case.gradient is not None
        return self.rule.linear if known else None

    def _guess_from_displacement(self, p: nn.Parameter, lrs: Sequence[float]) -> Tensor:
        direction = None
        if self.fallback is not None:
            self.fallback.say_once(self.optimizer)
            direction = self.fallback.directions.get(p)
        elif self.rule is None or self.last_gradients is None:
            raise ConfigurationError(
                f"{_why_not(self.optimizer)}; allowed: any optimizer with fallback=Displacements()"
                f" that notes each update, or {_names(RULES)} with last_gradients where the state "
                "does not tell; give one of these"
            )
        return p.detach().clone() if direction is None else advance(p.detach(), direction, lrs)


def _settings(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return each group's hyper-parameters as plain numbers."""
    present = optimizer.param_groups
    if groups is not None and len(groups) != len(present):
        raise ConfigurationError(
            f"got hyper-parameters of {len(groups)} groups; allowed: one mapping for each of the "
            f"optimizer's {len(present)} groups; snapshot optimizer.param_groups again"
        )
    decoupled = {"decoupled_weight_decay": isinstance(optimizer, AdamW)}  # torch < 2.7 lacks it
    return [
        decoupled | {k: _plain(v) for k, v in group.items() if k != "params"}
        for group in (present if groups is None else groups)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _rates(
    horizon: int,
    lrs: Sequence[Sequence[float | Tensor]] | None,
    settings: Sequence[Mapping[str, Any]],
) -> list[list[float]]:
    """Return the learning rates of the updates to come, groups x horizon."""
    if horizon < 0:
        raise ConfigurationError(
            f"got a prediction horizon of {horizon} updates; allowed: 0 or more; use the number "
            "of updates between a forward and its backward"
        )
    if lrs is None:
        return [[group["lr"]] * horizon for group in settings]
    if len(lrs) != horizon or any(len(row) != len(settings) for row in lrs):
        raise ConfigurationError(
            f"got learning rates of {len(lrs)} updates for {sorted({len(x) for x in lrs})} "
            f"groups; allowed: {horizon} updates (the horizon) for {len(settings)} groups; give "
            "lrs[i][n], the learning rate of group n in the i-th update to come"
        )
    return [[_plain(row[n]) for row in lrs] for n in range(len(settings))]


def _in_reals(guess: Guess, case: Case) -> Tensor:
    """Take complex numbers for pairs of real ones, as torch's optimizers do."""
    if not case.weights.is_complex():
        return guess(case)
    state = {k: _pairs(v) if isinstance(v, Tensor) else v for k, v in case.state.items()}
    gradient = None if case.gradient is None else _pairs(case.gradient)
    pairs = guess(replace(case, weights=_pairs(case.weights), state=state, gradient=gradient))
    return torch.view_as_complex(pairs)


def _pairs(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _check_frozen(index: int, p: nn.Parameter) -> None:
    if p.requires_grad:
        raise ConfigurationError(
            f"parameter {index} of shape {tuple(p.shape)} is in no group of the optimizer; "
            "allowed: parameters that the optimizer updates, and frozen ones; give this "
            "optimizer's own parameters, or set requires_grad=False"
        )


def _check_tensors(index: int, case: Case) -> None:
    """Refuse what does not belong to dense weights of this shape."""
    given = {f"state {k!r}": v for k, v in case.state.items() if isinstance(v, Tensor) and v.ndim}
    if case.gradient is not None:
        given["last gradient"] = case.gradient
    for name, tensor in given.items():
        if tensor.layout != torch.strided:
            raise ConfigurationError(
                f"the {name} of parameter {index} is sparse; allowed: dense gradients and state; "
                "use nn.Embedding(sparse=False)"
            )
        if tensor.shape != case.weights.shape:
            raise ConfigurationError(
                f"the {name} of parameter {index} has shape {tuple(tensor.shape)}; allowed: "
                f"{tuple(case.weights.shape)}, that of its weights; it may be another "
                "parameter's: load the optimizer state that was saved with this module"
            )


def _why_not(optimizer: Optimizer) -> str:
    """Say why the state alone does not tell the direction."""
    name = type(optimizer).__name__
    if rule_of(optimizer) is None:
        return f"the updates of {name} are not known"
    return f"{name} with these hyper-parameters remembers no direction"


def _names(classes: Iterable[type[Optimizer]]) -> str:
    return ", ".join(kind.__name__ for kind in classes)
