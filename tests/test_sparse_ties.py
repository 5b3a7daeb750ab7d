"""Compressed states of parameters that several stages share, where these are apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cyclic import SparseStatePrecision
from lightning_cyclic.plan.actions import Kind, Payload
from tests.harness import processes
from tests.harness.pipelines import Job, pipelines, prepare
from tests.harness.trainers import assert_same, weights_of
from tests.modules.cases import FineTuned
from tests.references.pruned import random_masks
from tests.test_sparse_workers import fit_staged, masks_of, staged_by_rule

pytestmark = pytest.mark.multi

EMBEDDING = "model.transformer.wte.weight"  # whose last user is the head
GPT = Job(case="gpt2", num_steps=30, num_epochs=1)


class SharedLayers(FineTuned):
    """Uses the weight of an inner layer in three blocks; learns by SGD."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__("gpt2", dropout)
        first, _, third, fourth = self.model.transformer.h
        third.mlp.c_fc.weight = fourth.mlp.c_fc.weight = first.mlp.c_fc.weight

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9, weight_decay=0.01)


SHARED = replace(GPT, module=SharedLayers)


@pytest.mark.parametrize(
    ("preset", "num_ranks", "job", "compute", "clip", "dense", "more"),
    [("pipedream_2bw", 2, SHARED, "bf16-true", None, EMBEDDING, {})],
)
def test_tied_parameters_have_the_bits_of_dense_masked_training(
    preset: str, num_ranks: int, job: Job, compute: str, clip: float | None, dense: str,
    more: dict[str, Any],
) -> None:  # fmt: skip
    job = replace(job, num_microbatches=1) if preset == "pipedream" else job
    strategy = {"preset": preset, "stages": 4} | more
    ranks = pipelines(job, num_ranks, compute, clip, dense, function=fit_staged, **strategy)
    stage_of = ranks[0]["stage_of"]
    args = job, compute, ranks[0]["plan"], stage_of, clip, more.get("replicas", 1), dense
    (expected,) = processes.run(staged_by_rule, 1, *args)
    assert EMBEDDING in ranks[0]["tied"]
    for rank in ranks:
        assert_same(rank["weights"], expected)


class Tied(Callback):
    """Note how many elements of tied parameters go, and of master weights are here."""

    def __init__(self) -> None:
        self.sent: dict[Payload, list[int]] = {}
        self.num_trained = self.num_here = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        session = trainer.strategy._training._session  # type: ignore[attr-defined]
        for (kind, payload, *_), port in session._messages._ports.items():
            if kind is Kind.SEND and payload in (Payload.W, Payload.V):
                self.sent[payload] = [x.size.numel() for x in port.forms.get(None).specs]
        masters = [s.master for s in trainer.precision_plugin._states]  # type: ignore[attr-defined]
        self.num_trained = sum(p.numel() for p in masters)
        here = [p for p in masters if p.untyped_storage().nbytes() >= p.numel() * 4]
        self.num_here = sum(p.numel() for p in here)


def fit_watched(job: Job, strategy: dict[str, Any], dense: str) -> dict[str, Any]:
    watch, plugin = Tied(), SparseStatePrecision(masks_of(job, dense))
    run = prepare(job, strategy, callbacks=[watch], plugins=[plugin])
    run.trainer.fit(run.module, run.batches)
    return vars(watch)


def assert_masters_are_there_once(ranks: list[dict[str, Any]]) -> None:
    assert {rank["num_trained"] for rank in ranks} == {sum(rank["num_here"] for rank in ranks)}


@pytest.mark.parametrize("dense", ["", EMBEDDING])
def test_tied_gradients_and_values_are_those_of_what_is_kept(dense: str) -> None:
    job = replace(GPT, num_steps=4)
    ranks = pipelines(job, 2, dense, function=fit_watched, preset="1f1b", stages=2)
    masks = masks_of(job, dense)
    num = int(masks[EMBEDDING].sum()) if not dense else job.make().get_parameter(dense).numel()
    assert [rank["sent"] for rank in ranks] == [{Payload.W: [num]}, {Payload.V: [num]}]
    assert_masters_are_there_once(ranks)


