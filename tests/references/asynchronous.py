"""The sequential references of pipelines without a flush: one process, one micro-batch at a time.

Written from the rules in the design (section 4) and the published recurrences, not from the
package: nothing of it is imported. Stage j of S; micro-batch i of m in step t; k = t*m + i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.references.sequential import Wire, give

Loss = Callable[[nn.Module, int, int], Tensor]  # (module, step, micro-batch) -> loss


def version_read(rule: str, t: int, i: int, j: int, m: int, num_stages: int) -> int:
    """Return the version of stage j that micro-batch i of step t reads, forward and backward."""
    if rule == "sync":
        return t
    if rule == "delayed":  # 2BW: theta_{t+1} = theta_t - lr * opt(mean_i grad f_i(theta_{t-1}))
        return max(t - 1, 0)
    if rule == "freshest":  # version t where i >= S-1-j, else t-1
        return t if i >= num_stages - 1 - j else max(t - 1, 0)
    assert rule == "stashed"  # PipeDream, one update per micro-batch: max(0, k - (S-1-j))
    assert m == 1
    return max(0, t - (num_stages - 1 - j))


def train(
    module: nn.Module,
    stages: Sequence[Sequence[nn.Parameter]],
    optimizer: Optimizer,
    loss: Loss,
    *,
    rule: str,
    num_microbatches: int,
    num_steps: int,
    after_update: Callable[[int], None] | None = None,
    replicas: int = 1,
    wire: Wire | None = None,
) -> None:
    """Train in place; the module ends with the newest version of every stage.

    With a replicas, replica r of the pipeline has micro-batches r, r + replicas, ... as its first,
    second, ...; it sums their gradients, and the sums of replicas are added in their order. The
    wire is between replicas; with one of these, between those who run micro-batches.
    """
    versions = [[[p.detach().clone() for p in ps]] for ps in stages]  # stage -> version -> values
    parts = num_microbatches if wire is not None and replicas == 1 else replicas  # of the sum
    for t in range(num_steps):
        sums: list[Sums] = [[[None] * len(ps) for ps in stages] for _ in range(parts)]
        for i in range(num_microbatches):
            for j, ps in enumerate(stages):
                v = version_read(
                    rule, t, i // replicas, j, num_microbatches // replicas, len(stages)
                )
                put(ps, versions[j][v])
            (loss(module, t, i) / num_microbatches).backward()
            for ps, total in zip(stages, sums[i % parts], strict=True):
                take_grads(ps, total)
        totals = added(sums, t, wire)
        for j, ps in enumerate(stages):
            put(ps, versions[j][t])
            for p, total in zip(ps, totals[j], strict=True):
                give(p, total)
        optimizer.step()
        optimizer.zero_grad()
        if after_update is not None:
            after_update(t)
        for j, ps in enumerate(stages):
            versions[j].append([p.detach().clone() for p in ps])


Sums = list[list[Tensor | None]]  # by stage, by parameter


def added(sums: Sequence[Sums], t: int, wire: Wire | None) -> Sums:
    """Add what replicas have, in their order."""
    total: Sums = [[None] * len(xs) for xs in sums[0]]
    for r, own in enumerate(sums):
        for j, ys in enumerate(own):
            for k, y in enumerate(ys):
                x = total[j][k]
                if y is not None and wire is not None:
                    total[j][k] = wire.plus(x, y, t, j, r)
                elif y is not None:
                    total[j][k] = y if x is None else x + y
    return total


def put(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Let parameters have these values."""
    with torch.no_grad():
        for p, x in zip(parameters, values, strict=True):
            p.copy_(x)


def take_grads(parameters: Sequence[nn.Parameter], totals: list[Tensor | None]) -> None:
    """Add gradients to their totals, and leave none."""
    for k, p in enumerate(parameters):
        grad, so_far = p.grad, totals[k]
        if grad is not None:
            totals[k] = grad if so_far is None else so_far + grad
        p.grad = None


# ---------------------------------------------------------------------- prediction


def horizons(preset: str, t: int, j: int, m: int, num_stages: int) -> tuple[int, int, int]:
    """Return (version to predict from, updates ahead in the forward, and in the backward).

    The backward predicts from version t.
    """
    behind = num_stages - 1 - j
    if preset == "pipeoptim":  # the true number of updates between forward and backward
        assert m == 1
        return max(0, t - behind), min(t, behind), 0
    assert preset == "spectrain"  # to the end of the round trip, on stage 0
    assert m == 1
    return max(0, t - behind), j // 2 + behind, j // 2


