"""What cannot be trained ends with a clear error, on every rank and without a hang.

Clear: what was given, what is allowed, what to do next; for code that no cut can pass, the line.
Tables: what is given, where it is refused, and the words that are in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.plugins.precision import Precision, TransformerEnginePrecision
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_cyclic import (
    PRESETS,
    CyclicStrategy,
    Dct,
    PipelineStrategy,
    PowerSgd,
    SparseStatePrecision,
    TopK,
)
from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plan.presets import AXES
from lightning_cyclic.plugin.checks import check_fit
from tests.harness import processes
from tests.harness.processes import here
from tests.harness.rows import in_turn, more
from tests.harness.runs import SOON_S, Result, line_of, run
from tests.harness.trainers import assert_same, make_trainer
from tests.modules import chains as m
from tests.references.pruned import random_masks
from tests.references.scaled import precision

# ---------------------------------------------------------------------- before any process

CDP, F1B = ({x: getattr(PRESETS[name], x) for x in AXES} for name in ("cyclic_dp", "1f1b"))
PIPELINE = partial(PipelineStrategy, "1f1b")
TOP = TopK(density=0.5)


@pytest.mark.parametrize(
    ("door", "given", "said", "allowed", "todo"),
    [
        (CyclicStrategy, {"preset": "cyclic"}, "preset 'cyclic' is", "cyclic_dp", "use "),
        (CyclicStrategy, {"preset": "1f1b"}, "is one of PipelineStrategy", "cyclic_dp", "use Pip"),
        (CyclicStrategy, {"preset": ["1f1b"]}, "preset ['1f1b'] is", "cyclic_dp", "use "),
        (CyclicStrategy, {"preset": F1B}, "placement 'pipelined' is", "replicated", "use Pip"),
        (CyclicStrategy, {"preset": {"weights": "old"}}, "'weights': 'old'", "each", "use preset"),
        (CyclicStrategy, {"preset": CDP | {"weights": "old"}}, "'old' is", "freshest", "use pre"),
        (CyclicStrategy, {"preset": CDP | {"weights": []}}, "weights [] is", "fresh", "use pre"),
        (CyclicStrategy, {"preset": CDP | {"weights": "sync"}}, "sync", "delayed", "use "),
        (CyclicStrategy, {"slack": -1}, "slack=-1", "0", "use "),
        (CyclicStrategy, {"slack": True}, "slack=True", "0", "use "),
        (CyclicStrategy, {"stages": True}, "stages=True", "a number from 1", "use "),
        (CyclicStrategy, {"stages": 0}, "stages=0", "a number from 1", "use "),
        (CyclicStrategy, {"stages": "two"}, "stages='two'", "a number from 1", "use "),
        (CyclicStrategy, {"stages": "timed"}, "stages='timed'", '"measured" (by tim', "use "),
        (CyclicStrategy, {"stages": "measured"}, "preset 'cyclic_dp'", "pipeline", "use stages="),
        (CyclicStrategy, {"stages": [1, 2]}, "stages=[1, 2]", "list of module pa", "use "),
        (CyclicStrategy, {"stages": [["a"]]}, "stages=[['a']]", "list of module pa", "use "),
        (CyclicStrategy, {"timeout": 5}, "timeout=5", "a datetime.timedelta above 0", "use time"),
        (CyclicStrategy, {"timeout": timedelta()}, "delta(0)", "a datetime.timedelta", "use time"),
        (CyclicStrategy, {"clip_norm": "all"}, "clip_norm='all'", "'stage', 'global'", "use "),
        (CyclicStrategy, {"relay_buffers": "no"}, "relay_buffers='no'", "'auto', 'all'", "use "),
        (CyclicStrategy, {"replicas": 2}, "'replicas'", "preset, stages", "of PipelineStrategy"),
        (CyclicStrategy, {"activation_checkpointing": "always"}, "'activation", "stages", "of Pi"),
        (CyclicStrategy, {"find_unused_parameters": True}, "'find_unu", "preset", "remove it"),
        (CyclicStrategy, {"static_graph": True}, "'static_graph'", "transport", "remove it"),
        (CyclicStrategy, {"disk": 9}, "disk=9", "the path of a folder", "use disk="),
        (CyclicStrategy, {"disk": "."}, "disk='.' without memory_limit_bytes", "a number", "use "),
        (CyclicStrategy, {"memory_limit_bytes": 9, "num_microbatches": 2}, "num_microbatches=2",
         "workers that are processes", "use "),
        (CyclicStrategy, {"memory_limit_bytes": 9, "error_feedback": True}, "error_feedback=True",
         "one of them", "leave one out"),
        (CyclicStrategy, {"memory_limit_bytes": -9}, "limit_bytes=-9", "above 0", "use "),
        (PIPELINE, {"activation_checkpointing": "some"}, "checkpointing='some'", "never", "use "),
        (PIPELINE, {"activation_checkpointing": True}, "checkpointing=True", "never", "use "),
        (PIPELINE, {"activation_checkpointing": "optimal"}, "without memory_limit_bytes",
         "a number of bytes", "use memory_limit_bytes="),
        (PIPELINE, {"disk": "/tmp"}, "disk='/tmp' with activation_checkpointing='never'",
         "'offload'", "leave disk out"),
        (PipelineStrategy, {"preset": "spectrain", "memory_limit_bytes": 9,
         "activation_checkpointing": "optimal"}, "'spectrain', whose predicted", "rules that",
         "use activation_checkpointing='always'"),
        (PIPELINE, {"num_microbatches": 0}, "num_microbatches=0", "from 1", "use "),
        (PIPELINE, {"num_microbatches": -2}, "num_microbatches=-2", "from 1", "use "),
        (PIPELINE, {"replicas": 0}, "replicas=0", "from 1", "use "),
        (PIPELINE, {"stages": 0}, "stages=0", "a number from 1", "use "),
        (PIPELINE, {"stages": ["a", "a"]}, "'a'", "once", "use "),
        (PIPELINE, {"stages": "measure"}, "stages='measure'", "a number from 1", "use "),
        (PipelineStrategy, {"preset": F1B | {"placement": "single"}, "stages": "measured"},
         "stages='measured'", "use stages='auto', a number", "use "),
        (PipelineStrategy, {"preset": F1B | {"sharding": "optimizer"}}, "optimizer", "none", ""),
        (CyclicStrategy, {"group_size": 0}, "group_size=0", "whole numbers from 1 on", "use "),
        (CyclicStrategy, {"compress": "int4"}, "compress='int4'", "'fp32', 'bf16'", "use "),
        (CyclicStrategy, {"compress": TopK}, "compress=<class", "as TopK(density=0.01)", "use "),
        (CyclicStrategy, {"compress": TOP, "preset": "lockstep_dp", "disk": ".",
                          "memory_limit_bytes": 9},
         "compress=TopK(density=0.5) with memory_limit_bytes=9", "codecs that leave", "use "),
        (PIPELINE, {"compress": TOP, "replicas": 2},
         "compress=TopK(density=0.5) with preset '1f1b'", "'fp32', 'bf16', 'fp16'",
         "use compress='bf16'"),
        (PIPELINE, {"compress": "bf16"}, "'bf16' with preset '1f1b', which does", "", ""),
        (partial(PipelineStrategy, "pipedream_2bw"), {"compress": "bf16"},
         "compress='bf16' with preset 'pipedream_2bw', which does not use it", "", ""),
        (PIPELINE, {"compress": {"activation": "bf16"}}, "compress={'activation': 'bf16'}",
         "a mapping of these for 'gradients', for 'weights'", "use "),
        (PIPELINE, {"compress": {"activations": "fp32"}}, "{'activations': 'fp32'}",
         "for 'activations' of 'bf16', 'fp16', 'int8', or a codec", "use "),
        (PIPELINE, {"compress": {"activations": ["bf16"]}}, "['bf16']", "of 'bf16'", "use "),
        (PIPELINE, {"compress": {"activations": Dct(density=0.5)}},
         "whose thresholds are of gradients", "'int8', TopK", "use compress={'activations': TopK"),
        (PIPELINE, {"compress": {"activations": PowerSgd(rank=1)}}, "of one matrix", "'int8'",
         "use compress={'activations': TopK"),
        (PIPELINE, {"compress": {"activations": TOP}, "stages": 1}, "stages=1, one stage", "two",
         "use stages=2"),
        (PIPELINE, {"compress": {"activations": TOP, "gradients": "bf16"}},
         "'gradients': 'bf16'} with preset '1f1b', which does not use it",
         "gradients where workers send sums", "use replicas=2"),
        (PIPELINE, {"compress": {"gradients": TOP}, "replicas": 2}, "add up the gradients",
         "'fp32', 'bf16', 'fp16'", "use compress='bf16'"),
        (CyclicStrategy, {"compress": {"activations": TOP}}, "'cyclic_dp', whose workers run who",
         "presets of PipelineStrategy", "use PipelineStrategy('1f1b', compress={'activations'"),
        (CyclicStrategy, {"compress": {"activations": "bf16"}, "num_microbatches": 4},
         "whose workers run whole micro-batches", "presets of PipelineStrategy", "use Pipe"),
        (PIPELINE, {"error_feedback": True}, "error_feedback=True with preset '1f1b', which does "
         "not use it", "", "use "),
        (PIPELINE, {"error_feedback": 1}, "error_feedback=1", "True or False", "use "),
        (partial(CyclicStrategy, "lockstep_dp"), {"error_feedback": True},
         "with preset 'lockstep_dp', which does not use it", "", "use "),
    ],
)  # fmt: skip
def test_options(
    door: Callable[..., Any], given: dict[str, Any], said: str, allowed: str, todo: str
) -> None:
    with pytest.raises((PlanError, ConfigurationError)) as caught:
        door(**given)
    what, has_allowed, rest = str(caught.value).partition("allowed")
    assert said in what
    assert has_allowed
    assert allowed in rest
    assert todo in str(caught.value)


def test_a_plan_without_a_runtime() -> None:
    with pytest.raises(
        PlanError, match=r"'full' \(preset 'lockstep_dp'\) has no runtime yet.*; use"
    ):
        CyclicStrategy(dict(CDP, schedule="lockstep", weights="sync", sharding="full"))


def test_mps() -> None:
    class OnMps:
        accelerator = MPSAccelerator.__new__(MPSAccelerator)

    with pytest.raises(ConfigurationError, match=r"'mps'.*allowed: 'cpu', 'cuda'; use "):
        check_fit(OnMps(), LightningModule(), sync_batchnorm=False)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what ranks train on

NUM_STEPS, NUM_MICRO = 4, 2


def rows(k: int) -> Tensor:
    return torch.randn((3, 6), generator=torch.Generator().manual_seed(k))


def whole(t: int) -> list[Tensor]:
    return [torch.cat([rows(t * NUM_MICRO + i) for i in range(NUM_MICRO)])]


def micro_batches() -> Any:
    return DataLoader([[rows(k)] for k in range(NUM_STEPS * NUM_MICRO)], batch_size=None)  # type: ignore[arg-type]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(whole, range(6 + 2 * here().rank))


BATCHES: dict[str, Callable[[int], list[Any]]] = {  # step -> batch
    "good": whole,
    "no tensor": lambda t: ["text", 3],
    "no rows": lambda t: [torch.zeros(0, 6)],
    "scalars": lambda t: [torch.tensor(1.0)],
    "fewer rows": lambda t: [whole(t)[0][: 6 - 3 * t]],
}
ON_RANK_1: dict[str, Callable[[int], list[Any]]] = {
    "other structure": lambda t: whole(t) * 2,
    "other dtype": lambda t: [whole(t)[0].double()],
    "other dims": lambda t: [whole(t)[0].flatten()],
}


def batches(kind: str) -> Any:
    if kind == "other number, unsized":
        return DataLoader(Stream(), batch_size=None)
    made = BATCHES.get(kind, whole)
    if here().rank == 1:
        made = ON_RANK_1.get(kind, made)
    number = NUM_STEPS + here().rank * (kind == "other number")
    return DataLoader([made(t) for t in range(number)], batch_size=None)  # type: ignore[arg-type]


def sevens() -> Any:
    x = torch.zeros(8, 6)
    x[2] = 7.0  # in the second of four micro-batches
    return DataLoader([[x]], batch_size=None)  # type: ignore[arg-type]


def ragged(drop_last: bool) -> Any:
    """Give batches of 8, 8 and 4 rows."""
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader([[row] for row in x], batch_size=8, drop_last=drop_last)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- by all, or by one

GPIPE = {"preset": "gpipe", "num_microbatches": NUM_MICRO}


FLOW = {"preset": "cyclic_pipeline", "num_microbatches": NUM_MICRO, "stages": ["layers.2"]}
FOUR = ["layers.1", "layers.2", "layers.3"]


class OnEachRank:
    """Become what is made, by pickling."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __reduce__(self) -> Any:
        return self.make, ()


