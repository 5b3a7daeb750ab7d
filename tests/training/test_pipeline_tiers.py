"""memory_limit_bytes and disk of pipelines: the same bits, with state that comes and goes.

How state moves: tests/runtime/test_state_tier.py; when, and how much: tests/plan/test_tiers.py and
tests/planner/test_tiers.py; of workers that have all stages: test_tiers.py.
"""

from __future__ import annotations

import os
import re
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests.harness.pipelines import Job, Outcome, pipelines
from tests.harness.pipelines import fit as fit_job
from tests.harness.rows import in_words, more
from tests.harness.runs import Result, run, saving, trained
from tests.harness.trainers import assert_same
from tests.modules.classifier import Classifier, micro_batches
from tests.modules.optimizers import Nested
from tests.training.test_tiers import (
    ByOptimizer,
    Freezes,
    Keeps,
    Reads,
    Replaces,
    Schedules,
    Zeroes,
    assert_alike,
    flat,
    looked_at,
    with_sums,
)

pytestmark = pytest.mark.multi
NUM_BATCHES, NUM_EPOCHS = 4, 2
MAKE = partial(Classifier, "batchnorm_mlp", "adamw")
STARTS = ["net.3", "net.6", "net.9"]  # of stages that are alike under any limit
AHEAD = 12_000  # bytes above the least limit, with which state comes and goes beside other work


def plan(preset: str, **options: Any) -> dict[str, Any]:
    return {"preset": preset, "stages": STARTS} | options


def fit(
    strategy: dict[str, Any], n: int, make: Any = MAKE, kind: str = "vectors", **flags: Any
) -> list[Result]:
    return trained(
        make, strategy, n, data=partial(micro_batches, kind, NUM_BATCHES),
        valid=partial(micro_batches, kind, 1, 1),
        **({"max_epochs": NUM_EPOCHS, "look": looked_at} | flags),
    )  # fmt: skip


def least(strategy: dict[str, Any], n: int, make: Any = MAKE, **flags: Any) -> int:
    """Return the least limit with which a run begins, which it names where it is given less."""
    return _least(tuple((k, repr(v)) for k, v in strategy.items()), n, make, **flags)


@cache
def _least(strategy: tuple[tuple[str, str], ...], n: int, make: Any, **flags: Any) -> int:
    given = {k: eval(v) for k, v in strategy} | {"disk": "/tmp", "memory_limit_bytes": 1}
    ends = run(make, given, n, data=partial(micro_batches, "vectors", 2), **flags)
    assert {end.error for end in ends} == {"PlanError"}, ends[0].text
    (named,) = {re.search(r"allowed: (\d+) or more", end.text)[1] for end in ends}  # type: ignore[index]
    return int(named)


def limited(strategy: dict[str, Any], n: int, folder: Path, above: int = 0) -> dict[str, Any]:
    return strategy | {"disk": str(folder), "memory_limit_bytes": least(strategy, n) + above}


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("preset", "n", "options", "above"),
    [
        ("1f1b", 1, {"num_microbatches": 3}, 0),
        ("1f1b", 1, {"num_microbatches": 3}, AHEAD),
        ("gpipe", 1, {"num_microbatches": 3, "activation_checkpointing": "always"}, 0),
        ("pipedream_2bw", 1, {"num_microbatches": 3}, 6_000),
        ("pipedream", 1, {}, 6_000),
        ("cyclic_pipeline", 1, {"num_microbatches": 3}, 0),
        ("zb_v", 2, {"num_microbatches": 3}, 6_000),
        ("interleaved_1f1b", 2, {"num_microbatches": 2}, 6_000),
        ("cyclic_mp", 2, {"num_microbatches": 3, "stages": STARTS[:2]}, 0),
        ("1f1b", 4, {"num_microbatches": 2, "replicas": 2, "stages": STARTS[1:2]}, 0),
        ("pipedream_2bw", 4, {"num_microbatches": 3}, 0),
        more("1f1b", 2, {"num_microbatches": 2, "stages": STARTS[1:2]}, 0),
        more("zb_h1", 4, {"num_microbatches": 3}, 0),
        more("dualpipe_v", 2, {"num_microbatches": 3}, 6_000),
        more("pipedream", 4, {}, 0),
        more("cyclic_pipeline", 4, {"num_microbatches": 3}, 0),
        more("pipedream_2bw", 4, {"replicas": 2, "stages": STARTS[1:2]}, 0),
    ],
    ids=in_words,
)
def test_weights_losses_metrics_and_state_are_those_of_a_run_in_memory(
    preset: str, n: int, options: dict[str, Any], above: int, tmp_path: Path
) -> None:
    strategy = plan(preset, **options)
    whole, apart = fit(strategy, n), fit(limited(strategy, n, tmp_path, above), n)
    assert_alike(apart, whole)
    assert all(end.found["moved"] > 0 for end in apart)
    if n == 1:
        assert (apart[0].found["ahead"] > 0) == (above > 0)
    assert not list(tmp_path.iterdir())


