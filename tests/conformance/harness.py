"""Run one cell of the matrix, and its reference: a plain Trainer that keeps the preset's rule.

Micro-batch k = 2 t + i of a run is made from k alone. The reference gets one after the other and
accumulates two; of two replicated workers each gets every other one; a pipeline gets the two of a
step joined. One row after the other by hand: pytest tests/conformance -k "outs and 1f1b".
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.harness import processes
from tests.harness.pipelines import joined
from tests.harness.processes import here
from tests.harness.trainers import assert_same, make_trainer, weights_of
from tests.references import asynchronous, sequential
from tests.references.rules import ONE_EACH, STAGES_APART, WHOLE

NUM_WORKERS = 2  # and micro-batches
NUM_STEPS = 4  # per epoch
PIPELINES = {name: rule for name, rule in STAGES_APART.items() if name not in ONE_EACH}
RULES = WHOLE | PIPELINES
PRESETS = list(RULES)
DELAYED = [name for name, rule in RULES.items() if rule != "sync"]
COUNTED = {"val_check_interval", "limit_train_batches", "overfit_batches"}  # in batches
FLOWS = ["cyclic_pipeline", "pipedream_2bw", "cyclic_mp"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Say what is trained, how, and what comes of it.

    Args:
        make: makes the module.
        data: k -> micro-batch.
        stages: paths at which a pipeline is cut in two.
        flags: makes flags of the Trainer, callbacks among them.
        options: of the strategy, by preset; of all under "".
        behind: called with trainer, module and evaluation batches behind the fit; returns what
            is compared, too.
        validates: whether the fit has validation batches.
        num_epochs: of the fit.
        num_steps: of the fit, where it is not that of all batches.
        own: names of attributes of the module that each replicated worker has for itself.
        reference: makes the module of the reference, where Lightning cannot accumulate the
            other. [the same]
        refused: preset -> pattern of the text of the error by which all ranks refuse it.
    """

    make: Callable[[], LightningModule]
    data: Callable[[int], Any]
    stages: Sequence[str]
    flags: Callable[[], dict[str, Any]] = dict
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    behind: Callable[[Trainer, Any, Any], Any] | None = None
    validates: bool = False
    num_epochs: int = 1
    num_steps: int | None = None
    own: Sequence[str] = ()
    reference: Callable[[], LightningModule] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def strategy(self, preset: str) -> dict[str, Any]:
        """Return the arguments of the strategy for a preset."""
        chosen: dict[str, Any] = {"preset": preset}
        if preset in PIPELINES:
            chosen |= {"stages": list(self.stages), "num_microbatches": NUM_WORKERS}
        else:
            chosen |= {"stages": 2}
        return chosen | self.options.get("", {}) | self.options.get(preset, {})


