"""Every preset on a transport with NCCL's rules: no names, one queue per channel, rendezvous."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cyclic.plan.program import Program
from lightning_cyclic.runtime.transport import NamedTransport
from tests.harness import processes
from tests.harness.nccl_model import GlooModel, Rules
from tests.harness.pipelines import Job, loader, pipelines, prepare
from tests.harness.trainers import assert_same, fit
from tests.modules.classifier import Classifier

pytestmark = pytest.mark.multi

TIMEOUT_S = 30.0


class Lines:
    """Let the messages of all programs travel as NCCL would carry them."""

    def __init__(self) -> None:
        self.models: list[GlooModel] = []

    def connect(self, named: NamedTransport, program: Program) -> GlooModel:
        """Stand in for the transport's own method."""
        rules = Rules(program.channels, program.depths)
        model = GlooModel(TIMEOUT_S, rules, named.crew.names.rank_of)
        self.models.append(model)
        return model

    def check(self) -> None:
        """Check that each receive met its send, and that none is left."""
        assert self.models
        for model in self.models:
            assert not model.mismatches
            model.assert_idle()


def over_nccl(function: Any, *args: Any) -> Any:
    """Return what a function returns, and check what its messages did."""
    lines = Lines()
    patch = pytest.MonkeyPatch()
    # a function, as methods of classes are found: it is told which transport is asked
    patch.setattr(NamedTransport, "connect", lambda named, program: lines.connect(named, program))  # noqa: PLW0108
    with patch.context():
        outcome = function(*args)
    lines.check()
    return outcome


def trained(job: Job, strategy: Any, folder: str) -> Any:
    """Train two epochs, with validation and a checkpoint inside each."""
    saver = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=1)
    flags = {"val_check_interval": 2, "limit_val_batches": 1, "enable_checkpointing": True}
    run = prepare(job, strategy, [saver], **flags)
    run.trainer.fit(run.module, run.batches, loader(job, 1))
    return run.outcome()


PIPELINES = [



    ("1f1b", "resnet", 4, {"replicas": 2}), ("cyclic_pipeline", "gpt2", 4, {}),
    ("pipedream", "gpt2", 4, {}), ("pipedream_2bw", "resnet", 4, {}),

    ("pipeoptim", "vit", 4, {}),
    ("cyclic_mp", "resnet", 4, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "case", "num_ranks", "more"), PIPELINES,
    ids=lambda x: "wide" if x == {"replicas": 2} else None if isinstance(x, dict) else str(x),
)  # fmt: skip
def test_pipelines(
    preset: str, case: str, num_ranks: int, more: dict[str, int], tmp_path: Path
) -> None:
    one_by_one = preset in ("pipedream", "pipeoptim", "spectrain")
    job = Job(case=case, num_microbatches=1 if one_by_one else 4)
    plan = {"preset": preset, "stages": 2 if more else num_ranks} | more
    by_name = pipelines(job, num_ranks, str(tmp_path / "a"), function=trained, **plan)
    function = partial(over_nccl, trained)
    by_order = pipelines(job, num_ranks, str(tmp_path / "b"), function=function, **plan)
    for given, expected in zip(by_order, by_name, strict=True):
        assert_same(given["weights"], expected["weights"])


@pytest.mark.parametrize(
    ("preset", "slack", "net", "num_ranks", "stages", "flags"),
    [
        ("cyclic_dp", 0, "resnet", 3, 3, {"accumulate_grad_batches": 2}),
        ("cyclic_dp_v1", 0, "gpt2", 3, 6, {}),
        ("cyclic_zero", 2, "gpt2", 3, 6, {}),
        ("lockstep_dp", 0, "mlp", 2, 2, {}),
    ],
)
def test_whole_micro_batches(
    preset: str, slack: int, net: str, num_ranks: int, stages: int, flags: dict[str, Any]
) -> None:
    args = (
        partial(Classifier, net, "sgd"),
        {"preset": preset, "slack": slack, "stages": stages},
        8,
        {"val_check_interval": 4, "max_epochs": 2} | flags,
    )
    by_name = processes.run(fit, num_ranks, *args, time_limit_s=90.0)
    by_order = processes.run(over_nccl, num_ranks, fit, *args, time_limit_s=90.0)
    for given, expected in zip(by_order, by_name, strict=True):
        assert_same(given["weights"], expected["weights"])
