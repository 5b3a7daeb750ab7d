"""The runs of a comparison: tasks x optimizers x contenders x seeds, each a whole configuration.

A *step* is one batch that all contenders share. Of pipelines it is cut into
``compare.num_microbatches`` micro-batches, and a contender whose rule updates after each of them
makes as many updates in a step, from batches of one micro-batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, cast, final

from hydra import compose
from omegaconf import DictConfig, OmegaConf

# What is for the comparison itself; all else on the command line is for every run.
_OWN = ("experiment", "presets", "seeds", "tasks", "optimizers", "jobs", "results", "compare")
_TASK = "a task of your own: '+compare.tasks.mine={recipe: [data=...], ...}' tasks=[mine]"
_INSTEAD = {"strategy": "presets=[...]", "seed": "seeds=[...]", "data": _TASK, "model": _TASK}
_LR_RULES = ("per_sample", "per_update")
_QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Name one training of a comparison, and hold its configuration.

    Args:
        task: what is learnt; the name in the configuration, as are the next two.
        optimizer: what updates.
        contender: by which rule weights are read.
        seed: of the weights and of the order of the data.
        updates_per_step: how many updates a step has.
        cfg: all that the training needs, resolved.
    """

    task: str
    optimizer: str
    contender: str
    seed: int
    updates_per_step: int
    cfg: DictConfig

    @property
    def names(self) -> dict[str, Any]:
        """Return what tells this run from the others."""
        fields = ("task", "optimizer", "contender", "seed", "updates_per_step")
        return {name: getattr(self, name) for name in fields}

    @property
    def key(self) -> str:
        """Return a digest of all that decides the result."""
        said = json.dumps([self.names, OmegaConf.to_container(self.cfg)], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]


def handed_on(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that are for every run.

    Raises:
        ValueError: one sets what runs of a comparison differ in.
    """
    kept = []
    for override in overrides:
        key = override.split("=")[0].lstrip("+~")
        if key in _INSTEAD:
            raise ValueError(
                f"{override} does not fit a comparison, whose runs differ in it; "
                f"allowed: lists of the experiment; use {_INSTEAD[key]}"
            )
        if key.split(".")[0] not in _OWN:
            kept.append(override)
    return kept


def plan_runs(cfg: DictConfig, overrides: Sequence[str] = ()) -> list[Run]:
    """Make every run, seed by seed.

    Args:
        cfg: with the lists of ``conf/experiment/compare_pipelines.yaml``, say.
        overrides: for every run, on top of its task's recipe.

    Raises:
        ValueError: a name or a number does not fit.
    """
    if cfg.compare.lr_rule not in _LR_RULES:
        raise ValueError(
            f"compare.lr_rule={cfg.compare.lr_rule}; allowed: {', '.join(_LR_RULES)}; "
            "use per_sample"
        )

    @cache  # composing takes long
    def composed(task: str, strategy: str) -> DictConfig:
        recipe = [*cfg.compare.tasks[task].recipe, f"strategy={strategy}"]
        return compose("train", [*recipe, f"workers={cfg.workers}", *overrides])

    axes = (cfg.seeds, cfg.tasks, cfg.optimizers, cfg.presets)
    return [_run(cfg.compare, *names, composed) for names in product(*axes)]


def _run(
    comparison: DictConfig,
    seed: int,
    task: str,
    optimizer: str,
    contender: str,
    composed: Callable[[str, str], DictConfig],
) -> Run:
    recipe = _named(comparison.tasks, task, "tasks")
    chosen = _named(recipe.optimizers, optimizer, f"tasks.{task}.optimizers")
    arguments = dict(comparison.contenders.get(contender, {"strategy": contender}))
    own, strategy = arguments.pop("optimizer", {}), arguments.pop("strategy")
    callback = arguments.pop("callback", None)
    updates = 1
    if (most := comparison.num_microbatches) is not None:
        cut = arguments.setdefault("num_microbatches", most)
        updates = _whole(most, cut, f"num_microbatches of {contender}")

    cfg = deepcopy(composed(task, strategy))
    OmegaConf.set_struct(cfg, False)
    cfg.seed = seed
    cfg.strategy = OmegaConf.merge(cfg.strategy, arguments)
    cfg.callback = callback
    cfg.data.batch_size = _whole(cfg.data.batch_size, updates, "updates of a step's batch")
    lr = chosen.lr / updates if comparison.lr_rule == "per_sample" else chosen.lr
    cfg.model.optimizer = {**_unresolved(chosen), "lr": lr, **own, "_partial_": True}
    cfg.model.scheduler = {**_unresolved(recipe.scheduler), "_partial_": True}
    cfg.paths.output_dir = "."
    cfg.trainer.update(_QUIET, enable_checkpointing=False)
    for limit in ("max_steps", "limit_train_batches", "val_check_interval"):
        cfg.trainer[limit] = _in_updates(cfg.trainer.get(limit), updates)
    cfg.updates_per_step = updates
    OmegaConf.resolve(cfg)
    return Run(
        task=task,
        optimizer=optimizer,
        contender=contender,
        seed=seed,
        updates_per_step=updates,
        cfg=cfg,
    )


def _named(group: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in group:
        raise ValueError(
            f"{name} is not in compare.{where}; allowed: {', '.join(group)}; use one of these, "
            f"or add it: '+compare.{where}.{name}={{...}}'"
        )
    return group[name]


def _unresolved(part: DictConfig) -> dict[str, Any]:
    """Copy settings so that what they refer to is the run's, not the comparison's."""
    return cast(dict[str, Any], OmegaConf.to_container(part, resolve=False))


def _whole(number: int, divisor: int, what: str) -> int:
    if number % divisor:
        raise ValueError(
            f"{divisor} for the {what}; allowed: divisors of {number}, so that all contenders "
            "see the same batches; use 1, or other batches and compare.num_microbatches"
        )
    return number // divisor


def _in_updates(limit: float | None, updates: int) -> float | None:
    """Turn a limit in steps into one in updates; shares, and -1 for none, stay."""
    return limit * updates if isinstance(limit, int) and limit > 0 else limit
