"""Directions: where an optimizer would go again, read from what it remembers.

             linear: the direction of the last update, again and again    geometric: no gradient
SGD          buf; with the last gradient g: g + momentum * buf (Nesterov) yes
             momentum 0: g
Adam, AdamW  mhat / (sqrt(vhat) + eps), vhat its maximum under amsgrad    yes
NAdam        (mu' * m / (1 - P * mu') + (1 - mu) * g / (1 - P)) / (...)   no
RAdam        mhat * r / (sqrt(vhat) + eps), or mhat while r is undefined  no
Adamax       mhat / u                                                     no
RMSprop      buf; momentum 0: g / (sqrt(v) + eps)                         no
Adagrad      g / (sqrt(G) + eps) at a learning rate that decays on        no
Rprop        sign(g) * step size, whatever the learning rate              no
Muon         NewtonSchulz(buf); with g: NewtonSchulz(g + mom * (buf - g)) no

Lightning zeroes gradients, so g is there only if somebody kept it. Without it Nesterov, NAdam
and Muon take the gradient that would leave their average of gradients as it is; plain SGD,
RMSprop without momentum and Adagrad know no direction at all, so that the last displacement
stands in for them. Rprop is the one sign rule that torch has (no Lion); its step size grows only
when the next gradient agrees, so that a prediction repeats the last one, and 0 where the sign has
changed: its state has that gradient as 0.

Weight decay: what a remembered average has absorbed is not added again; a gradient that was kept
lacks it, so it is added; decoupled decay (AdamW, Muon) shrinks the weights at each step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import (
    SGD,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

try:
    from torch.optim._muon import Muon, muon
except ImportError:  # torch < 2.9
    Muon = None  # type: ignore[assignment, misc]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is known of one parameter. All tensors are real, and none is written to.

    Args:
        weights: where it is now.
        state: what the optimizer remembers of it, empty before its first update.
        group: its hyper-parameters, plain numbers.
        lrs: the learning rate of each update to come.
        gradient: the gradient of its last update, if somebody kept it.
    """

    weights: Tensor
    state: Mapping[str, Any]
    group: Mapping[str, Any]
    lrs: Sequence[float]
    gradient: Tensor | None = None

    @property
    def has_moved(self) -> bool:
        """Say whether the state tells of an update."""
        step = self.state.get("step", 1)
        on_host = not isinstance(step, Tensor) or step.device.type == "cpu"
        if on_host and float(step) == 0:  # Adagrad makes its state beforehand
            return False
        return any(value is not None for value in self.state.values())

    @property
    def updates(self) -> float | Tensor:
        """Return how many updates were made; a tensor if asking would wait for the device."""
        step = self.state["step"]
        if isinstance(step, Tensor) and step.is_cuda:
            # 0 after an update that a scaler skipped: all moments are zero then
            return step.double().clamp(min=1)
        return float(step)

    @property
    def descent(self) -> Tensor:
        """Return the last gradient with the sign that lowers the loss, without decay."""
        assert self.gradient is not None
        return -self.gradient if self.group.get("maximize") else self.gradient

    @property
    def decay(self) -> float:
        """Return the weight decay if it is decoupled from the gradient, else 0."""
        return self.group["weight_decay"] if self.group["decoupled_weight_decay"] else 0.0

    @property
    def penalty(self) -> float:
        """Return the weight decay if it is added to the gradient, else 0."""
        return self.group["weight_decay"] if not self.group["decoupled_weight_decay"] else 0.0


Guess = Callable[[Case], Tensor]  # to the weights after len(case.lrs) updates


def advance(
    weights: Tensor, direction: Tensor, lrs: Sequence[float], decay: float = 0.0
) -> Tensor:
    """Repeat ``W <- (1 - lr * decay) * W - lr * direction`` once per learning rate.

    Example:
        >>> advance(torch.ones(1), torch.full((1,), 2.0), [0.1, 0.2])
        tensor([0.4000])
    """
    kept, reach = 1.0, 0.0
    for lr in lrs:
        kept, reach = kept * (1 - lr * decay), reach * (1 - lr * decay) + lr
    start = weights if kept == 1 else weights * kept
    return torch.add(start, direction, alpha=-reach).to(weights.dtype)