class Rule(Callback):
    """Let a plain Trainer read, in each micro-batch, the weights that a rule says.

    Args:
        preset: whose rule.
        stage_of: parameter -> stage, as the strategy found them.
        own: names of attributes of the module that each worker has for itself.
        window: batches of each worker per step.
    """

    def __init__(
        self, preset: str, stage_of: Mapping[str, int], own: Sequence[str], window: int
    ) -> None:
        self.preset, self.stage_of, self.window = preset, stage_of, window
        self.sums: dict[nn.Parameter, Tensor | None] = {}  # of the workers before this one
        self.own: list[dict[str, Any]] = [dict.fromkeys(own) for _ in range(NUM_WORKERS)]
        self.k = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        num_stages = 1 + max(self.stage_of.values(), default=0)
        self.stages: list[list[nn.Parameter]] = [[] for _ in range(num_stages)]
        for name, p in pl_module.named_parameters():
            self.stages[self.stage_of.get(name, 0)].append(p)
        if RULES[self.preset] == "sync":
            self.stages = []  # who reads the newest ones alone is the plain Trainer
        self.versions = [[_values(ps)] for ps in self.stages]
        for state in self.own:
            state.update({n: copy.copy(getattr(pl_module, n)) for n in state})

    def reads(self, t: int, i: int, j: int) -> int:
        """Return the version of stage j that micro-batch i of step t reads."""
        n, rule, num_stages = NUM_WORKERS, RULES[self.preset], len(self.stages)
        if rule == "sync":
            return t
        if self.preset in PIPELINES:
            return asynchronous.version_read(rule, t, i, j, n, num_stages)
        fresh = sequential.reads_newest(rule, i, j, n, num_stages, 0)
        return t if fresh else max(t - 1, 0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        t, number = divmod(self.k, NUM_WORKERS * self.window)
        i = number // self.window if self.preset in WHOLE else number % NUM_WORKERS
        self.k += 1
        if self.preset in WHOLE and number == self.window:
            self.sums = {p: p.grad for p in pl_module.parameters()}
            pl_module.zero_grad()
        vars(pl_module).update(self.own[i])
        for j, ps in enumerate(self.stages):
            if number == 0 and t > 0:  # what the last update left, and hooks behind it
                self.versions[j].append(_values(ps))
            asynchronous.put(ps, self.versions[j][self.reads(t, i, j)])

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        state = self.own[(self.k - 1) % NUM_WORKERS]
        state.update({n: vars(pl_module)[n] for n in state})

    def on_before_optimizer_step(self, *args: Any) -> None:
        for j, ps in enumerate(self.stages):
            asynchronous.put(ps, self.versions[j][-1])
        for p, total in self.sums.items():
            if total is not None:
                p.grad = total if p.grad is None else total + p.grad
        self.sums = {}


def _values(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


class Batches(Dataset[Any]):
    """Batches, each of a group of micro-batches."""

    def __init__(self, data: Callable[[int], Any], groups: Sequence[Sequence[int]]) -> None:
        self._data, self._groups = data, groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, t: int) -> Any:
        return joined([self._data(k) for k in self._groups[t]])


def loader(case: Case, preset: str | None, order: Sequence[int] = ()) -> DataLoader[Any]:
    """Return this rank's training batches; without a preset those of the reference, in order."""
    steps, n = range(NUM_STEPS), NUM_WORKERS
    if preset is None:
        groups = [[k] for k in order]
    elif preset in PIPELINES:
        groups = [[n * t + i for i in range(n)] for t in steps]
    else:
        groups = [[n * t + here().rank] for t in steps]
    return DataLoader(Batches(case.data, groups), batch_size=None)


def evaluation_batches(case: Case) -> DataLoader[Any]:
    """Return two batches for validation, test and prediction, the same on every rank."""
    return DataLoader(Batches(case.data, [[100, 101], [102, 103]]), batch_size=None)


# ---------------------------------------------------------------------- runs


def cases() -> dict[str, Case]:
    """Return all rows of the matrix by name."""
    from tests.conformance.cases import CASES

    return CASES


def fit(name: str, preset: str | None, stage_of: Mapping[str, int], rule: str) -> dict[str, Any]:
    """Train on this rank; as the reference of a rule without a preset.

    Args:
        name: of the row.
        preset: of the column; None for the reference.
        stage_of: parameter -> stage, for the reference.
        rule: preset whose rule the reference keeps.
    """
    case = cases()[name]
    flags = dict(case.flags())
    callbacks = flags.pop("callbacks", [])
    scheduled = [c for c in callbacks if isinstance(c, GradientAccumulationScheduler)]
    window = scheduled[0].scheduling[0] if scheduled else flags.get("accumulate_grad_batches", 1)
    order: Sequence[int] = range(NUM_WORKERS * NUM_STEPS)
    if preset is None:
        callbacks = [c for c in callbacks if c not in scheduled]
        own = case.own if rule in WHOLE else ()
        callbacks = [Rule(rule, stage_of, own, window), *callbacks]
        flags["accumulate_grad_batches"] = NUM_WORKERS * window
        for flag in COUNTED & flags.keys():
            flags[flag] *= NUM_WORKERS
        if rule in WHOLE:  # each worker's window as a whole, one worker after the other
            order = sorted(order, key=lambda k: (k // (2 * window), k % NUM_WORKERS, k))
    with TemporaryDirectory() as root:
        return _outcome(case, preset, loader(case, preset, order), {
            "default_root_dir": root, "max_epochs": case.num_epochs, "callbacks": callbacks,
        } | flags)  # fmt: skip


def _outcome(
    case: Case, preset: str | None, batches: DataLoader[Any], flags: dict[str, Any]
) -> dict[str, Any]:
    trainer = make_trainer("auto" if preset is None else case.strategy(preset), **flags)
    make = case.make if preset or case.reference is None else case.reference
    torch.manual_seed(0)
    module = make()
    valid = evaluation_batches(case) if case.validates else None
    trainer.fit(module, batches, valid)
    outcome = {
        "weights": weights_of(module),
        "stage_of": dict(getattr(trainer.strategy, "stage_of", {})),
        "global_step": trainer.global_step,
        "metrics": {
            name: float(x)
            for name, x in trainer.callback_metrics.items()
            if name.startswith(("val", "test"))
        },
        "logged": {name: float(x) for name, x in trainer.callback_metrics.items()},
        "seen": list(getattr(module, "seen", [])),
    }
    if case.behind is not None:
        outcome["behind"] = case.behind(trainer, module, evaluation_batches(case))
    return outcome


def check(name: str, preset: str) -> None:
    """Compare a cell with its reference bit by bit, or the text of its refusal."""
    case = cases()[name]
    if preset in case.refused:
        pattern = rf"(?s)(ConfigurationError|PlanError|StepError): .*{case.refused[preset]}"
        try:
            processes.run(fit, NUM_WORKERS, name, preset, {}, preset)
        except processes.RanksFailedError as error:
            texts = error.errors
        else:
            raise AssertionError(f"{preset} did not refuse what it does not support")
        assert len(texts) == NUM_WORKERS, texts
        for rank, text in texts.items():
            assert re.search(pattern, text), f"rank {rank}: {text}"
        return
    ranks = processes.run(fit, NUM_WORKERS, name, preset, {}, preset)
    (plain,) = processes.run(fit, 1, name, None, ranks[0]["stage_of"], preset)
    num_steps = case.num_steps or NUM_STEPS * case.num_epochs
    for r, rank in enumerate(ranks):
        assert rank["global_step"] == plain["global_step"] == num_steps
        assert_same(rank["weights"], plain["weights"], f"rank {r}")
        assert rank["metrics"] == plain["metrics"], f"rank {r}"
        if preset in PIPELINES:  # others call hooks and steps for their own batches
            assert rank["seen"] == plain["seen"], f"rank {r}: {rank['seen']} != {plain['seen']}"
        assert same(rank.get("behind"), plain.get("behind")), f"rank {r}"


def same(a: Any, b: Any) -> bool:
    """Say whether trees are equal bit by bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(x, b[k]) for k, x in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
