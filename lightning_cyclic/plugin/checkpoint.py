"""Checkpoints: plain Lightning files, or folders, plus one key for what is delayed.

state_dict, optimizer_states, ...    full and unsharded: any other strategy can load them
lightning_cyclic                     steps done, stages, and the previous version of the
                                     stages that the next step still reads so
    format                           a number
    starts                           the module paths that begin stages 1, 2, ...: what
                                     stages=[...] takes for the same cut

Of a folder (checkpoint_folder.py) each worker writes its part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cyclic.compat import rank_zero_warn
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.optimizers import values_of
from lightning_cyclic.runtime.assembly import Assembly

KEY = "lightning_cyclic"
TO_WRITE = "to write a checkpoint"
FORMAT = 2  # of what is under it; a reader refuses others


def merged(mine: dict[Any, Any], assembly: Assembly) -> dict[Any, Any]:
    """Return on worker 0 what all workers have, in nested mappings; elsewhere the own."""
    return together(assembly.collect(mine, TO_WRITE) or [mine])


def together(parts: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return nested mappings as one; where several have a value, it is that of the first.

    Example:
        >>> together([{"t": 3, "previous": {"a": 1}}, {"t": 4, "previous": {"b": 2}}])
        {'t': 3, 'previous': {'a': 1, 'b': 2}}
    """
    whole: dict[Any, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, Mapping) and isinstance(whole.get(key, {}), Mapping):
                whole[key] = together([whole.get(key, {}), value])
            else:
                whole.setdefault(key, value)
    return whole


def whole_state(
    optimizer: Optimizer, owned: Sequence[nn.Parameter], assembly: Assembly
) -> dict[str, Any]:
    """Return the whole optimizer state on worker 0, this worker's part elsewhere."""
    mine = owned_state(optimizer, owned, assembly)
    if "state" in mine:
        mine["state"] = dict(sorted(merged(mine["state"], assembly).items()))
    return mine


def owned_state(
    optimizer: Optimizer, owned: Sequence[nn.Parameter], assembly: Assembly
) -> dict[str, Any]:
    """Return an optimizer's state of those parameters that this worker owns; all must call it.

    Values of groups are, on worker 0, those of a worker that updates: others count no steps.
    """
    mine = optimizer.state_dict()
    if "state" not in mine:  # Lightning's stand-in, where the module has no optimizer
        return mine
    ids = {id(p): k for k, p in enumerate(in_order(optimizer))}
    kept = {ids[id(p)] for p in owned}
    mine["state"] = {k: v for k, v in mine["state"].items() if k in kept}
    told = merged({"values": values_of(optimizer)} if owned else {}, assembly)
    for values, newest in zip(mine["param_groups"], told.get("values", ()), strict=False):
        values.update(newest)
    return mine


def part_of_state(module: nn.Module, own: Collection[str], *, rest: bool) -> dict[str, Any]:
    """Return a part of the weights under the names of ``module.state_dict()``."""
    named = [*module.named_parameters(), *module.named_buffers()]
    by_id = {id(x): n for n, x in named}
    return {
        key: x.detach() if isinstance(x, Tensor) else x
        for key, x in module.state_dict(keep_vars=True).items()
        if (by_id[id(x)] in own if id(x) in by_id else rest)
    }


def keep_owned_state(optimizer: Optimizer, owned: Sequence[nn.Parameter]) -> None:
    """Drop the state of parameters that other workers own (after a full checkpoint's load)."""
    kept = {id(p) for p in owned}
    for p in [p for p in optimizer.state if id(p) not in kept]:
        del optimizer.state[p]


def check_format(saved: Mapping[str, Any], path: object) -> None:
    """Refuse what another version of the package has written in another way.

    Raises:
        ConfigurationError: with what to do.
    """
    if saved and (found := saved.get("format")) != FORMAT:
        raise ConfigurationError(
            f"the checkpoint {path} has what is delayed in format {found}, of another version of "
            f"lightning_cyclic; allowed: {FORMAT}; go on with the version that wrote it, or begin "
            "anew with its weights: load_from_checkpoint, and fit without ckpt_path"
        )


def is_local(path: str | Path) -> bool:
    return "://" not in str(path)


def fits(saved: Mapping[str, Any], plan: Plan) -> bool:
    """Say whether a saved delayed state goes on under this plan with the same bits."""
    mine, theirs = numbers(plan), saved["plan"]
    return all(theirs.get(k) == v for k, v in mine.items() if k != "num_stages")


def warn_of_other_plan(saved: Mapping[str, Any], weights: str) -> None:
    """Say that a run goes on by another plan, where that is seen in its bits.

    Args:
        saved: delayed state, of another plan than the run's.
        weights: rule of the run; "sync" where Lightning itself trains.
    """
    left = saved["plan"]["weights"] != "sync"  # older versions, which its next steps would read
    if weights == "sync" and not left:
        return
    then = "the older versions of weights that are beside them are left out."
    if saved["plan"]["weights"] == "local":  # a worker's, of which there need not be one now
        num_workers = saved["plan"]["num_workers"]
        then = f"the own weights of its {num_workers} workers are left out, as is outer momentum."
    elif weights != "sync":
        then = (
            "its weight rule begins as at step 0."  # versions that it would read were never made
        )
    rank_zero_warn(
        f"The checkpoint was written under {saved['plan']}; this run has another plan and goes on "
        f"from its newest weights, as any strategy would, not with the same bits: {then}"
    )


def numbers(plan: Plan) -> dict[str, Any]:
    """Return what has to be equal for a delayed state to go on with the same bits."""
    return {
        "schedule": plan.schedule,
        "placement": plan.placement,
        "weights": plan.weights,
        "num_stages": plan.num_stages,
        "num_workers": plan.num_workers,
        "num_microbatches": plan.num_microbatches
        // plan.rounds,  # what is kept is that of any rounds
        "replicas": plan.replicas,
        "slack": plan.slack,
    } | ({} if plan.local is None else {"local": asdict(plan.local)})


def in_order(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
