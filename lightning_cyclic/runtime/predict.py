"""Prediction: the weights that an optimizer is about to reach, for forwards that look ahead.

A pipeline that updates while micro-batches are in flight runs a forward s updates before its
backward. Weight prediction runs that forward on ``W - s * lr * direction``, along the direction in
which the optimizer would go again:

    SGD           its momentum buffer
    Adam, AdamW   mhat / (sqrt(vhat) + eps), vhat its maximum under amsgrad
    any other     its last displacement, divided by the learning rate; also SGD without momentum

Decoupled weight decay (AdamW) shrinks the weights at each step, too. Where nothing has moved there
is no direction: before an optimizer's first update, and at a learning rate of 0, forwards read the
weights as they are.

When the backward comes, the weights in the graph are others: the newest (PipeOptim), or a new
guess (SpecTrain). What the forward computed with them stays, low-precision copies under autocast
included. So one stand-in for each stage serves all micro-batches.

Source: PipeOptim, https://arxiv.org/abs/2312.00839, which names formula and directions; SpecTrain,
    https://arxiv.org/abs/1809.02839, has SGD's. Decay and displacements are ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action
from lightning_cyclic.runtime.bits import put

Guess: TypeAlias = Callable[[Sequence[nn.Parameter], int, int], list[Tensor]]
"""(parameters, the version that they hold, updates to look ahead) -> values."""
Groups: TypeAlias = Sequence[Mapping[str, Any]]
Values: TypeAlias = dict[str, Tensor]
_DISPLACEMENT = "lightning_cyclic.displacement"


@final
class Foresight:
    """Guess the weights of stages, as far ahead as a plan says, and keep guesses that are owed."""

    def __init__(
        self, plan: Plan, stages: Mapping[int, Mapping[str, nn.Parameter]], guess: Guess
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._guess = guess
        self._reserved: dict[tuple[int, int, int], Values] = {}

    def train_others(self, stages: Mapping[int, Mapping[str, nn.Parameter]]) -> None:
        """Guess other parameters from now on, behind a flush; what was frozen stays as it is."""
        self._stages = stages
        for (t, i, j), values in self._reserved.items():
            named = stages[j].items()
            self._reserved[t, i, j] = {n: values.get(n, p.detach().clone()) for n, p in named}

    def restart(self) -> None:
        """Forget the guesses from weights that others have taken the place of, behind a flush."""
        self._reserved.clear()

    def looks_ahead(self, a: Action) -> bool:
        """Say whether the forward or the backward of a micro-batch reads a guess."""
        assert a.i is not None
        plan = self._plan
        return plan.horizon(a.t, a.i, a.j) > 0 or plan.backward_horizon(a.j) > 0

    def forward(self, a: Action, newest: int) -> Values:
        """Return what a forward reads, of parameters that hold the newest version."""
        assert a.i is not None
        return self._reserved.pop((a.t, a.i, a.j), None) or self._made(a, newest)

    def backward(self, j: int, newest: int) -> Values:
        return self._look(j, newest, self._plan.backward_horizon(j))

    def reserve(self, a: Action, newest: int) -> None:
        """Guess now for a forward that would run before the next update, but for a flush."""
        assert a.i is not None
        key = (a.t, a.i, a.j)
        if key not in self._reserved and self.looks_ahead(a):
            self._reserved[key] = self._made(a, newest)

    def _made(self, a: Action, newest: int) -> Values:
        assert a.i is not None
        return self._look(a.j, newest, self._plan.horizon(a.t, a.i, a.j))

    def _look(self, j: int, newest: int, horizon: int) -> Values:
        stage = self._stages[j]
        if horizon == 0:
            return {n: p.detach() for n, p in stage.items()}
        values = self._guess(list(stage.values()), newest, horizon)
        return dict(zip(stage, values, strict=True))

    def owed(self) -> dict[str, dict[tuple[int, int], Tensor]]:
        """Return the guesses that later forwards are owed: name -> (t, i) -> values."""
        found: dict[str, dict[tuple[int, int], Tensor]] = {}
        for (t, i, _), values in self._reserved.items():
            for n, x in values.items():
                found.setdefault(n, {})[t, i] = x.clone()
        return found

    def put_owed(self, owed: Mapping[str, Mapping[tuple[int, int], Tensor]]) -> None:
        for j, stage in self._stages.items():
            for t, i in sorted({key for n in stage for key in owed.get(n, {})}):
                values = {n: owed.get(n, {}).get((t, i), p) for n, p in stage.items()}
                self._reserved[t, i, j] = {
                    n: torch.empty_like(p).copy_(values[n]).detach() for n, p in stage.items()
                }


@final
class Predictor:
    """Look ahead along the optimizer's direction, with the hyper-parameters of the last update.

    A displacement is a buffer of the size of the weights.

    Args:
        groups_of: step -> hyper-parameters of its update.
    """

    def __init__(
        self,
        optimizer: Callable[[], Optimizer],
        groups_of: Callable[[int], list[dict[str, Any]]],
        say: Callable[[str], None],
    ) -> None:
        self._optimizer = optimizer
        self._groups_of = groups_of
        self._say = say
        self._displacements: dict[nn.Parameter, Tensor] = {}
        self._has_said = False

    def guess(self, parameters: Sequence[nn.Parameter], v: int, horizon: int) -> list[Tensor]:
        """Return the values that parameters, which hold version v, have after more updates."""
        if v == 0:  # no update has shown a direction yet
            return [p.detach().clone() for p in parameters]
        optimizer, groups = self._optimizer(), self._groups_of(v - 1)
        # a group that came since has had no update: its parameters stay as they are
        groups = [*groups, *optimizer.param_groups[len(groups) :]]
        return list(guesses(optimizer, parameters, horizon, groups, self._displacements))

    @contextmanager
    def noting(self, parameters: Sequence[nn.Parameter], groups: Groups) -> Iterator[None]:
        """Remember how far the body's update, by these groups, moves parameters, if need be."""
        optimizer = self._optimizer()
        if knows(optimizer):
            yield
            return
        if not self._has_said:
            self._has_said = True
            self._say(
                f"the state of {type(optimizer).__name__} does not tell where its updates go, so "
                "weights are predicted from their last displacement; read from the state: SGD "
                "with momentum, Adam, AdamW"
            )
        before = [p.detach().clone() for p in parameters]
        yield
        group_of = _by_parameter(optimizer, groups)
        for p, values in zip(parameters, before, strict=True):
            rate = float(group_of.get(p, {}).get("lr", 0.0))
            if rate:  # at 0 the direction before stays
                self._displacements[p] = (values - p.detach()) / rate

    def read_state(self, parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor], Any]:
        """Return what guesses are made of beside weights, for replicas that do not update.

        These are tensors, and for each parameter their names and its plain values.
        """
        optimizer, tensors, facts = self._optimizer(), [], []
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
        optimizer, rest = self._optimizer(), iter(tensors)
        for p, (names, plain) in zip(parameters, facts, strict=True):
            state = {n: next(rest) for n in names}
            if _DISPLACEMENT in state:
                self._displacements[p] = state.pop(_DISPLACEMENT)
            if state or plain:
                optimizer.state[p] = state | plain

    def state(self, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return name -> last displacement, of this worker's parameters."""
        return {n: self._displacements[p] for n, p in named.items() if p in self._displacements}

    def put_state(self, state: Mapping[str, Tensor], named: Mapping[str, Any]) -> None:
        for n, p in named.items():
            if n in state:
                self._displacements[p] = state[n].to(p.device)


def overwrite(parameters: Mapping[str, nn.Parameter], values: Values) -> None:
    """Change values that graphs hold, unseen by autograd."""
    put([parameters[n] for n in values], [*values.values()])


def knows(optimizer: Optimizer) -> bool:
    """Say whether the optimizer's state alone tells where it would go, for all its groups.

    A subclass counts as its parent unless it has a ``step`` of its own: what that does is
    anybody's guess. (Torch wraps every class's ``step`` for the profiler; that is no own step.)

    Example:
        >>> weights = [nn.Parameter(torch.ones(2))]
        >>> knows(torch.optim.SGD(weights, momentum=0.9)), knows(torch.optim.SGD(weights))
        (True, False)
    """
    kind = type(optimizer)
    is_known = any(
        issubclass(kind, base) and inspect.unwrap(kind.step) is inspect.unwrap(base.step)
        for base in (SGD, Adam, AdamW)
    )
    return is_known and all(group.get("momentum") != 0 for group in optimizer.param_groups)


@torch.no_grad()
def guesses(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    updates: int,
    groups: Groups,
    displacements: Mapping[nn.Parameter, Tensor],
) -> Iterator[Tensor]:
    """Guess the weights after more updates: new tensors, for parameters and optimizer stay.

    Args:
        optimizer: that makes the updates.
        parameters: of which values are guessed; what it does not train stays where it is.
        updates: how many.
        groups: hyper-parameters, parallel to the optimizer's groups.
        displacements: the last ones, for where its state does not tell.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
        >>> weight.grad = torch.ones(1)
        >>> sgd.step()
        >>> weight.data, *guesses(sgd, [weight], 2, sgd.param_groups, {})
        (tensor([0.9000]), tensor([0.7000]))
    """
    group_of, is_known = _by_parameter(optimizer, groups), knows(optimizer)
    for p in parameters:
        group, weights, direction = group_of.get(p), p.detach(), displacements.get(p)
        if group is not None and is_known:
            direction = _direction(optimizer.state.get(p, {}), group)
        lr = 0.0 if group is None or direction is None else float(group["lr"])
        if direction is None or group is None or updates * lr == 0:
            yield weights.clone()
            continue
        # torch < 2.7 has no such key
        is_decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
        decay = float(group["weight_decay"]) if is_known and is_decoupled else 0.0
        yield _advanced(weights, direction, lr, updates, decay)


def _by_parameter(optimizer: Optimizer, groups: Groups) -> dict[nn.Parameter, Mapping[str, Any]]:
    both = zip(optimizer.param_groups, groups, strict=False)
    return {p: values for group, values in both for p in group["params"]}


def _direction(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor | None:
    """Return the direction of the last update of SGD, Adam or AdamW, if there was one."""
    if "momentum" in group:
        buffer: Tensor | None = state.get("momentum_buffer")
        return buffer
    step = state.get("step", 0)
    if isinstance(step, Tensor) and step.device.type != "cpu":  # asking would wait for the device
        step = step.double().clamp(min=1)  # 0 where a scaler has skipped all: moments are zero
    elif (step := float(step)) == 0:
        return None
    beta1, beta2 = map(float, group["betas"])
    squares = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    mean = _pairs(state["exp_avg"]) / (1 - beta1**step)
    scale = _pairs(squares).sqrt() / (1 - beta2**step) ** 0.5 + float(group["eps"])
    direction = mean / scale
    return torch.view_as_complex(direction) if squares.is_complex() else direction


def _pairs(x: Tensor) -> Tensor:
    """Take complex numbers for pairs of real ones, as torch's optimizers do."""
    return torch.view_as_real(x) if x.is_complex() else x


def _advanced(weights: Tensor, direction: Tensor, lr: float, updates: int, decay: float) -> Tensor:
    """Repeat ``W <- (1 - lr * decay) * W - lr * direction``."""
    kept, reach = 1.0, 0.0
    for _ in range(updates):
        kept, reach = kept * (1 - lr * decay), reach * (1 - lr * decay) + lr
    start = weights if kept == 1 else weights * kept
    return torch.add(start, direction, alpha=-reach).to(weights.dtype)