class Faces(torch.autograd.Function):
    """A linear layer whose backward uses other weights than its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Tensor, back: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, back)
        return torch.addmm(bias, x, ahead.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, back = ctx.saved_tensors
        return grad.mm(back), x.t().mm(grad).t(), None, grad.sum(0)


Guess = Callable[[Tensor, dict[str, Tensor], int], Tensor]  # (weights, state, updates) -> weights


def train_predicted(
    layers: Sequence[nn.Linear],
    num_stages: int,
    optimizer: Optimizer,
    batch: Callable[[int], Tensor],
    guess: Guess,
    *,
    preset: str,
    num_microbatches: int,
    num_steps: int,
    runs_again: bool = False,
) -> None:
    """Train linear layers with tanh between them to give zero; equally many per stage.

    A stage that is run again for its backward is run with the weights of that.
    """
    size = len(layers) // num_stages
    stage_of = [k // size for k in range(len(layers))]
    past: list[list[Any]] = []  # version -> layer -> (weight, its state, bias, its state)
    for t in range(num_steps):
        past.append([(*_kept(optimizer, x.weight), *_kept(optimizer, x.bias)) for x in layers])
        totals = [[None, None] for _ in layers]
        for i in range(num_microbatches):
            ahead, back = [], []
            for k, j in enumerate(stage_of):
                v, forward, backward = horizons(preset, t, j, num_microbatches, num_stages)
                ahead.append(_guessed(past[v][k], forward, guess))
                back.append(_guessed(past[t][k], backward, guess))
            x = batch(t * num_microbatches + i)
            if runs_again:
                grads = _recomputed(ahead, back, size, x, num_microbatches)
            else:
                grads = _with_faces(ahead, back, x, num_microbatches)
            for total, of_layer in zip(totals, grads, strict=True):
                for k, grad in enumerate(of_layer):
                    so_far: Any = total[k]
                    total[k] = grad if so_far is None else so_far + grad
        for layer, (weight, bias) in zip(layers, totals, strict=True):
            layer.weight.grad, layer.bias.grad = weight, bias
        optimizer.step()


def _kept(optimizer: Optimizer, p: nn.Parameter) -> tuple[Tensor, dict[str, Tensor]]:
    state = {k: v.clone() for k, v in optimizer.state.get(p, {}).items() if v is not None}
    return p.detach().clone(), state


def _guessed(kept: Any, updates: int, guess: Guess) -> tuple[Tensor, Tensor]:
    weight, state, bias, bias_state = kept
    if updates == 0 or not state:
        return weight, bias
    return guess(weight, state, updates), guess(bias, bias_state, updates)


def _with_faces(ahead: Any, back: Any, x: Tensor, m: int) -> list[list[Tensor]]:
    leaves = [[w.clone().requires_grad_(), b.clone().requires_grad_()] for w, b in ahead]
    for (weight, bias), (other, _) in zip(leaves, back, strict=True):
        x = torch.tanh(Faces.apply(x, weight, other, bias))
    (x.square().mean() / m).backward()
    return [[leaf.grad for leaf in pair] for pair in leaves]  # type: ignore[misc]


def _recomputed(ahead: Any, back: Any, size: int, x: Tensor, m: int) -> list[list[Tensor]]:
    """Run forwards with guesses; stage by stage, run again with other weights, and backward."""
    begins = []
    for k, (weight, bias) in enumerate(ahead):
        if k % size == 0:
            begins.append(x)
        x = torch.tanh(torch.addmm(bias, x, weight.t()))
    grads: list[list[Tensor]] = []
    grad = None
    for j in reversed(range(len(begins))):
        start = y = begins[j].clone().requires_grad_()
        pairs = back[j * size : (j + 1) * size]
        leaves = [[w.clone().requires_grad_(), b.clone().requires_grad_()] for w, b in pairs]
        for weight, bias in leaves:
            y = torch.tanh(torch.addmm(bias, y, weight.t()))
        if grad is None:
            (y.square().mean() / m).backward()
        else:
            y.backward(grad)
        grad = start.grad
        grads = [[leaf.grad for leaf in pair] for pair in leaves] + grads  # type: ignore[misc]
    return grads
