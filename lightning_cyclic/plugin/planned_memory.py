"""What the package's own account says that the worker of a fit keeps, whose stages are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.absent import num_bytes_of
from lightning_cyclic.runtime.state_layout import state_bytes
from lightning_cyclic.simulate import Costs, Memory, memory
from lightning_cyclic.simulate.memory import steps_to_count


def planned_memory(
    plan: Plan,
    parameters: Mapping[str, nn.Parameter],
    stage_of: Mapping[str, int],
    kept: Sequence[tuple[int, int]] | None,
    *,
    batch_bytes: int,
    again: bool,
    state_per_param: float,
) -> tuple[Memory, ...]:
    """Count what each worker keeps.

    Args:
        plan: of the fit.
        parameters: of the whole module, by name; absent ones have shapes.
        stage_of: parameter -> stage.
        kept: of each stage, bytes of activations and of what it is sent, for a micro-batch. [None:
            they count 0]
        batch_bytes: that a replica is given for a step.
        again: whether backwards run their forward again.
        state_per_param: bytes of optimizer state per byte of parameters.
    """
    params = [0.0] * plan.num_stages
    for name, p in parameters.items():
        params[stage_of.get(name, 0)] += num_bytes_of(p)
    activations, sent = zip(*(kept or [(0, 0)] * plan.num_stages), strict=True)
    of_each = max(1, plan.num_microbatches // plan.replicas)
    nothing = (0.0,) * plan.num_stages
    costs = Costs(
        forward_s=nothing,
        backward_s=nothing,
        param_bytes=tuple(params),
        cut_bytes=(batch_bytes / of_each, *map(float, sent[1:])),
        activation_bytes=tuple(map(float, activations)),
    )
    plan = replace(plan, num_steps=steps_to_count(plan.num_stages, of_each))
    return memory(plan, costs, remat=again, state_per_param=state_per_param)


def state_per_param(optimizers: Sequence[Optimizer], parameters: Iterable[nn.Parameter]) -> float:
    """Return the bytes of what optimizers will have, per byte of a module's parameters.

    That is what they make of the shapes of parameters, and what they train in the place of these.
    Where shapes do not tell, the two moments of Adam are assumed.
    """
    theirs = {id(p): num_bytes_of(p) for p in parameters}
    if not theirs:
        return 0.0
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    masters = sum(num_bytes_of(p) for g in groups for p in g["params"] if id(p) not in theirs)
    try:
        made = sum(map(state_bytes, optimizers))
    except ConfigurationError:
        return 2.0
    return (made + masters) / sum(theirs.values())