def _once_moved(guess: Guess) -> Guess:
    """Stay at the weights themselves before the first update."""

    @wraps(guess)
    def guarded(case: Case) -> Tensor:
        return guess(case) if case.has_moved else case.weights.clone()

    return guarded


def _penalised(case: Case) -> Tensor:
    """Return the last gradient as the optimizer would see it at the present weights."""
    return case.descent.add(case.weights, alpha=case.penalty) if case.penalty else case.descent


def _sgd(case: Case) -> Tensor:
    if case.group["momentum"] == 0:
        return advance(case.weights, case.descent, case.lrs, case.penalty)
    return _sgd_with_momentum(case)


@_once_moved
def _sgd_with_momentum(case: Case) -> Tensor:
    buffer = case.state["momentum_buffer"]
    if case.group["nesterov"] and case.gradient is not None:
        direction = case.descent + case.group["momentum"] * buffer
        return advance(case.weights, direction, case.lrs, case.penalty)
    return advance(case.weights, buffer, case.lrs)


def _sgd_without_gradients(case: Case) -> Tensor:
    if case.group["momentum"] == 0:
        return advance(case.weights, torch.zeros_like(case.weights), case.lrs, case.penalty)
    return _sgd_momentum_without_gradients(case)


@_once_moved
def _sgd_momentum_without_gradients(case: Case) -> Tensor:
    """Step in the plane spanned by weights and buffer: both stay sums of the present two."""
    momentum, nesterov = case.group["momentum"], case.group["nesterov"]
    share = 1 - case.group["dampening"]
    weights, buffer = (1.0, 0.0), (0.0, 1.0)  # shares of the present weights and buffer
    for lr in case.lrs:
        gradient = tuple(case.penalty * x for x in weights)
        buffer = _sum(momentum, buffer, share, gradient)
        direction = _sum(1.0, gradient, momentum, buffer) if nesterov else buffer
        weights = _sum(1.0, weights, -lr, direction)
    kept, reach = weights
    start = case.weights if kept == 1 else case.weights * kept
    return torch.add(start, case.state["momentum_buffer"], alpha=reach).to(case.weights.dtype)


def _sum(a: float, x: Sequence[float], b: float, y: Sequence[float]) -> tuple[float, float]:
    return a * x[0] + b * y[0], a * x[1] + b * y[1]


@_once_moved
def _adam(case: Case) -> Tensor:
    beta1, beta2 = case.group["betas"]
    mean = case.state["exp_avg"] / (1 - beta1**case.updates)
    scale = _root(case) / (1 - beta2**case.updates) ** 0.5 + case.group["eps"]
    return advance(case.weights, mean / scale, case.lrs, case.decay)


@_once_moved
def _adam_without_gradients(case: Case) -> Tensor:
    """Let the mean fade and the scale stay: a scale that faded too would undo the fading."""
    beta1, beta2 = case.group["betas"]
    weights, moment, root = case.weights, case.state["exp_avg"], _root(case)
    for i, lr in enumerate(case.lrs, start=1):
        moment = beta1 * moment
        if case.penalty:
            moment = moment + (1 - beta1) * case.penalty * weights
        if case.decay:
            weights = weights * (1 - lr * case.decay)
        mean = moment / (1 - beta1 ** (case.updates + i))
        scale = root / (1 - beta2 ** (case.updates + i)) ** 0.5 + case.group["eps"]
        weights = weights - lr * (mean / scale)
    return weights.to(case.weights.dtype)


def _root(case: Case) -> Tensor:
    squares = "max_exp_avg_sq" if case.group.get("amsgrad") else "exp_avg_sq"
    root: Tensor = case.state[squares].sqrt()
    return root


@_once_moved
def _nadam(case: Case) -> Tensor:
    (beta1, beta2), t = case.group["betas"], case.updates
    now, later = (
        beta1 * (1 - 0.5 * 0.96 ** (s * case.group["momentum_decay"])) for s in (t, t + 1)
    )
    product, moment = float(case.state["mu_product"]), case.state["exp_avg"]
    gradient = moment / (1 - beta1**t) if case.gradient is None else _penalised(case)
    mean = later / (1 - product * later) * moment + (1 - now) / (1 - product) * gradient
    scale = _root(case) / (1 - beta2**t) ** 0.5 + case.group["eps"]
    return advance(case.weights, mean / scale, case.lrs, case.decay)