class StepsItself(Precision):
    """Has an optimizer's step of its own."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().optimizer_step(*args, **kwargs)


PRUNED = [OnEachRank(partial(SparseStatePrecision, sparsity=0.5))]


def pipeline(*stages: str, **more: Any) -> dict[str, Any]:
    return GPIPE | {"stages": list(stages)} | more


@dataclass(frozen=True)
class Refusal:
    """Say what is refused, and how.

    Args:
        module: makes what is trained.
        error: the type of what is raised.
        says: what is in its text on every rank.
        strategy: its options.
        num_ranks: how many train.
        data: the kind of batches.
        by: "all", each with its own error, or "one", whose reason others may repeat instead.
        flags: of the Trainer.
    """

    module: Callable[[], LightningModule]
    error: str
    says: Sequence[str]
    strategy: dict[str, Any]
    num_ranks: int = 2
    data: str = "good"
    by: str = "one"
    flags: dict[str, Any] = field(default_factory=dict)

    def ends(self) -> list[Result]:
        flags = {"data": partial(batches, self.data), "max_epochs": 2} | self.flags
        return run(self.module, self.strategy, self.num_ranks, **flags)

    def check(self) -> None:
        assert_refused(self.ends(), self.error, *self.says, by=self.by)


def assert_refused(ends: list[Result], error: str, *says: str, by: str = "one") -> None:
    assert error in {end.error for end in ends}, ends
    for rank, end in enumerate(ends):
        assert end.error in ({error} if by == "all" else {error, "PeerError"}), end
        assert end.seconds < SOON_S, end
        for part in says:
            assert part in end.text, end.text
        if end.error == "PeerError":
            assert_heard(end.text, rank)


def assert_heard(text: str, rank: int) -> None:
    """Look for one line in which a rank names another one first, and then what to do."""
    name = r"rank (\d) on \S+( \(stages? [^)]+\))?"
    because = rf"this rank \({rank}\) stopped because of it\. Look at the log of rank \1\."
    assert re.fullmatch(rf"{name} failed .*; {because}.*", text), text


def all_refuse(
    module: Callable[[], Any], error: str, *says: str, data: str = "good", **strategy: Any
) -> Refusal:
    return Refusal(module, error, says, {"preset": "cyclic_dp"} | strategy, data=data, by="all")


def one_refuses(
    module: Callable[[], Any], error: str, *says: str, strategy: dict[str, Any],
    num_ranks: int = 2, data: str = "good", **flags: Any,
) -> Refusal:  # fmt: skip
    return Refusal(module, error, says, strategy, num_ranks, data, flags=flags)


@pytest.mark.multi
@pytest.mark.parametrize(
    "refusal",
    [
        all_refuse(m.Chain, "PlanError", "99", "4 places", "allowed: 1 to 4", "lower", stages=99),
        all_refuse(m.Chain, "PlanError", "'layers.7'", "allowed:", "layers.1",
                   stages=["layers.7"]),
        all_refuse(m.Chain, "PlanError", "one after the other", "allowed:", "reorder",
                   stages=["layers.2", "layers.1"]),
        all_refuse(m.Chain, "PlanError", "num_microbatches=3", "multiples of", "use ",
                   num_microbatches=3),
        all_refuse(m.Chain, "PlanError", "num_microbatches=4", "accumulate_grad_batches=2",
                   num_microbatches=4),
        all_refuse(m.NothingTrained, "ConfigurationError", "no parameter", "allowed:", "pass "),
        all_refuse(m.Outside, "ConfigurationError", "1 parameter(s)", "allowed:", "register"),
        all_refuse(m.SharedStorage, "ConfigurationError", "share one storage", "allowed:", "tie"),
        all_refuse(m.CompiledInPlace, "ConfigurationError", "compiled as a whole", "block.comp"),
        all_refuse(partial(m.Fails, "has no graph"), "StepError", "without a graph (step 0)",
                   "allowed:", "detach"),
        all_refuse(m.OtherModule, "ConfigurationError", "head.weight (4, 4)", "head.weight (5, 4)",
                   "allowed:"),
        all_refuse(m.OtherFrozen, "ConfigurationError", "layers.2.weight", "trained", "frozen",
                   "allowed:"),
        all_refuse(m.Chain, "StepError", "of 1: float32", "of 2: float32", "allowed:",
                   data="other structure"),
        all_refuse(m.TakesAny, "StepError", "float32 with 2 dims", "float64 with 2 dims",
                   "allowed:", data="other dtype"),
        all_refuse(m.TakesAny, "StepError", "float32 with 2 dims", "float32 with 1 dim",
                   "allowed:", data="other dims"),
        all_refuse(m.Chain, "ConfigurationError", f"rank 0: {NUM_STEPS}", f"rank 1: {NUM_STEPS+1}",
                   "training ba", "allowed:", data="other number"),
        all_refuse(m.OtherOrderOnOne, "StepError",
                   "rank 1 entered the stages that rank 0 has in the order [3, 2, 1]; allowed:",
                   "stages=1", stages=4),
        # a pipeline's stages
        one_refuses(m.Chain, "PlanError", "stages=40", "allowed: 1 to 4", "use stages=4",
                    strategy=GPIPE | {"stages": 40}),
        one_refuses(m.Chain, "PlanError", "'layers.7'", "allowed:", "layers.1",
                    strategy=pipeline("layers.7")),
        one_refuses(m.Chain, "PlanError", "'missing.0'", "allowed:",
                    strategy=pipeline("layers.1", "missing.0")),
        one_refuses(m.Chain, "PlanError", "'never'", "does not call", "allowed:", "layers.1",
                    strategy=pipeline("never")),
        one_refuses(m.Chain, "PlanError", "allowed: the order", 'stages=["layers.1", "layers.2"]',
                    strategy=pipeline("layers.2", "layers.1")),
        one_refuses(m.OtherOrder, "PlanError", "allowed:", 'stages=["layers.2", "layers.1"]',
                    strategy=pipeline("layers.1", "layers.2")),
        one_refuses(m.Chain, "PlanError", "allowed", "num_workers=3 with num_stages=2",
                    "use num_stages=3 or num_workers=2", strategy=pipeline("layers.2"),
                    num_ranks=3),
        one_refuses(m.Chain, "PlanError", "allowed", "num_workers=4 with num_stages=2",
                    "num_workers=2, or replicas=2", strategy=pipeline("layers.2"), num_ranks=4),
        one_refuses(m.Chain, "PlanError", "allowed", "num_workers=3 with replicas=2",
                    "use num_workers=4", strategy=pipeline("layers.2", replicas=2), num_ranks=3),
        one_refuses(m.Chain, "PlanError", "allowed", "num_workers=2 with replicas=4",
                    "use num_workers=4", strategy=pipeline("layers.2", replicas=4)),
        one_refuses(m.HasSparseGradients, "StepError", "stage 0 has a sparse gradient", "allowed:",
                    strategy=pipeline("layers.1", replicas=2), num_ranks=4),
        one_refuses(m.LimitsRows, "PlanError", "'embedding.weight'", "allowed:",
                    strategy=GPIPE | {"preset": "1f1b", "stages": 1, "replicas": 2}),
        # stages without parameters
        one_refuses(m.Chain, "PlanError", "stage 1, from 'tanh.1' to 'layers.2', would be without",
                    'use stages=["tanh.1", "layers.3"]', strategy=pipeline("tanh.1", "layers.2")),
        one_refuses(m.Chain, "PlanError", "step's beginning to 'layers.0', would be without",
                    "allowed: no place", strategy=pipeline("layers.0", "layers.1")),
        one_refuses(m.Chain, "PlanError", "stage 2, from 'tanh.3' to the end, would be without",
                    'use stages=["layers.1", "layers.3"]',
                    strategy=pipeline("layers.1", "tanh.3")),
        # what it trains on
        *(one_refuses(m.Chain, "ConfigurationError", "training batches", "allowed:",
                      f"(rank 0: {NUM_STEPS}, rank 1: {NUM_STEPS + 1})", data="other number",
                      strategy=pipeline("layers.2", preset=preset))
          for preset in ("1f1b", "cyclic_pipeline")),
        *(one_refuses(m.Chain, "StepError", "allowed:", *says, data=data,
                      strategy=pipeline("layers.2"))
          for data, says in [("no tensor", ("no tensor", "micro-batches")),
                             ("no rows", ("no samples", "[0, 6]")), ("scalars", ("dim",))]),
        one_refuses(m.Chain, "StepError", "gave 3 micro-batches, but num_microbatches=4",
                    data="fewer rows", num_ranks=1,
                    strategy={"preset": "cyclic_dp", "num_microbatches": 4}),
        # pipelines without a flush
        one_refuses(m.Chain, "ConfigurationError", "accumulate_grad_batches=2",
                    "allowed: 1; use larger", strategy=FLOW, accumulate_grad_batches=2),
        *(one_refuses(m.Chain, "ConfigurationError", 'clip_norm="global"',
                      'allowed: clip_norm="stage"', gradient_clip_val=1.0,
                      strategy=FLOW | {"preset": preset, "clip_norm": "global"})
          for preset in ("cyclic_pipeline", "cyclic_mp")),
        one_refuses(m.Chain, "PlanError", "num_microbatches=2 with num_stages=4",
                    "num_microbatches=3 or more", strategy=FLOW | {"stages": FOUR}),
        one_refuses(m.Chain, "PlanError", "num_microbatches=3 with num_stages=4",
                    "num_microbatches=4",
                    strategy={"preset": "cyclic_mp", "num_microbatches": 3, "stages": FOUR}),
        *(one_refuses(m.TiedEnds, "PlanError", "weights 'predicted'", "allowed: ", "one stage",
                      num_ranks=num_ranks,
                      strategy=FLOW | {"preset": "pipeoptim", "num_microbatches": 1})
          for num_ranks in (1, 2)),
        # what Lightning refuses, in its own words
        *(one_refuses(partial(m.ReturnsOther, returned), "MisconfigurationException", says,
                      strategy=GPIPE, num_ranks=1)
          for returned, says in [(0.5, "must return a Tensor, a dict"),
                                 ({"los": 1}, "the 'loss' key")]),
        # precisions, and what travels
        *(one_refuses(m.HalvesGradients, "StepError", "changed in step 0 before they were clipped",
                      strategy=FLOW | {"preset": "pipedream_2bw"}, gradient_clip_val=0.02,
                      **plugins)
          for plugins in ({}, {"plugins": [precision()]})),
        *(one_refuses(m.Chain, "ConfigurationError", "StepsItself.optimizer_step is not ",
                      strategy=strategy, plugins=[OnEachRank(StepsItself)])
          for strategy in ({"preset": "cyclic_dp"}, pipeline("layers.2", preset="1f1b"))),
        one_refuses(m.Steep, "StepError", "compress='fp16' sends none above 65504",
                    "gradients have an element of ",
                    strategy={"preset": "cyclic_dp", "compress": "fp16"}),
        all_refuse(m.Chain, "PlanError", "group_size=3 with 2 workers; all groups have as many",
                   stages=4, group_size=3),
        # compressed states
        *(one_refuses(m.Chain, "ConfigurationError", "SparseStatePrecision", says, plugins=PRUNED,
                      strategy=strategy)
          for strategy, says in [
              (FLOW | {"preset": "spectrain", "num_microbatches": 1},
               "preset='spectrain', which predicts weights"),
              ({"preset": "cyclic_dp", "save_distributed_checkpoint": True},
               "save_distributed_checkpoint=True"),
              (FLOW | {"error_feedback": True}, "error_feedback=True")]),
        one_refuses(m.TiedEnds, "PlanError", "'shared' does not fit tied=", plugins=PRUNED,
                    strategy=FLOW | {"preset": "cyclic_mp"}),
        # its steps
        *(one_refuses(partial(m.Fails, how), "StepError", says,
                      strategy=pipeline("layers.2", preset="1f1b"))
          for how, says in [("returns None", "returned None (step 0)"),
                            ("has no graph", "without a graph (step 0)"),
                            ("is not finite", "nan in step 0")]),
        *(one_refuses(module, "ZeroDivisionError", "the batch is broken",
                      strategy=pipeline("layers.2", preset="1f1b"))
          for module in (m.FailsInLastStage, m.FailsInFirstStage)),
        one_refuses(m.ReadsTwice, "PlanError", "by __float__", "by item", 'stages=["layers.1"]',
                    strategy=pipeline("layers.3")),
        # steps of workers that run whole micro-batches
        one_refuses(m.ReducesInUpdate, "StepError",
                    "self.log('norm', ...) was called in on_before_optimizer_step",
                    strategy={"preset": "cyclic_dp"}),
        one_refuses(m.OtherOrderLater, "StepError", "ran its stages in the order [3, 2, 1]",
                    strategy={"preset": "cyclic_dp", "stages": 4}),
        one_refuses(m.ReentrantCheckpoint, "StepError", "use_reentrant=False",
                    strategy={"preset": "cyclic_dp", "stages": 4}),
        one_refuses(m.TwoBackwards, "StepError", "one backward that reaches each parameter once",
                    strategy={"preset": "cyclic_dp", "stages": 4}),
        one_refuses(m.SumsParameters, "StepError", "is read on rank",
                    strategy={"preset": "cyclic_zero", "stages": ["layers.2"]}),
        *(one_refuses(m.StatisticsLater, "StepError", "buffer 'layers.1.num_batches_tracked'",
                      "changed after it had been handed on",
                      strategy={"preset": preset, "stages": ["layers.2"]})
          for preset in ("cyclic_dp", "cyclic_dp_v1")),
        *(one_refuses(m.UpdatesInBackward, "StepError", "while step 0 was under way",
                      strategy=strategy)
          for strategy in ({"preset": "cyclic_dp"}, pipeline("layers.2", preset="1f1b"),
                           pipeline("layers.2", preset="cyclic_pipeline"))),
    ],
    ids=lambda x: "-".join([
        getattr(x.module, "func", x.module).__name__, x.strategy["preset"], x.says[0]
    ]),
)  # fmt: skip
def test_training(refusal: Refusal) -> None:
    refusal.check()


# cyclic_dp_v1 makes the updates of all stages on one rank, in whose hook weights may change
HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward"]


@pytest.mark.multi
@pytest.mark.parametrize(
    ("hook", "whose", "preset"),
    [
        *in_turn(HOOKS, ["own", "teacher"], ["cyclic_dp", "cyclic_dp_v1", "lockstep_dp"]),
        ("on_before_optimizer_step", "teacher", "cyclic_dp_v1"),
    ],
)
def test_weights_that_a_hook_changes_within_a_step(hook: str, whose: str, preset: str) -> None:
    module = partial(m.ChangesWithin, hook, whose)
    name = f"parameter '{'layers' if whose == 'own' else 'teacher'}."
    says = (name, "while step", "but ranks have several versions or copies of it")
    one_refuses(module, "StepError", *says, strategy={"preset": preset}).check()


@pytest.mark.multi
@pytest.mark.parametrize(
    "strategy",
    [
        {"preset": "cyclic_dp"},
        more({"preset": "lockstep_dp"}),
        {"preset": "cyclic_zero"},
        {"preset": "pipedream_2bw"},
        more({"preset": "cyclic_pipeline"}),
        {"preset": "1f1b", "replicas": 2, "num_microbatches": 2},
    ],
    ids=lambda strategy: strategy["preset"],
)
def test_a_weight_that_is_changed_through_data_in_a_single_step(strategy: dict[str, Any]) -> None:
    says = ("parameter 'layers.2.weight' was changed", "while step 3 was", "several versions")
    one_refuses(m.ChangesOnce, "StepError", *says, strategy=strategy).check()


@pytest.mark.multi
@pytest.mark.parametrize(
    "preset", ["cyclic_dp_v1", *map(more, ["cyclic_dp", "lockstep_dp", "cyclic_zero", "1f1b"])]
)
def test_a_weight_that_is_laid_elsewhere_within_a_step_is_no_change(preset: str) -> None:
    """The update was made on what was shown, and so on an older version, and was lost."""
    never = run(partial(m.LaysElsewhere, 99), {"preset": preset}, data=partial(batches, "good"))
    moved = run(partial(m.LaysElsewhere, 1), {"preset": preset}, data=partial(batches, "good"))
    for one, other in zip(never, moved, strict=True):
        assert one.error + other.error == "", other.text
        assert one.losses == other.losses
        assert_same(one.weights, other.weights)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("how", "at", "culprit", "error", "reason", "preset"),
    [
        ("returns None", 0, 0, "StepError", "returned None (step 0)", "cyclic_dp"),
        ("returns None", 2, 1, "StepError", "returned None (step 2)", "cyclic_dp_v1"),
        ("has no graph", 3, 0, "StepError", "without a graph (step 3)", "lockstep_dp"),
        ("is not finite", 3, 1, "StepError", "rank 1 is nan in step 3", "cyclic_dp"),
        ("is not finite", 0, 0, "StepError", "rank 0 is nan in step 0", "cyclic_dp_v1"),
        ("raises", 0, 0, "ZeroDivisionError", "the batch is broken", "lockstep_dp"),
        ("raises", 0, 1, "ZeroDivisionError", "the batch is broken", "cyclic_dp"),
        ("raises", 3, 0, "ZeroDivisionError", "the batch is broken", "cyclic_dp_v1"),
        ("raises", 3, 1, "ZeroDivisionError", "the batch is broken", "lockstep_dp"),
    ],
)
def test_the_others_name_the_reason_of_the_one_that_fails(
    how: str, at: int, culprit: int, error: str, reason: str, preset: str
) -> None:
    module = partial(m.Fails, how, at, [culprit])
    ends = one_refuses(module, error, strategy={"preset": preset}).ends()
    assert_refused(ends, error, reason)
    other = ends[1 - culprit]
    assert (ends[culprit].error, other.error) == (error, "PeerError")
    assert re.match(rf"rank {culprit} .*in step ", other.text)


@pytest.mark.multi
@pytest.mark.parametrize("preset", ["cyclic_dp", "lockstep_dp"])
def test_streams_of_different_length(preset: str) -> None:
    given = one_refuses(m.Chain, "", strategy={"preset": preset}, data="other number, unsized")
    for end in given.ends():
        assert end.error in ("StepError", "ConfigurationError", "PeerError"), end
        assert "number" in end.text
        assert "batches" in end.text


def fit_unlike(what: str, preset: str) -> None:
    """Train on ranks that have been given something else each."""
    strategy: dict[str, Any] = {"preset": preset}
    flags: dict[str, Any] = {}
    if what == "masks":
        masks = random_masks(m.Chain(), kept=0.3 + 0.1 * here().rank)
        flags["plugins"] = [SparseStatePrecision(masks)]
    else:
        strategy["compress"] = "bf16" if here().rank else None
    if preset == "gpipe":
        strategy |= {"replicas": 2, "stages": 1, "num_microbatches": 2}
    make_trainer(strategy, max_epochs=1, **flags).fit(m.Chain(), batches("good"))


@pytest.mark.multi
@pytest.mark.parametrize(
    ("what", "preset", "says"),
    [
        ("masks", "cyclic_dp", ["ranks differ in masks: ", "layers"]),
        *(("dtype", preset, [f"StepError: ranks differ in the arguments of {door}: ",
                             "compress=None", "compress='bf16'"])
          for preset, door in [("cyclic_dp", "CyclicStrategy"), ("gpipe", "PipelineStrategy")]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_ranks_that_are_given_something_else_each(
    what: str, preset: str, says: Sequence[str]
) -> None:
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(fit_unlike, 2, what, preset)
    assert len(caught.value.errors) == 2
    for text in caught.value.errors.values():
        for part in says:
            assert part in text


def fit_with_transformer_engine(preset: str) -> None:
    run = make_trainer(preset, max_epochs=1)
    # its constructor wants the package, which needs a GPU to be built
    plugin = TransformerEnginePrecision.__new__(TransformerEnginePrecision)
    run.strategy._precision_plugin = plugin
    run.fit(m.Chain(), batches("good"))


@pytest.mark.multi
@pytest.mark.parametrize("preset", ["cyclic_dp", "1f1b"])
def test_transformer_engine(preset: str) -> None:
    with pytest.raises(processes.RanksFailedError, match="keeps the scales of FP8 numbers"):
        processes.run(fit_with_transformer_engine, 2, preset)


# ---------------------------------------------------------------------- right here, refused there


@cache
def plainly(module: type[m.Chain]) -> Result:
    """Return the plain run of a module, made once per session."""
    (end,) = run(module, "auto", 1, data=micro_batches, accumulate_grad_batches=NUM_MICRO)
    return end


def assert_right(module: type[m.Chain], strategy: dict[str, Any], num_ranks: int = 2) -> None:
    plain = plainly(module)
    for r, end in enumerate(run(module, strategy, num_ranks, data=partial(batches, "good"))):
        assert not end.error, f"rank {r}: {end}"
        assert end.global_step == plain.global_step == NUM_STEPS
        assert_same(end.weights, plain.weights, f"rank {r}")


@pytest.mark.multi
@pytest.mark.parametrize(
    ("module", "strategy"),
    [
        (m.Nested, pipeline("net.1")),  # either name of a module will do
        (m.Nested, pipeline("layers.1")),
        (m.CalledTwice, pipeline("layers.1")),  # in two stages
        (m.CalledTwice, pipeline("layers.1", preset="1f1b")),
        (m.HasSparseGradients, pipeline("layers.1")),
        (m.LimitsRows, pipeline("layers.1", preset="1f1b")),
        (m.BranchesOnBatch, pipeline("layers.1", "layers.3")),
        # numbers of rows that depend on values
        *((module, pipeline("layers.3")) for module in m.CHOOSES_ROWS),
        # outputs that are no tensors
        (m.CrossesAsObject, pipeline("layers.2")),
        (m.CrossesAsTree, pipeline("layers.1", "layers.3")),
        (m.CrossesAsGenerator, pipeline("layers.2")),
        (m.CrossesAsNumber, pipeline("layers.1", "layers.3")),
    ],
)
def test_hard_cuts_that_are_right(module: type[m.Chain], strategy: dict[str, Any]) -> None:
    assert_right(module, strategy)


@pytest.mark.multi
@pytest.mark.parametrize("module", m.NEEDS_VALUES)
def test_code_of_an_earlier_stage_that_needs_values(module: type[m.Chain]) -> None:
    says = ("allowed:", line_of(module).name, 'stages=["layers.2"]')
    one_refuses(module, "PlanError", *says, strategy=pipeline("layers.3")).check()


@pytest.mark.multi
@pytest.mark.parametrize(
    ("remat", "module", "num_ranks"),
    in_turn(
        ["never", "always"],
        [(x, n) for n in (2, 1) for x in (m.EditsReceived, m.EditsInput, m.EditsBatch)],
    ),
)
def test_edits_in_place(module: type[m.Chain], num_ranks: int, remat: str) -> None:
    assert_right(module, pipeline("layers.2", activation_checkpointing=remat), num_ranks)


@pytest.mark.multi
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_change_of_a_view_where_views_would_travel_apart(num_ranks: int) -> None:
    says = ("allowed:", "changed in place", line_of(m.EditsView).name, 'stages=["layers.3"]')
    given = one_refuses(m.EditsView, "PlanError", *says, strategy=pipeline("layers.2"))
    replace(given, num_ranks=num_ranks).check()
    assert_right(m.EditsView, pipeline("layers.3"), num_ranks)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("num_ranks", "remat"), [(1, "never"), (2, "always"), more(1, "always"), more(2, "never")]
)
@pytest.mark.parametrize("stages", [["layers.1"], ["layers.1", "layers.2"]], ids=str)
def test_a_change_of_a_view_that_was_not_seen_before(
    stages: list[str], num_ranks: int, remat: str
) -> None:
    says = ("allowed:", "changed in place", line_of(m.EditsViewLater).name)
    strategy = pipeline(*stages, activation_checkpointing=remat)
    given = one_refuses(m.EditsViewLater, "StepError", *says, strategy=strategy)
    replace(given, num_ranks=num_ranks).check()


AWAY = {"activation_checkpointing": "offload", "disk": "/tmp"}


@pytest.mark.multi
@pytest.mark.parametrize("options", [{}, AWAY | {"preset": "gpipe", "num_microbatches": 4}])
def test_a_change_of_what_an_earlier_stage_on_the_same_worker_keeps(
    options: dict[str, Any],
) -> None:
    says = "modified by an inplace operation"
    one_refuses(
        m.EditsSaved, "RuntimeError", says, strategy=pipeline("layers.2") | options, num_ranks=1
    ).check()


# ---------------------------------------------------------------------- which micro-batch


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize(
    ("where", "error"), [("forward", "KeyError"), ("backward", "ZeroDivisionError")]
)
def test_a_note_says_in_which_micro_batch(where: str, error: str, remat: str) -> None:
    strategy = {"preset": "1f1b", "num_microbatches": 4, "stages": ["layers.3"]}
    strategy["activation_checkpointing"] = remat
    (end,) = run(partial(m.FailsOnSevens, where), strategy, 1, data=sevens)
    note = f"in micro-batch 2 of 4 (2 of 8 samples), stage 1, {where}"
    assert end.error == error
    assert list(end.notes).count(note) == 1


def test_a_micro_batch_too_small_for_batchnorm_says_what_to_do_and_that_helps() -> None:
    strategy = {"preset": "1f1b", "stages": ["layers.3"], "num_microbatches": 4}
    (end,) = run(m.Normed, strategy, 1, data=partial(ragged, False))
    assert end.error == "ValueError"
    assert end.notes[0] == "in micro-batch 1 of 4 (1 of 4 samples), stage 0, forward"
    todo = "use DataLoader(drop_last=True), larger batches, or a smaller num_microbatches"
    assert todo in end.notes[1]
    (end,) = run(m.Normed, strategy, 1, data=partial(ragged, True))
    assert end.global_step == 2
    (end,) = run(m.Normed, strategy | {"num_microbatches": 2}, 1, data=partial(ragged, False))
    assert end.global_step == 3