def save_staged(
    job: Job, strategy: dict[str, Any], folder: str, resumed: str | None
) -> dict[str, Any]:
    watch = Tied()
    saving = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    plugin = SparseStatePrecision(None if resumed else random_masks(job.make()))
    flags = {"enable_checkpointing": True, "callbacks": [saving, watch], "plugins": [plugin]}
    run = prepare(job, strategy, **flags)
    run.trainer.fit(run.module, run.batches, ckpt_path=resumed)
    return vars(watch)


def test_checkpoints_of_a_resumed_run_are_those_of_one_that_was_not_stopped(
    tmp_path: Path,
) -> None:
    job, strategy = replace(SHARED, num_steps=9), {"preset": "pipedream_2bw", "stages": 2} | {}
    first, second = tmp_path / "a", tmp_path / "b"
    pipelines(job, 2, str(first), None, function=save_staged, **strategy)
    begin = str(first / "step=3.ckpt")
    ranks = pipelines(job, 2, str(second), begin, function=save_staged, **strategy)
    assert_masters_are_there_once(ranks)
    for name in ("step=6.ckpt", "step=9.ckpt"):
        whole, resumed = (torch.load(path / name, weights_only=True) for path in (first, second))
        assert_same(resumed["state_dict"], whole["state_dict"], name)
        given, expected = (x["SparseStatePrecision"]["masters"] for x in (resumed, whole))
        assert expected.keys() == dict(job.make().named_parameters()).keys()
        assert_same(given, expected, f"masters of {name}")
        given, expected = (x["optimizer_states"][0]["state"] for x in (resumed, whole))
        assert given.keys() == expected.keys()
        for number, state in expected.items():
            assert_same(given[number], state, f"state {number} of {name}")


class UnfreezeEmbedding(Callback):
    """Let the embedding be trained from the third step on."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 3:
            pl_module.get_parameter(EMBEDDING).requires_grad_()


class FrozenEmbedding(FineTuned):
    """Begins with an embedding that is not trained."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__("gpt2", dropout)
        self.get_parameter(EMBEDDING).requires_grad_(False)


def unfreeze_staged(job: Job, strategy: dict[str, Any] | None, path: str) -> dict[str, Any]:
    plugin, watch = SparseStatePrecision(random_masks(job.make())), Tied()
    callbacks = [UnfreezeEmbedding(), *([watch] if strategy else [])]
    run = prepare(job, strategy, callbacks=callbacks, plugins=[plugin])
    run.trainer.fit(run.module, run.batches)
    run.trainer.save_checkpoint(path)
    return vars(watch) | {"weights": weights_of(run.module)}


def test_a_tied_parameter_that_is_unfrozen_later_has_the_bits_of_one_device(
    tmp_path: Path,
) -> None:
    job = replace(GPT, num_steps=8, module=FrozenEmbedding)
    paths = [str(tmp_path / name) for name in ("a.ckpt", "b.ckpt")]
    ranks = pipelines(job, 2, paths[0], function=unfreeze_staged, preset="1f1b", stages=2)
    assert_masters_are_there_once(ranks)
    (plain,) = processes.run(unfreeze_staged, 1, job, None, paths[1])
    expected = plain["weights"]
    begin = job.make().get_parameter(EMBEDDING).detach() * random_masks(job.make())[EMBEDDING]
    assert not torch.equal(expected[EMBEDDING], begin.bfloat16())  # it was trained
    for rank in ranks:
        assert_same(rank["weights"], expected)
    masters = [
        torch.load(path, weights_only=True)["SparseStatePrecision"]["masters"] for path in paths
    ]
    assert_same(*masters)


def fit_cyclic_mp(job: Job) -> None:
    plugin = SparseStatePrecision(sparsity=0.5)
    run = prepare(job, {"preset": "cyclic_mp", "stages": 2}, plugins=[plugin])
    run.trainer.fit(run.module, run.batches)


def test_a_placement_that_takes_turns_refuses_them_as_without_pruning() -> None:
    with pytest.raises(processes.RanksFailedError, match="'shared' does not fit tied="):
        processes.run(fit_cyclic_mp, 2, replace(GPT, num_steps=2))