@_once_moved
def _radam(case: Case) -> Tensor:
    (beta1, beta2), t = case.group["betas"], float(case.updates)
    mean = case.state["exp_avg"] / (1 - beta1**t)
    longest = 2 / (1 - beta2) - 1  # the length of an average over infinitely many steps
    length = longest - 2 * t * beta2**t / (1 - beta2**t)
    if length <= 5:
        return advance(case.weights, mean, case.lrs, case.decay)
    rectification = (
        (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    ) ** 0.5
    scale = (_root(case) + case.group["eps"]) / (1 - beta2**t) ** 0.5
    return advance(case.weights, mean * rectification / scale, case.lrs, case.decay)


@_once_moved
def _adamax(case: Case) -> Tensor:
    beta1, _ = case.group["betas"]
    mean = case.state["exp_avg"] / (1 - beta1**case.updates)
    return advance(case.weights, mean / case.state["exp_inf"], case.lrs)


@_once_moved
def _rmsprop(case: Case) -> Tensor:
    if case.group["momentum"] > 0:
        return advance(case.weights, case.state["momentum_buffer"], case.lrs)
    squares = case.state["square_avg"]
    if case.group["centered"]:
        squares = squares - case.state["grad_avg"] ** 2
    return advance(case.weights, _penalised(case) / (squares.sqrt() + case.group["eps"]), case.lrs)


@_once_moved
def _adagrad(case: Case) -> Tensor:
    done, slowing = float(case.updates), case.group["lr_decay"]
    lrs = [lr / (1 + (done + i) * slowing) for i, lr in enumerate(case.lrs)]
    scale = case.state["sum"].sqrt() + case.group["eps"]
    return advance(case.weights, _penalised(case) / scale, lrs)


@_once_moved
def _rprop(case: Case) -> Tensor:
    # the learning rate is but the first step size; once per update
    step = case.state["prev"].sign() * case.state["step_size"]
    return torch.add(case.weights, step, alpha=-len(case.lrs)).to(case.weights.dtype)


@_once_moved
def _muon(case: Case) -> Tensor:
    group, moment = case.group, case.state["momentum_buffer"]
    if group["nesterov"] and case.gradient is not None:
        moment = case.gradient.lerp(moment, group["momentum"])
    scratch = torch.zeros_like(moment)
    muon(  # torch's own step from zero, without momentum or decay, at learning rate 1
        [scratch],
        [moment],
        [torch.zeros_like(moment)],
        lr=1.0,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        has_complex=False,
        **{k: group[k] for k in ("ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")},
    )
    return advance(case.weights, -scratch, case.lrs, group["weight_decay"])


@final
class Rule(NamedTuple):
    """How the weights of one kind of optimizer go on.

    Args:
        linear: repeats the last direction.
        geometric: assumes no further gradient; None if that has no known form.
        remembers: says of a group's hyper-parameters whether the state alone tells the direction.
    """

    linear: Guess
    geometric: Guess | None = None
    remembers: Callable[[Mapping[str, Any]], bool] = lambda _: True


RULES: Mapping[type[Optimizer], Rule] = {
    SGD: Rule(_sgd, _sgd_without_gradients, lambda group: group["momentum"] != 0),
    Adam: Rule(_adam, _adam_without_gradients),
    AdamW: Rule(_adam, _adam_without_gradients),
    NAdam: Rule(_nadam),
    RAdam: Rule(_radam),
    Adamax: Rule(_adamax),
    RMSprop: Rule(_rmsprop, remembers=lambda group: group["momentum"] > 0),
    Adagrad: Rule(_adagrad, remembers=lambda _: False),
    Rprop: Rule(_rprop),
} | ({} if Muon is None else {Muon: Rule(_muon)})


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return the rule of an optimizer's class, or None if its updates are not known.

    A subclass counts as its parent unless it has a ``step`` of its own: what that does is
    anybody's guess. (Torch wraps every class's ``step`` for the profiler; that is no own step.)
    """
    kind = type(optimizer)
    for known, rule in RULES.items():
        if issubclass(kind, known) and inspect.unwrap(kind.step) is inspect.unwrap(known.step):
            return rule
    return None
