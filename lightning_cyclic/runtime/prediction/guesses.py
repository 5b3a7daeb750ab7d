"""Guesses: the weights that an optimizer is about to reach, without stepping it.

A pipeline that updates while micro-batches are in flight runs a forward s updates before its
backward. Weight prediction runs that forward on ``W - s * lr * direction``, along the direction in
which the optimizer would go again:

    SGD           its momentum buffer
    Adam, AdamW   mhat / (sqrt(vhat) + eps), vhat its maximum under amsgrad
    any other     its last displacement, divided by the learning rate; also SGD without momentum

Decoupled weight decay (AdamW) shrinks the weights at each step, too. Where nothing has moved there
is no direction: before an optimizer's first update, and at a learning rate of 0, forwards read the
weights as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer


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
    known = any(
        issubclass(kind, base) and inspect.unwrap(kind.step) is inspect.unwrap(base.step)
        for base in (SGD, Adam, AdamW)
    )
    return known and all(_remembers(group) for group in optimizer.param_groups)


@torch.no_grad()
def guesses(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    updates: int,
    groups: Sequence[Mapping[str, Any]],
    displacements: Mapping[nn.Parameter, Tensor],
) -> Iterator[Tensor]:
    """Guess the weights after more updates: new tensors, for parameters and optimizer stay.

    Args:
        optimizer: that makes the updates.
        parameters: of which values are guessed; what it does not train stays where it is.
        updates: how many.
        groups: hyper-parameters, parallel to the optimizer's groups.
        displacements: the last ones, for where its state does not tell.

    Source: PipeOptim, https://arxiv.org/abs/2312.00839, which names formula and directions;
        SpecTrain, https://arxiv.org/abs/1809.02839, has SGD's. Decay and displacements are ours.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
        >>> weight.grad = torch.ones(1)
        >>> sgd.step()
        >>> weight.data, *guesses(sgd, [weight], 2, sgd.param_groups, {})
        (tensor([0.9000]), tensor([0.7000]))
    """
    group_of = {
        p: values
        for group, values in zip(optimizer.param_groups, groups, strict=True)
        for p in group["params"]
    }
    is_known = knows(optimizer)
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


def _remembers(group: Mapping[str, Any]) -> bool:
    return group.get("momentum") != 0


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
