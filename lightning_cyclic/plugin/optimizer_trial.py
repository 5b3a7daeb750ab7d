"""A trial of an optimizer: may it be called for a part of its parameters, and for the rest later?

Where stages are updated apart, each call of step() has the gradients of one stage. Whoever updates
each parameter by itself does not notice. Others do: who scales all gradients by their common norm,
estimates one rate for all, or counts calls. Two small parameters tell, which are stepped together
and apart, with as many calls as training would make.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cyclic.plugin.group_values import Values, put_values, values_of
from lightning_cyclic.runtime.randomness import undisturbed

SCALES = (10.0, 1e-3, 20.0, 2e-3)  # of gradients, by step: some limit large ones, some small
MOST_GROUPS = 16
_RATE = 0.01  # where none is known

_Pair: TypeAlias = tuple[nn.Parameter, nn.Parameter]


def may_be_parted(optimizer: Optimizer, device: torch.device) -> bool | None:
    """Say whether calls for some parameters each give what one call for all gives, to the bit.

    Neither the optimizer nor its parameters change.

    Args:
        optimizer: that is tried.
        device: where it updates.

    Returns:
        None where a trial tells nothing: who steps only with a closure, say, or has other
        optimizers within.
    """
    with undisturbed(device), suppress(Exception):  # what an unknown optimizer may raise
        together, apart = (_trained(optimizer, device, parted=yes) for yes in (False, True))
        if together is not None and apart is not None:
            return all(map(_is_same, together, apart))
    return None


def _trained(optimizer: Optimizer, device: torch.device, *, parted: bool) -> list[Any] | None:
    """Return what small parameters and the values of groups are after some steps."""
    pairs = [_small(group["params"], device) for group in optimizer.param_groups[:MOST_GROUPS]]
    twin = twin_of(optimizer, pairs)
    if twin is None:
        return None
    torch.manual_seed(0)
    each = [p for pair in pairs for p in pair]
    slopes = [(k + 1) * torch.randn_like(p) for k, p in enumerate(each)]
    for t, scale in enumerate(SCALES):
        grads = [slope * scale for slope in slopes]
        torch.manual_seed(t)  # for updates that draw
        if parted:
            _step_apart(twin, each, grads)
        else:
            step_for(twin, zip(each, grads, strict=True))
    values = [x for group in values_of(twin) for _, x in sorted(group.items())]
    return [*(p.detach() for p in each), *values]


def _step_apart(twin: Optimizer, each: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    """Step for one parameter after the other, as if each call were the only one of a step."""
    before = values_of(twin)
    after: Values = before
    for p, grad in zip(each, grads, strict=True):
        put_values(twin, before, added={k for group in after for k in group})
        step_for(twin, [(p, grad)])
        after = values_of(twin)


def step_for(twin: Optimizer, given: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Call an optimizer's own step() with gradients of some parameters."""
    for p, grad in given:
        p.grad = grad.clone()
    type(twin).step(twin)  # not that of a scheduler, which counts calls
    for group in twin.param_groups:
        for p in group["params"]:
            p.grad = None


def _small(parameters: Sequence[nn.Parameter], device: torch.device) -> _Pair:
    """Return two small parameters of the kinds that a group begins and ends with."""
    first, last = (
        nn.Parameter(torch.full((3,) * p.ndim, 0.5, dtype=p.dtype, device=device))
        for p in (parameters[0], parameters[-1])
    )
    return first, last


def twin_of(
    optimizer: Optimizer, parameters: Sequence[Sequence[nn.Parameter]]
) -> Optimizer | None:
    """Return an optimizer of the same class and options for other parameters, by group.

    Rates of zero, with which many schedules begin, and any trial would pass, are others there.
    """
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if isinstance(value, OrderedDict) and name.endswith("_hooks"):
            vars(twin)[name] = OrderedDict()
        elif name == "defaults" or _is_plain(value):
            vars(twin)[name] = copy.deepcopy(value)
        elif name not in ("state", "param_groups", "step"):
            return None
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for values, given in zip(values_of(optimizer), parameters, strict=False):
        if not all(isinstance(x, Tensor) or _is_plain(x) for x in values.values()):
            return None
        values.pop("param_names", None)
        made = copy.deepcopy(values) | {"params": list(given)}
        if made.get("lr") is not None and float(made["lr"]) == 0:
            made["lr"] = made.get("initial_lr") or _RATE
        twin.param_groups.append(made)
    return twin


def _is_plain(value: Any) -> bool:
    """Say whether a copy of a value has nothing in common with it."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, complex, str, type(None), torch.dtype))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    return bool(a == b)
