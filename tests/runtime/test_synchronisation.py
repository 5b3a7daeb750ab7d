"""On the hot path nothing of the package waits for a GPU, but for what is listed here.

Every preset trains, and every question that Python asks a tensor is noted: tests.harness.audit
says how. Which step asks what does not depend on the device, so a CPU shows it; whether the tensor
would be a GPU's is what the list says.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import pytest

from lightning_cyclic import PRESETS, LocalSteps
from tests.harness import processes
from tests.harness.audit import Audit, Behind
from tests.harness.rows import more
from tests.harness.trainers import make_trainer
from tests.modules.blocks import Blocks, batches
from tests.references.scaled import precision

pytestmark = pytest.mark.multi

HEADS = "heads are the host's: they travel by control, or as a part of what gloo carries"
COUNTERS = "torch's optimizers keep their step counters on the host, unless they are captured"
OWN_CLIPPING = "torch's own clipping, as under any strategy: from a device to itself"
ON_GROUP = "to the device of the process group: its own, unless several workers share a GPU"
SCALER = "torch's own scaler asks once per update, too, whether to skip it"
ALLOWED = {
    "plugin.records:_reduce to": "a value stays where it is, unless the next one lies elsewhere",
    "plugin.surrogate_loss:Surrogates._deposit __float__": "only where it is the host's",
    "plugin.synchronous_pipeline:SynchronousPipelineTraining.optimizer_step item": COUNTERS,
    "plugin.updates:Updates.apply item": COUNTERS,
    "plugin.updates:Updates.clip_grad_by_norm to": OWN_CLIPPING,
    "runtime.buffers:Buffer.__init__ numpy": "of buffers in the host's memory, once each",
    "runtime.late_values:LateValues.settle item": "of a pinned copy, one step late on a GPU",
    "runtime.loss_scaling:LossScaling.unscaled __bool__": SCALER,
    "runtime.loss_scaling:state_behind __float__": "scales are the host's",
    "runtime.loss_scaling:state_behind __int__": "scales are the host's",
    "runtime.messages:Messages._described cpu": HEADS,
    "runtime.messages:Messages._described numpy": HEADS,
    "runtime.norms:Norms.is_finite __bool__": SCALER,
    "runtime.partial_step.collectives:Collectives.reduce to": ON_GROUP,
    "runtime.partial_step.module_state:_unpacked item": "numbers that the user's step has asked "
    "a GPU for, to keep them on the module",
    "runtime.predict:_direction __float__": COUNTERS,
    "runtime.weight_watch:WeightWatch._check_seen tolist": "once in each of steps 0, 1, 2, 4, ...",
}
"""Who may ask, and why no GPU is waited for, or why it would be without the package, too."""

BATCHES = 7


class Case(NamedTuple):
    """Say what is trained how."""

    strategy: dict[str, Any]
    flags: dict[str, Any] = {}
    num_ranks: int = 2
    half: bool = False


FOUR = {"num_microbatches": 4}
BY_NORM = {"gradient_clip_val": 0.1}
AGAIN = {"activation_checkpointing": "always", "replicas": 2, "stages": 2, "num_microbatches": 2}
CASES = {
    "cyclic_dp": Case({"preset": "cyclic_dp"}),
    "cyclic_dp, half": Case({"preset": "cyclic_dp"}, half=True),
    "cyclic_dp_v1": Case({"preset": "cyclic_dp_v1"}, BY_NORM),
    "cyclic_zero": Case({"preset": "cyclic_zero"}),
    "lockstep_dp, half": Case({"preset": "lockstep_dp"}, BY_NORM, half=True),
    "lockstep_dp": Case({"preset": "lockstep_dp"}, {**BY_NORM, "accumulate_grad_batches": 2}),
    "diloco": Case({"preset": "diloco", "weights": LocalSteps(every=2)}, BY_NORM),
    "streaming_diloco": Case({"preset": "streaming_diloco"}),
    "gpipe": Case({"preset": "gpipe", **FOUR}, BY_NORM),
    "1f1b": Case({"preset": "1f1b", **FOUR}, {"accumulate_grad_batches": 2}),
    "1f1b, half": Case({"preset": "1f1b", **FOUR}, BY_NORM, half=True),
    "1f1b, wide": Case({"preset": "1f1b", **AGAIN}, BY_NORM, num_ranks=4),
    "interleaved_1f1b": Case({"preset": "interleaved_1f1b", **FOUR}),
    "zb_h1": Case({"preset": "zb_h1", **FOUR}),
    "zb_v": Case({"preset": "zb_v", **FOUR, "stages": 4}),
    "dualpipe_v": Case({"preset": "dualpipe_v", **FOUR, "stages": 4}),
    "cyclic_mp": Case({"preset": "cyclic_mp", **FOUR}),
    "cyclic_pipeline": Case({"preset": "cyclic_pipeline", **FOUR}),
    "pipedream": Case({"preset": "pipedream", "num_microbatches": 1}),
    "pipedream_2bw": Case({"preset": "pipedream_2bw", **FOUR}, BY_NORM),
    "pipeoptim": Case({"preset": "pipeoptim", "num_microbatches": 1}),
    "spectrain": Case({"preset": "spectrain", "num_microbatches": 1}),
}


class Found(NamedTuple):
    """Hold what an audit found."""

    own: frozenset[str]
    of_others: frozenset[str]


def audited(case: Case, plants: Sequence[tuple[str, str, str]] = ()) -> Found:
    """Train on this rank; return what was found."""
    for plant in plants:
        ask_in(*plant)
    audit = Audit()
    behind = Behind(audit)
    flags: dict[str, Any] = {"plugins": [precision(2.0**10)]} if case.half else {}
    with audit.installed():
        trainer = make_trainer(
            dict(case.strategy), max_epochs=1, callbacks=[behind], **case.flags, **flags
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Training ended .* behind a period")
            trainer.fit(Blocks(), batches(BATCHES))
    assert behind.batches == BATCHES - 4
    return Found(frozenset(audit.found), frozenset(audit.of_others))


@cache
def found(name: str) -> Found:
    """Return what all ranks of a case found."""
    ranks = processes.run(audited, CASES[name].num_ranks, CASES[name], time_limit_s=90.0)
    return Found(*(frozenset[str]().union(*each) for each in zip(*ranks, strict=True)))


# ---------------------------------------------------------------------- the audit


ALIKE = {  # what is planted is looked for in the first three; others are like one that always runs
    "cyclic_dp", "1f1b", "cyclic_pipeline", "lockstep_dp, half", "gpipe", "pipedream", "spectrain",
    "interleaved_1f1b", "zb_h1", "dualpipe_v",
}  # fmt: skip


@pytest.mark.parametrize("name", [more(name) if name in ALIKE else name for name in CASES])
def test_nobody_else_asks(name: str) -> None:
    own, of_others = found(name)
    assert own <= ALLOWED.keys()
    assert "tests.modules.blocks:Blocks.training_step item" in of_others


def test_every_preset_is_looked_at() -> None:
    assert {case.strategy["preset"] for case in CASES.values()} == PRESETS.keys()


@pytest.mark.exhaustive
def test_all_that_is_allowed_is_asked() -> None:
    asked = frozenset[str]().union(*(found(name).own for name in CASES))
    assert ALLOWED.keys() - asked == set()


# ---------------------------------------------------------------------- does it see anything?


def ask_in(module: str, name: str, question: str) -> None:
    """Let a function of the package ask, before it does anything else."""
    path, _, last = name.rpartition(".")
    owner: Any = import_module(module)
    owner = getattr(owner, path) if path else owner
    signature, _, body = textwrap.dedent(inspect.getsource(getattr(owner, last))).partition("\n")
    made: dict[str, Any] = {}
    exec(f"{signature}\n    {question}\n{body}", vars(sys.modules[module]), made)
    setattr(owner, last, made[last])


WHOLE = "lightning_cyclic.runtime.whole_step"
PARTIAL = "lightning_cyclic.runtime.partial_step"


PLANTED = {  # case -> module, function, question, operation
    "cyclic_dp": [
        (f"{WHOLE}.exchange", "Exchange.add",  # which a lane does
         "self._grads.of(a.t, a.j)[0].sum().item()", "item"),
        (f"{WHOLE}.hooks", "GradientCollector._take_next",  # inside autograd
         "assert self._holders[0][0].grad is None or self._holders[0][0].grad.sum() < 9",
         "__bool__"),
    ],
    "1f1b": [
        (f"{PARTIAL}.stage_step", "StageStep._backward_of",
         "[x.mean().cpu() for x in came.crossed.values()]", "cpu"),
        (f"{PARTIAL}.stage_step", "StageStep._keep",
         "torch.full((2,), torch.ones(()))", "_local_scalar_dense"),  # asked by C++
    ],
    "cyclic_pipeline": [
        (f"{PARTIAL}.versions", "Versions._places_of",  # from pageable memory
         "[torch.tensor([1.0], device=q.device) for q in version.values()]", "tensor"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_new_question_is_seen_and_no_other(name: str) -> None:
    plants = [plant[:3] for plant in PLANTED[name]]
    ranks = processes.run(audited, 2, CASES[name], plants)
    new = frozenset[str]().union(*(rank.own for rank in ranks)) - ALLOWED.keys()
    assert new == {
        f"{module.removeprefix('lightning_cyclic.')}:{function.rpartition('.')[2]} {operation}"
        for module, function, _, operation in PLANTED[name]
    }
