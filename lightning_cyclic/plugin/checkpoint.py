"""Checkpoints: plain Lightning files plus one key for what is delayed.

state_dict, optimizer_states, ...    full and unsharded: any other strategy can load them
lightning_cyclic                     steps done, stages, and the previous version of the
                                     stages that the next step still reads so
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.partial_step.session import StagewiseSession
from lightning_cyclic.runtime.stages.stage_map import StageMap
from lightning_cyclic.runtime.whole_step.engine import EngineState

KEY = "lightning_cyclic"


def gather_optimizer_state(
    optimizer: Optimizer, owned: Sequence[nn.Parameter], group: Any
) -> dict[str, Any]:
    """Return the whole optimizer state on worker 0, this worker's part elsewhere.

    Args:
        optimizer: holds state for the parameters that this worker owns.
        owned: those parameters.
        group: process group of all workers for what is in the host's memory; None for one worker.
    """
    mine = optimizer.state_dict()
    ids = {id(p): k for k, p in enumerate(_in_order(optimizer))}
    kept = {ids[id(p)] for p in owned}
    mine["state"] = {k: v for k, v in mine["state"].items() if k in kept}
    parts = _gathered(mine["state"], group)
    if parts is not None:
        merged = {k: v for part in parts for k, v in part.items()}
        mine["state"] = dict(sorted(merged.items()))
    return mine


def whole_state(module: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return whole weights under the names of ``module.state_dict()``.

    Args:
        module: of which this worker has a part.
        whole: parameters and buffers by name, each under one of its names.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    by_id = {id(x): n for n, x in named}
    return {
        key: whole[by_id[id(x)]] if id(x) in by_id else x
        for key, x in module.state_dict(keep_vars=True).items()
    }


def keep_owned_state(optimizer: Optimizer, owned: Sequence[nn.Parameter]) -> None:
    """Drop the state of parameters that other workers own (after a full checkpoint's load)."""
    kept = {id(p) for p in owned}
    for p in [p for p in optimizer.state if id(p) not in kept]:
        del optimizer.state[p]


def delayed_state(plan: Plan, stages: StageMap, state: EngineState, seed: int) -> dict[str, Any]:
    """Return what goes under the key, in plain types and tensors."""
    return {
        "plan": _numbers(plan),
        "stages": stages.as_data(),
        "t": state.t,
        "previous": state.previous,
        "seed": seed,
    }


def stagewise_state(plan: Plan, session: StagewiseSession) -> dict[str, Any]:
    """Return what a pipelined run needs to go on with the same bits, in plain types."""
    assert session.cuts is not None
    return {
        "plan": _numbers(plan),
        "cuts": session.cuts.as_data(),
        "t": session.t,
        "seed": session.config.seed,
        "previous": {
            kind: merged(values, session.group) for kind, values in session.previous().items()
        },
    }


def merged(mine: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """Return on worker 0 what all workers have of parameters, by name; elsewhere the own.

    Where several have versions of one, some may have more of them than others.
    """
    if group is None:
        return dict(mine)
    parts = _gathered(mine, group) or [mine]
    whole: dict[str, Any] = {}
    for name, values in (item for part in parts for item in part.items()):
        together = isinstance(values, dict) and name in whole
        whole[name] = whole[name] | values if together else values
    return whole


def fits(saved: Mapping[str, Any], plan: Plan) -> bool:
    """Say whether a saved delayed state goes on under this plan with the same bits."""
    mine, theirs = _numbers(plan), {"warmup_steps": 0} | saved["plan"]  # older ones lack it
    return all(theirs.get(k) == v for k, v in mine.items() if k != "num_stages")


def restored(saved: Mapping[str, Any]) -> tuple[StageMap, EngineState]:
    """Return the stages and the state that a key holds."""
    state = EngineState(t=saved["t"], previous=saved["previous"])
    return StageMap.from_data(saved["stages"]), state


def _gathered(mine: Mapping[Any, Any], group: Any) -> list[Mapping[Any, Any]] | None:
    """Return on worker 0 what all workers have; None elsewhere."""
    if group is None:
        return [mine]
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    # from the host's memory: what is pickled on a GPU would be made there again, on that of its
    # worker, by worker 0
    dist.gather_object(tree_map_only(Tensor, Tensor.cpu, dict(mine)), parts, dst=0, group=group)
    return parts


def _numbers(plan: Plan) -> dict[str, Any]:
    return {
        "schedule": plan.schedule,
        "placement": plan.placement,
        "weights": plan.weights,
        "num_stages": plan.num_stages,
        "num_workers": plan.num_workers,
        "num_micro": plan.num_micro,
        "width": plan.width,
        "slack": plan.slack,
        "warmup_steps": plan.warmup_steps,
    }


def _in_order(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