def fit_at_least(job: Job, strategy: dict[str, Any]) -> Outcome:
    """Train with the least limit, which the first run names."""
    from lightning_cyclic.errors import PlanError

    with pytest.raises(PlanError) as raised:
        fit_job(job, {**strategy, "memory_limit_bytes": 1})
    named = re.search(r"allowed: (\d+) or more", str(raised.value))
    assert named is not None
    return fit_job(job, {**strategy, "memory_limit_bytes": int(named[1])})


@pytest.mark.parametrize(
    ("name", "preset", "num_ranks"),
    [
        ("gpt2", "1f1b", 1),  # which shares weights between stages
        ("resnet", "pipedream_2bw", 1),
        ("gpt2", "gpipe", 2),
        more("t5", "interleaved_1f1b", 1),
        more("bert", "pipedream", 2),
        more("unet", "dualpipe_v", 1),
        more("gru", "zb_h1", 4),
    ],
    ids=in_words,
)
def test_models_of_many_kinds(name: str, preset: str, num_ranks: int, tmp_path: Path) -> None:
    m = 1 if preset == "pipedream" else 4
    job = Job(case=name, num_microbatches=m, size=2, num_steps=3, dropout=0.2)
    strategy: dict[str, Any] = {"preset": preset, "stages": 4}
    whole = pipelines(job, num_ranks, **strategy)
    apart = pipelines(job, num_ranks, function=fit_at_least, disk=str(tmp_path), **strategy)
    for rank, expected in zip(apart, whole, strict=True):
        assert_same(rank["weights"], expected["weights"])
        assert rank["logged"] == expected["logged"]
        assert sum(rank["plan"].tiers.moved) > 0


def test_activations_may_lie_on_the_same_disk(tmp_path: Path) -> None:
    strategy = plan("gpipe", num_microbatches=3)
    away = {**strategy, "activation_checkpointing": "offload"}
    apart = fit(limited(away, 1, tmp_path), 1)
    assert_alike(apart, fit(strategy, 1))
    assert apart[0].found["moved"] > 0


@pytest.mark.parametrize("preset", ["1f1b", "pipedream_2bw"])
@pytest.mark.parametrize(
    "flags",
    [
        {"gradient_clip_val": 0.05},
        {"precision": "bf16-mixed"},
        {"accumulate_grad_batches": 2},
        {"val_check_interval": 2},
    ],
    ids=in_words,
)
@pytest.mark.parametrize("n", [1, more(2)])
def test_flags_of_the_trainer(preset: str, flags: dict[str, Any], n: int, tmp_path: Path) -> None:
    if preset != "1f1b" and "accumulate_grad_batches" in flags:
        pytest.skip("each batch is an update where steps flow")
    strategy = plan(preset, num_microbatches=3, clip_norm="global", stages=STARTS[1:2])
    above = 6_000 if n == 1 else 0
    whole, apart = (
        fit(way, n, **flags) for way in (strategy, limited(strategy, n, tmp_path, above))
    )
    assert_alike(apart, whole)
    assert all(end.found["moved"] > 0 for end in apart)


