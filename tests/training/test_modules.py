"""Modules with habits of their own: branches and heads that later steps use, hooks, moves.

What every preset does with them in the same way is in the conformance matrix.
"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_cyclic.errors import ConfigurationError
from tests.harness import processes
from tests.harness.pipelines import (
    Job,
    assert_equals_plain,
    fit,
    pipelines,
    prepare,
)
from tests.harness.rows import in_words, more
from tests.harness.trainers import assert_same
from tests.modules import habits as m
from tests.modules.cases import CASES
from tests.references.rules import Reference

pytestmark = pytest.mark.multi


@pytest.mark.parametrize(
    ("module", "preset", "n", "options"),
    [
        (m.UsedSometimes, "cyclic_dp", 2, {"stages": 3}),
        (m.UsedLater, "cyclic_dp_v1", 2, {"stages": 3}),
        (m.UsedLater, "cyclic_zero", 2, {"stages": 3}),
        more(m.UsedSomewhere, "cyclic_dp", 2, {"stages": 3}),
        (m.UsedSomewhere, "cyclic_dp", 4, {"stages": 6, "slack": 1}),
        (m.UsedByOneWorker, "cyclic_dp_v1", 2, {"stages": 1}),
        (m.UsedByOneWorker, "cyclic_dp_v1", 2, {"stages": ["net.2", "net.6"]}),
    ],
    ids=in_words,
)
def test_workers_of_whole_steps_may_take_branches(
    module: Any, preset: str, n: int, options: dict[str, Any]
) -> None:
    job = Job(case="resnet", module=module, num_steps=7, num_epochs=1, num_microbatches=n)
    ranks = pipelines(job, n, preset=preset, **options)
    Reference(job, ranks[0]["stage_of"]).train(ranks[0]["plan"]).compare(ranks)


def test_stages_begin_where_they_are_named() -> None:
    job = Job(case="resnet", module=m.UsedSometimes, num_epochs=1, num_microbatches=2)
    ranks = pipelines(job, 2, preset="cyclic_dp", stages=["net.2", "net.6"])
    stage_of = ranks[0]["stage_of"]
    names = ("enter", "branch", "net.0", "net.2", "net.4", "net.6", "head")
    assert [stage_of[f"{name}.weight"] for name in names] == [0, 0, 0, 1, 1, 2, 2]


AGAIN = {"activation_checkpointing": "always"}


@pytest.mark.parametrize(
    ("module", "num_ranks", "strategy"),
    [
        (m.Heads, 2, {"preset": "1f1b", "stages": ["net.2"]}),
        (m.Heads, 1, {"preset": "gpipe", "stages": ["net.1", "net.3"]}),
        (m.Aside, 1, {"preset": "1f1b", "stages": ["b"]}),
        (m.Behind, 1, {"preset": "1f1b", "stages": ["c"]}),
        (m.Hooked, 2, {"preset": "1f1b", "stages": ["net.1"]}),
        (m.Hooked, 1, {"preset": "1f1b", "stages": ["net.2", "net.4", "last"], **AGAIN}),
        (m.Hooked, 1, {"preset": "1f1b", "stages": ["net.2", "net.4", "last"]}),
        (m.Moving, 2, {"preset": "1f1b"}),
        (m.Moving, 1, {"preset": "gpipe", "stages": 3}),
        (m.Short, 1, {"preset": "lockstep_dp"}),
        (m.Shortest, 1, {"preset": "gpipe"}),
    ],
    ids=in_words,
)
def test_it_trains_with_the_bits_of_one_device(
    module: Any, num_ranks: int, strategy: dict[str, Any]
) -> None:
    job = m.Tasks(case="resnet", module=module)
    assert_equals_plain(processes.run(fit, num_ranks, job, strategy), job)


def noted(job: Job, strategy: dict[str, Any]) -> Any:
    run = prepare(job, strategy)
    run.trainer.fit(run.module, run.batches)
    return vars(run.module.net[1]).get("given")


def test_what_a_hook_notes_is_only_where_the_layer_is() -> None:
    job = m.Tasks(case="resnet", module=m.Noting, num_steps=1, num_epochs=1)
    last, first = pipelines(job, 2, function=noted, preset="1f1b", stages=["net.2"])
    assert first.shape == (3, 4)  # on the rank of stage 0, of the last micro-batch
    assert last is None


def test_what_later_steps_use_elsewhere_is_named() -> None:
    job = m.Tasks(case="resnet", module=m.Aside)
    with pytest.raises(processes.RanksFailedError) as caught:
        pipelines(job, 1, preset="1f1b", stages=["c"])
    text = str(caught.value)
    assert "module 'aside', whose parameters or buffers belong to stage [0], is called" in text
    assert "it was not used in the first micro-batch" in text
    assert "it went with 'b.bias', which is defined beside it" in text
    assert "begin stage 1 at 'b' or before" in text  # as the test above does, and as Behind


@pytest.mark.parametrize(("module", "num_places"), [(m.Short, 2), (m.Shortest, 1)])
def test_one_device_has_as_many_stages_as_there_are_places(module: Any, num_places: int) -> None:
    job = m.Tasks(case="resnet", module=module, num_epochs=1)
    (one,) = pipelines(job, 1, preset="cyclic_dp")
    (same,) = processes.run(fit, 1, job, {"preset": "cyclic_dp", "stages": num_places})
    assert_same(one["weights"], same["weights"])


def test_too_many_processes_for_the_places_are_refused_once_and_for_all() -> None:
    job = m.Tasks(case="resnet", module=m.Shortest)
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(fit, 2, job, {"preset": "1f1b", "stages": 2})
    assert (
        "2 processes with preset '1f1b' need 2 stages, but Shortest can be cut into one stage at "
        "most; allowed: no more processes than stages; use Trainer(devices=1)"
    ) in str(caught.value)


# ---------------------------------------------------------------------- the report


def fit_and_report(job: Job, strategy: dict[str, Any]) -> str:
    run = prepare(job, strategy)
    run.trainer.fit(run.module, run.batches)
    try:
        return run.trainer.strategy.report()
    except ConfigurationError as error:
        return f"refused: {error}"


def test_rank_zero_reports_where_stages_begin_and_could() -> None:
    job = Job(case="unet", num_epochs=1)
    shown, refused = pipelines(job, 2, function=fit_and_report, preset="gpipe", stages=2)
    paths = ", ".join(f'"{path}"' for path in CASES["unet"].cuts(2))
    assert f"stages=[{paths}]" in shown
    assert "can begin" in shown
    assert refused.startswith("refused: strategy.report() was asked for where no module")
