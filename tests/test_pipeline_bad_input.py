"""What a pipeline cannot run ends with a clear error on every rank, or runs right: never silence.

Clear: what was given, what is allowed, what to do next; for code that no cut can pass, the line.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cyclic.errors import ConfigurationError, PlanError
from tests import processes
from tests.corpus import assert_same, make_trainer, strategy_of, weights_of
from tests.lines import line_of
from tests.processes import here
from tests.rows import in_turn
from tests.spoiled_chains import (
    NEEDS_VALUES,
    BranchesOnBatch,
    CalledTwice,
    Chain,
    CrossesAsGenerator,
    CrossesAsNumber,
    CrossesAsObject,
    CrossesAsTree,
    EditsBatch,
    EditsInput,
    EditsReceived,
    EditsSaved,
    EditsView,
    EditsViewLater,
    FailsInFirstStage,
    FailsInLastStage,
    HasSparseGradients,
    LimitsRows,
    Nested,
    NoGraph,
    NotFinite,
    OtherOrder,
    ReadsTwice,
    ReturnsNone,
)

TIMEOUT_S = 25.0
NUM_STEPS, NUM_MICRO = 4, 2
CLEAR = {"ConfigurationError", "PlanError", "StepError"}


# ---------------------------------------------------------------------- before any process


@pytest.mark.parametrize(
    ("kwargs", "given", "allowed"),
    [
        (
            {"preset": "gpipe", "activation_checkpointing": "sometimes"},
            "activation_checkpointing='sometimes'",
            "never",
        ),
        (
            {"preset": "gpipe", "activation_checkpointing": True},
            "activation_checkpointing=True",
            "never",
        ),
        ({"preset": "gpipe", "num_microbatches": 0}, "num_microbatches=0", "from 1"),
        ({"preset": "1f1b", "num_microbatches": -2}, "num_microbatches=-2", "from 1"),
        ({"preset": "gpipe", "replicas": 0}, "replicas=0", "from 1"),
        ({"preset": "1f1b", "stages": 0}, "stages=0", "a number from 1"),
        ({"preset": "1f1b", "stages": ["a", "a"]}, "'a'", "once"),
        ({"preset": "1f1b", "stages": "measure"}, "stages='measure'", "a number from 1"),
        (
            {"preset": "gpipe", "placement": "single", "stages": "measured"},
            "stages='measured' with preset 'gpipe'",
            "use stages='auto', a number",
        ),
        ({"preset": "cyclic_dp", "replicas": 2}, "'replicas'", "PipelineStrategy"),
        (
            {"preset": "cyclic_dp", "activation_checkpointing": "always"},
            "'activation_checkpointing'",
            "PipelineStrategy",
        ),
        ({"memory_limit_bytes": 1 << 30}, "memory_limit_bytes=1073741824", "a pipeline"),
        ({"preset": "gpipe", "sharding": "optimizer"}, "optimizer", "none"),
    ],
    ids=lambda kwargs: "-".join(map(str, kwargs.values())) if isinstance(kwargs, dict) else None,
)
def test_a_strategy_refuses_impossible_arguments(
    kwargs: dict[str, Any], given: str, allowed: str
) -> None:
    with pytest.raises((PlanError, ConfigurationError)) as caught:
        strategy_of(kwargs)
    text = str(caught.value)
    assert given in text
    assert allowed in text.partition("allowed")[2]


# ---------------------------------------------------------------------- what the ranks run


def rows(k: int, size: int = 3) -> Tensor:
    return torch.randn((size, 6), generator=torch.Generator().manual_seed(k))


def whole(t: int) -> list[Tensor]:
    return [torch.cat([rows(t * NUM_MICRO + i) for i in range(NUM_MICRO)])]


BATCHES = {
    "good": whole,
    "more on rank 1": whole,
    "no tensor": lambda t: ["text", 3],
    "no rows": lambda t: [torch.zeros(0, 6)],
    "scalars": lambda t: [torch.tensor(1.0)],
    "unequal rows": lambda t: [torch.ones(4, 6), torch.ones(5, 6)],
}


def attempt(module: type[Chain], strategy: dict[str, Any] | None, batches: str) -> dict[str, Any]:
    """Train; return the weights, or the error with which it ends on this rank and after when."""
    start = time.monotonic()
    try:
        trained = module()
        if strategy is None:
            trainer = make_trainer("auto", max_epochs=1, accumulate_grad_batches=NUM_MICRO)
            data: list[Any] = [[rows(k)] for k in range(NUM_STEPS * NUM_MICRO)]
        else:
            full = {"preset": "gpipe", "num_microbatches": NUM_MICRO} | strategy
            limit = timedelta(seconds=TIMEOUT_S)
            trainer = make_trainer(full | {"timeout": limit}, max_epochs=1)
            number = NUM_STEPS + here().rank * (batches == "more on rank 1")
            data = [BATCHES[batches](t) for t in range(number)]
        trainer.fit(trained, DataLoader(data, batch_size=None))
    except BaseException as error:
        return {
            "kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start
        }  # fmt: skip
    return {"kind": "nothing", "weights": weights_of(trained), "steps": trainer.global_step}


def ends_of(
    module: type[Chain], num_ranks: int = 2, batches: str = "good", **strategy: Any
) -> list[dict[str, Any]]:
    return processes.run(
        attempt, num_ranks, module, strategy, batches, time_limit_s=40, after_failure_s=20
    )


def assert_refused(ends: list[dict[str, Any]], kinds: set[str], *parts: str) -> None:
    """Look for the reason on every rank; one that only hears of it raises PeerError."""
    assert kinds & {end["kind"] for end in ends}, ends
    for end in ends:
        assert end["kind"] in kinds | {"PeerError"}, end
        assert end["seconds"] < TIMEOUT_S - 5, end
        for part in parts:
            assert part in end["text"], end["text"]
        if end["kind"] == "PeerError":
            assert re.match(r"rank \d on \S+ (\(stages? [^)]+\) )?failed ", end["text"]), end
            assert len(end["text"].splitlines()) == 1, end


@cache
def plainly(module: type[Chain]) -> dict[str, Any]:
    """Return the plain run of a module, made once per session."""
    return processes.run(attempt, 1, module, None, "good")[0]


def assert_right(ends: list[dict[str, Any]], module: type[Chain]) -> None:
    plain = plainly(module)
    for r, end in enumerate(ends):
        assert end["kind"] == "nothing", f"rank {r}: {end}"
        assert end["steps"] == plain["steps"] == NUM_STEPS
        assert_same(end["weights"], plain["weights"], f"rank {r}")


def assert_right_or_refused(ends: list[dict[str, Any]], module: type[Chain], *parts: str) -> None:
    if any(end["kind"] == "nothing" for end in ends):
        assert_right(ends, module)
    else:
        assert_refused(ends, CLEAR, "allowed:", *parts)


# ---------------------------------------------------------------------- stages


@pytest.mark.multi
@pytest.mark.parametrize(
    ("module", "stages", "parts"),
    [
        (Chain, 40, ["stages=40", "allowed: 1 to 4", "use stages=4"]),
        (Chain, ["layers.7"], ["'layers.7'", "allowed:", "layers.1"]),
        (Chain, ["layers.1", "missing.0"], ["'missing.0'", "allowed:"]),
        (Chain, ["never"], ["'never'", "does not call", "allowed:", "layers.1"]),
        (
            Chain,
            ["layers.2", "layers.1"],
            ["allowed: the order", 'stages=["layers.1", "layers.2"]'],
        ),
        (OtherOrder, ["layers.1", "layers.2"], ["allowed:", 'stages=["layers.2", "layers.1"]']),
    ],
)
def test_impossible_cuts(module: type[Chain], stages: Any, parts: list[str]) -> None:
    ends = ends_of(module, stages=stages, preset="gpipe")
    assert_refused(ends, {"PlanError", "ConfigurationError"}, *parts)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("num_ranks", "strategy", "parts"),
    [
        (3, {}, ["num_workers=3 with num_stages=2", "use num_stages=3 or num_workers=2"]),
        (4, {}, ["num_workers=4 with num_stages=2", "num_workers=2, or replicas=2"]),
        (3, {"replicas": 2}, ["num_workers=3 with replicas=2", "use num_workers=4"]),
        (2, {"replicas": 4}, ["num_workers=2 with replicas=4", "use num_workers=4"]),
    ],
)
def test_more_or_fewer_workers_than_the_stages_can_use(
    num_ranks: int, strategy: dict[str, Any], parts: list[str]
) -> None:
    ends = ends_of(Chain, num_ranks, stages=["layers.2"], **strategy)
    assert_refused(ends, {"PlanError", "ConfigurationError"}, "allowed", *parts)


@pytest.mark.multi
@pytest.mark.parametrize(
    "stages", [["tanh.1", "layers.2"], ["layers.0", "layers.1"], ["layers.1", "tanh.3"]], ids=str
)
def test_a_stage_without_parameters(stages: list[str]) -> None:
    assert_right_or_refused(ends_of(Chain, stages=stages), Chain, "without parameters")


@pytest.mark.multi
@pytest.mark.parametrize("stages", [["net.1"], ["layers.1"]], ids=str)
def test_either_name_of_a_module_will_do(stages: list[str]) -> None:
    assert_right(ends_of(Nested, stages=stages), Nested)


@pytest.mark.multi
@pytest.mark.parametrize("preset", ["gpipe", "1f1b"])
def test_a_module_that_is_called_in_two_stages(preset: str) -> None:
    ends = ends_of(CalledTwice, stages=["layers.1"], preset=preset)
    assert_right(ends, CalledTwice)


@pytest.mark.multi
@pytest.mark.parametrize("preset", ["1f1b", "cyclic_pipeline"])
def test_ranks_with_different_numbers_of_batches(preset: str) -> None:
    ends = ends_of(Chain, batches="more on rank 1", preset=preset)
    numbers = f"(rank 0: {NUM_STEPS}, rank 1: {NUM_STEPS + 1})"
    assert_refused(ends, {"ConfigurationError"}, "training batches", numbers, "allowed:")


@pytest.mark.multi
def test_sparse_gradients_stay_where_they_are_made() -> None:
    assert_right(ends_of(HasSparseGradients, stages=["layers.1"]), HasSparseGradients)
    ends = ends_of(HasSparseGradients, 4, stages=["layers.1"], replicas=2)
    assert_refused(ends, {"StepError"}, "stage 0 has a sparse gradient", "allowed:")


@pytest.mark.multi
def test_rows_that_are_scaled_down_in_each_replica_apart_are_refused() -> None:
    assert_right(ends_of(LimitsRows, stages=["layers.1"], preset="1f1b"), LimitsRows)
    ends = ends_of(LimitsRows, 2, stages=1, replicas=2, preset="1f1b")
    assert_refused(ends, {"PlanError"}, "'embedding.weight'", "allowed:")


# ---------------------------------------------------------------------- batches


@pytest.mark.multi
@pytest.mark.parametrize(
    ("batches", "parts"),
    [
        ("no tensor", ["no tensor", "micro-batches"]),
        ("no rows", ["no samples", "[0, 6]"]),
        ("scalars", ["dim"]),
    ],
)
def test_batches_that_cannot_be_cut(batches: str, parts: list[str]) -> None:
    ends = ends_of(Chain, stages=["layers.2"], batches=batches)
    assert_refused(ends, {"StepError"}, "allowed:", *parts)


# ---------------------------------------------------------------------- what crosses a cut


@pytest.mark.multi
@pytest.mark.parametrize(
    ("module", "stages"),
    in_turn(
        [CrossesAsObject, CrossesAsTree, CrossesAsGenerator, CrossesAsNumber],
        [["layers.2"], ["layers.1", "layers.3"]],
    ),
)
def test_outputs_that_are_no_tensors(module: type[Chain], stages: list[str]) -> None:
    ends = ends_of(module, stages=stages)
    assert_right_or_refused(ends, module, "layers.1")


# ---------------------------------------------------------------------- edits in place


@pytest.mark.multi
@pytest.mark.parametrize(
    ("remat", "module", "num_ranks"),
    in_turn(
        ["never", "always"],
        [(x, n) for n in (2, 1) for x in (EditsReceived, EditsInput, EditsBatch)],
    ),
)
def test_edits_in_place(module: type[Chain], num_ranks: int, remat: str) -> None:
    ends = ends_of(module, num_ranks, stages=["layers.2"], activation_checkpointing=remat)
    assert_right(ends, module)


@pytest.mark.multi
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_change_of_a_view_is_refused_where_views_would_travel_apart(num_ranks: int) -> None:
    ends = ends_of(EditsView, num_ranks, stages=["layers.2"])
    reason = ("changed in place", line_of(EditsView).name, 'stages=["layers.3"]')
    assert_refused(ends, {"PlanError"}, "allowed:", *reason)
    assert_right(ends_of(EditsView, num_ranks, stages=["layers.3"]), EditsView)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("num_ranks", "remat"),
    [
        (1, "never"),
        (2, "always"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [(1, "always"), (2, "never")]
        ),
    ],
)
@pytest.mark.parametrize("stages", [["layers.1"], ["layers.1", "layers.2"]], ids=str)
def test_a_change_of_a_view_is_refused_when_it_was_not_seen_before(
    stages: list[str], num_ranks: int, remat: str
) -> None:
    ends = ends_of(EditsViewLater, num_ranks, stages=stages, activation_checkpointing=remat)
    reason = ("changed in place", line_of(EditsViewLater).name)
    assert_refused(ends, {"StepError"}, "allowed:", *reason)


@pytest.mark.multi
def test_a_change_of_what_an_earlier_stage_on_the_same_worker_keeps() -> None:
    (end,) = ends_of(EditsSaved, 1, stages=["layers.2"])
    assert end["kind"] == "RuntimeError"
    assert "modified by an inplace operation" in end["text"]


# ---------------------------------------------------------------------- code that needs values


@pytest.mark.multi
@pytest.mark.parametrize("module", NEEDS_VALUES)
def test_code_of_an_earlier_stage_that_needs_values(module: type[Chain]) -> None:
    ends = ends_of(module, stages=["layers.3"])
    reason = (line_of(module).name, 'stages=["layers.2"]')
    assert_right_or_refused(ends, module, *reason)


@pytest.mark.multi
def test_an_error_names_all_causes() -> None:
    ends = ends_of(ReadsTwice, stages=["layers.3"])
    assert_refused(ends, {"PlanError"}, "by __float__", "by item", 'stages=["layers.1"]')


@pytest.mark.multi
def test_code_that_needs_values_of_the_batch_only() -> None:
    assert_right(ends_of(BranchesOnBatch, stages=["layers.1", "layers.3"]), BranchesOnBatch)


# ---------------------------------------------------------------------- steps


@pytest.mark.multi
@pytest.mark.parametrize(
    ("module", "kind", "reason"),
    [
        (ReturnsNone, "StepError", "returned None (step 0)"),
        (NoGraph, "StepError", "without a graph (step 0)"),
        (NotFinite, "StepError", "nan in step 0"),
        (FailsInLastStage, "ZeroDivisionError", "the batch is broken"),
        (FailsInFirstStage, "ZeroDivisionError", "the batch is broken"),
    ],
)
def test_every_rank_names_the_reason(module: type[Chain], kind: str, reason: str) -> None:
    ends = ends_of(module, stages=["layers.2"], preset="1f1b")
    assert_refused(ends, {kind}, reason)