@pytest.mark.parametrize(
    "make",
    [
        partial(ByOptimizer, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(ByOptimizer, torch.optim.AdamW, amsgrad=True, fused=True),
        partial(Schedules, "mlp"),
        partial(Classifier, "mlp", "counting"),  # its steps, in groups; it has no state
    ],
    ids=["sgd", "amsgrad", "scheduler", "counting"],
)
def test_any_optimizer_that_makes_its_state_of_shapes(make: Any, tmp_path: Path) -> None:
    strategy = {"preset": "1f1b", "num_microbatches": 3, "stages": ["net.4", "net.8", "net.12"]}
    limit = {"disk": str(tmp_path), "memory_limit_bytes": least(strategy, 1, make)}
    whole, apart = fit(strategy, 1, make), fit(strategy | limit, 1, make)
    assert_alike(apart, whole)
    assert (apart[0].found["moved"] > 0) == bool(apart[0].found["state"])


@final
class Counts(Callback):
    """Counts the parameters of each call of the optimizer."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.counts: list[int] = []

        def note(optimizer: Any, *_: Any) -> None:
            self.counts.append(sum(len(group["params"]) for group in optimizer.param_groups))

        trainer.optimizers[0].register_step_pre_hook(note)


def counted(trainer: Any, module: Classifier) -> list[int]:
    (counts,) = (c.counts for c in trainer.callbacks if isinstance(c, Counts))
    return counts


@pytest.mark.parametrize("preset", ["1f1b", "pipedream_2bw"])
def test_the_optimizer_is_called_for_each_stage_from_the_first_step_on(
    preset: str, tmp_path: Path
) -> None:
    limit = limited(plan(preset, num_microbatches=3), 1, tmp_path)
    ((end,), each) = fit(limit, 1, look=counted, callbacks=[Counts()]), (4, 4, 4, 6)
    assert sorted(end.found) == sorted(each * NUM_BATCHES * NUM_EPOCHS)


def uneven() -> DataLoader[Any]:
    """Return batches of which the last is cut into fewer micro-batches."""
    torch.manual_seed(1)
    rows = [(torch.randn(n, 12), torch.arange(n) % 3) for n in (6, 6, 2)]
    return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


def with_plans(trainer: Any, module: Classifier) -> dict[str, Any]:
    own = trainer.strategy._training._session.own
    return looked_at(trainer, module) | {"tiers": [own.plan_of(m).tiers for m in (3, 2)]}


def test_a_last_batch_of_fewer_micro_batches(tmp_path: Path) -> None:
    make = partial(Classifier, "mlp", "adamw")
    strategy = {"preset": "1f1b", "num_microbatches": 3, "stages": ["net.4", "net.8", "net.12"]}
    limit = {"disk": str(tmp_path), "memory_limit_bytes": least(strategy, 1, make)}
    whole, apart = (
        trained(make, way, 1, data=uneven, look=with_plans, max_epochs=2)
        for way in (strategy, strategy | limit)
    )
    assert_alike(apart, whole)
    assert apart[0].found["moved"] > 0
    assert len(set(apart[0].found["tiers"])) == 1


@pytest.mark.parametrize(("preset", "n"), [("1f1b", 1), ("pipedream_2bw", 2)])
def test_a_number_of_stages_is_cut_by_the_limit_if_it_can_be(
    preset: str, n: int, tmp_path: Path
) -> None:
    make = partial(Classifier, "mlp", "adamw")
    strategy = {"preset": preset, "num_microbatches": 3, "stages": 4 // n}
    few = least(strategy, n, make)
    for limit, moves in ((few, True), (10 * few, False)):
        tight = strategy | {"disk": str(tmp_path), "memory_limit_bytes": limit}
        ends = fit(tight, n, make, look=planned)
        for end in ends:
            assert (end.found["moved"] > 0) == moves
            assert end.found["planned"] <= limit


def planned(trainer: Any, module: Classifier) -> dict[str, Any]:
    memory = trainer.strategy.planned_memory(0)
    return looked_at(trainer, module) | {"planned": memory.total}


def test_nothing_moves_where_all_fits(tmp_path: Path) -> None:
    strategy = plan("1f1b", num_microbatches=3)
    limit = {"disk": str(tmp_path), "memory_limit_bytes": 10**9}
    (apart,) = fit(strategy | limit, 1)
    assert (apart.found["moved"], apart.found["kept"] > 0) == (0, True)
    assert_alike([apart], fit(strategy, 1))


# ---------------------------------------------------------------------- checkpoints, callbacks


@pytest.mark.parametrize(("preset", "n"), [("1f1b", 1), ("pipedream_2bw", 1), more("1f1b", 2)])
def test_a_checkpoint_is_that_of_a_run_in_memory_and_either_goes_on_from_it(
    preset: str, n: int, tmp_path: Path
) -> None:
    strategy = plan(preset, num_microbatches=3, stages=STARTS[1:2])
    limit = limited(strategy, n, tmp_path)
    ends, files = {}, {}
    for name, way in (("whole", strategy), ("apart", limit)):
        folder = tmp_path / name
        ends[name] = fit(way, n, **saving(folder, 3))
        files[name] = folder / "step=3.ckpt"  # in the middle of an epoch
    assert_alike(ends["apart"], ends["whole"])
    whole, apart = (torch.load(files[x], weights_only=False) for x in ("whole", "apart"))
    assert_same(flat(apart["optimizer_states"]), flat(whole["optimizer_states"]))
    for way, name in ((limit, "apart"), (strategy, "apart"), (limit, "whole")):
        for one, other in zip(fit(way, n, ckpt_path=files[name]), ends["whole"], strict=True):
            assert_same(one.weights, other.weights)
            assert_same(one.found["state"], other.found["state"])


class ZeroesInHook(Callback):
    """Begins each update with no momentum, when gradients are there."""

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        for x in trainer.optimizers[0].state.values():
            x["exp_avg"].zero_()


@final
class ZeroesBehind(Zeroes):
    """Ends each step with no momentum, when state of its last stages is about to leave."""

    def on_train_batch_start(self, *_: Any) -> None:
        """Change nothing."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for x in trainer.optimizers[0].state.values():
            x["exp_avg"].zero_()


@pytest.mark.parametrize("change", [Zeroes, Replaces, ZeroesInHook, ZeroesBehind])
def test_what_a_callback_changes_of_state_counts(change: Any, tmp_path: Path) -> None:
    strategy = plan("1f1b", num_microbatches=3)
    limit = limited(strategy, 1, tmp_path, AHEAD)
    whole, apart = (fit(way, 1, callbacks=[change()]) for way in (strategy, limit))
    assert_alike(apart, whole)
    assert apart[0].found["ahead"] > 0
    assert apart[0].found["losses"] != fit(strategy, 1)[0].found["losses"]


@pytest.mark.parametrize("preset", ["1f1b", "pipedream_2bw"])
def test_callbacks_read_the_values_wherever_they_are(preset: str, tmp_path: Path) -> None:
    strategy = plan(preset, num_microbatches=3)
    ways = strategy, limited(strategy, 1, tmp_path)
    sums = [fit(way, 1, callbacks=[Reads()], look=with_sums)[0].found["sums"] for way in ways]
    assert sums[0] == sums[1]
    assert len(sums[0]) == NUM_BATCHES * NUM_EPOCHS


@pytest.mark.parametrize("preset", ["1f1b", "pipedream_2bw"])
def test_layers_may_be_frozen_and_unfrozen(preset: str, tmp_path: Path) -> None:
    strategy = plan(preset, num_microbatches=3)
    ways = strategy, limited(strategy, 1, tmp_path, AHEAD)
    whole, apart = (fit(way, 1, callbacks=[Freezes()], max_epochs=3) for way in ways)
    assert_alike(apart, whole)


# ---------------------------------------------------------------------- what is refused, and fails


def refused(options: dict[str, Any], make: Any = MAKE, **flags: Any) -> str:
    data = partial(micro_batches, "vectors", NUM_BATCHES)
    (end,) = run(
        make, plan("1f1b", num_microbatches=3, disk="/tmp") | options, 1, data=data, **flags
    )
    assert end.error in ("ConfigurationError", "StepError", "PlanError"), end
    return end.text


ROOM = {"memory_limit_bytes": 22_000}


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ("or memory_limit_bytes with 'never'", {"options": {}}),
        ("or memory_limit_bytes with 'never'", {
            "options": {**ROOM, "activation_checkpointing": "optimal"},
        }),
        ("whose forwards read optimizer state", {"options": {**ROOM, "preset": "pipeoptim"}}),
        ("whose forwards read optimizer state", {"options": {**ROOM, "preset": "spectrain"}}),
        ("one of them; leave one out", {
            "options": {**ROOM, "preset": "pipedream_2bw", "error_feedback": True},
        }),
        ("disk='/proc/nowhere'", {"options": {"disk": "/proc/nowhere", **ROOM}}),
        ("it has other optimizers", {"make": partial(ByOptimizer, Nested), "options": {
            **ROOM, "stages": ["net.4"],
        }}),
        ("has kept tensors of it", {
            "callbacks": [Keeps()], "options": {**ROOM, "preset": "pipedream_2bw"},
        }),
        ("a limit of 100 bytes", {"options": {"memory_limit_bytes": 100}}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(said: str, given: dict[str, Any]) -> None:
    assert said in refused(**given)


def fit_on_a_broken_disk(job: Job, strategy: dict[str, Any], call: str, code: int) -> Outcome:
    def broken(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    setattr(os, call, broken)
    return fit_at_least(job, strategy)


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ("pwrite", 28, r"of stage \d was not written to the folder disk=.*No space left"),
        ("preadv", 5, r"was not read from the folder disk=.* in step \d: .*Input/output error"),
    ],
)
@pytest.mark.parametrize("preset", ["gpipe", "pipedream_2bw"])
def test_a_disk_that_fills_or_fails_is_named(
    preset: str, call: str, code: int, words: str, tmp_path: Path
) -> None:
    from tests.harness.processes import RanksFailedError

    job = Job(case="resnet", num_microbatches=4)
    with pytest.raises(RanksFailedError, match=rf"StepError(.|\n)*{words}"):
        pipelines(
            job, 1, call, code, function=fit_on_a_broken_disk, preset=preset, stages=4,
            disk=str(tmp_path),
        )  # fmt: skip
