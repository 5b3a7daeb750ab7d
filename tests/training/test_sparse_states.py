"""Compressed states on several workers: the bits of dense ones that are multiplied by masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic import SparseStatePrecision
from lightning_cyclic.plan.actions import Kind, Payload
from tests.harness import processes
from tests.harness.pipelines import Job, Outcome, pipelines, prepare
from tests.harness.rows import in_words, more
from tests.harness.trainers import assert_same, make_trainer
from tests.modules.cases import FineTuned
from tests.references.pruned import (
    DTYPES,
    LiveStorages,
    MaskedMasters,
    Regression,
    adamw,
    random_masks,
)
from tests.references.rules import WHOLE, Reference

pytestmark = pytest.mark.multi

EMBEDDING = "model.transformer.wte.weight"  # whose last user is the head


class SharedLayers(FineTuned):
    """Uses the weight of an inner layer in three blocks; learns by SGD."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__("gpt2", dropout)
        first, _, third, fourth = self.model.transformer.h
        third.mlp.c_fc.weight = fourth.mlp.c_fc.weight = first.mlp.c_fc.weight

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9, weight_decay=0.01)


def masks_of(job: Job, dense: str = "") -> dict[str, Tensor]:
    """Return masks of all matrices but one, which is called so."""
    return {n: mask for n, mask in random_masks(job.make()).items() if n != dense}


def plugin(job: Job, dense: str, compute: Any) -> SparseStatePrecision:
    return SparseStatePrecision(masks_of(job, dense), compute=compute)


def pruned(job: Job, dense: str = "", compute: str = "bf16-true") -> Job:
    return replace(job, plugins=(partial(plugin, job, dense, compute),))


def job_of(case: str, num_steps: int = 8, **more: Any) -> Job:
    return Job(case=case, num_steps=num_steps, num_epochs=1, **more)


CLIPPED = {"gradient_clip_val": 0.1}


@pytest.mark.parametrize(
    ("preset", "num_ranks", "case", "module", "compute", "flags", "options"),
    [
        ("cyclic_dp", 2, "cls_token", None, "bf16-true", {}, {"stages": 3}),
        ("cyclic_zero", 2, "gpt2", None, "bf16-true", {}, {"stages": 3}),
        more("cyclic_dp_v1", 2, "resnet", None, "bf16-true", CLIPPED, {"stages": 3}),
        ("lockstep_dp", 2, "cls_token", None, "16-true", CLIPPED, {"stages": 3}),
        ("1f1b", 4, "resnet", None, "bf16-true", CLIPPED, {"stages": 2, "replicas": 2}),
        more("pipedream_2bw", 2, "resnet", None, "bf16-true", {}, {"stages": 4}),
        more("cyclic_pipeline", 2, "resnet", None, "bf16-true", {}, {"stages": 4}),
        more("cyclic_mp", 2, "resnet", None, "bf16-true", {}, {"stages": 2}),
        # parameters that stages share
        ("pipedream_2bw", 2, "gpt2", SharedLayers, "bf16-true", {}, {"stages": 4}),
    ],
    ids=in_words,
)
def test_bits_are_those_of_dense_masked_training(
    preset: str, num_ranks: int, case: str, module: Any, compute: str, flags: dict[str, Any],
    options: dict[str, Any],
) -> None:  # fmt: skip
    m, dense = num_ranks if preset in WHOLE else 4, EMBEDDING if module else ""
    job = job_of(case, module=module, num_microbatches=m, flags=tuple(flags.items()))
    ranks = pipelines(pruned(job, dense, compute), num_ranks, preset=preset, **options)
    reference = Reference(job, ranks[0]["stage_of"])
    clip = flags.get("gradient_clip_val")
    masters = MaskedMasters(reference.module, masks_of(job, dense), DTYPES[compute], clip)
    reference.optimizer, reference.schedulers = masters, masters.schedulers
    reference.precision = HalfPrecision(compute)  # type: ignore[arg-type]
    reference.train(ranks[0]["plan"]).compare(ranks)


# ---------------------------------------------------------------------- what is kept, and travels


class Sent(Callback):
    """Note what has been sent when the fit ends, and which master weights are here."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = trainer.strategy._training  # type: ignore[attr-defined]
        self.found["messages"] = dict(training.transport.messages)
        states = getattr(trainer.precision_plugin, "_states", [])
        here = [s.master for s in states]
        self.found["trained"] = sum(p.numel() for p in here)
        here = [p for p in here if p.untyped_storage().nbytes() >= p.numel() * 4]
        self.found["masters"] = sum(p.numel() for p in here)
        session = training._session
        if hasattr(session, "engine"):  # of whole micro-batches
            exchange = session.engine._exchange
            layouts = {Payload.P: exchange._parameter_layouts, Payload.S: exchange._sum_layouts}
            self.found["elements"] = {
                payload: [sum(spec.size.numel() for spec in layout.specs) for layout in stages]
                for payload, stages in layouts.items()
            }
            return
        self.found["tied"] = {
            payload: [x.size.numel() for x in port.forms.get(None).specs]
            for (kind, payload, *_), port in session._messages._ports.items()
            if kind is Kind.SEND and payload in (Payload.W, Payload.V)
        }


def fit_watched(job: Job, strategy: dict[str, Any]) -> dict[str, Any]:
    watch = Sent()
    run = prepare(job, strategy, [watch])
    run.trainer.fit(run.module, run.batches)
    return watch.found | {"stage_of": run.trainer.strategy.stage_of}


def assert_masters_are_there_once(ranks: list[dict[str, Any]]) -> None:
    assert {rank["trained"] for rank in ranks} == {sum(rank["masters"] for rank in ranks)}


def test_messages_and_masters_are_those_of_what_is_kept() -> None:
    job, plan = job_of("cls_token", 4, num_microbatches=2), {"preset": "cyclic_dp", "stages": 3}
    ranks = pipelines(pruned(job), 2, function=fit_watched, **plan)
    half = replace(job, flags=(("precision", "bf16-true"),))
    dense = pipelines(half, 2, function=fit_watched, **plan)
    assert_masters_are_there_once(ranks)
    kept = {n: p.numel() for n, p in job.make().named_parameters()}
    kept |= {n: int(mask.sum()) for n, mask in masks_of(job).items()}
    num = [0, 0, 0]
    for name, j in ranks[0]["stage_of"].items():
        num[j] += kept[name]
    for rank, other in zip(ranks, dense, strict=True):
        assert rank["elements"] == {Payload.P: num, Payload.S: num}
        assert rank["messages"] == other["messages"]


@pytest.mark.parametrize("dense", [more(""), EMBEDDING])
def test_tied_gradients_and_values_are_those_of_what_is_kept(dense: str) -> None:
    job = job_of("gpt2", 4)
    ranks = pipelines(pruned(job, dense), 2, function=fit_watched, preset="1f1b", stages=2)
    mask = masks_of(job, dense).get(EMBEDDING)
    num = job.make().get_parameter(dense).numel() if mask is None else int(mask.sum())
    assert [rank["tied"] for rank in ranks] == [{Payload.W: [num]}, {Payload.V: [num]}]
    assert_masters_are_there_once(ranks)


# ---------------------------------------------------------------------- peak of backward

SIDE, DENSE = 64, 64 * 64 * 2  # bytes of a dense weight, or gradient, in bfloat16


class Peaks(Callback):
    """Note how many tensors as large as a dense weight each batch has at most, and leaves."""

    def __init__(self, live: LiveStorages) -> None:
        self.live = live
        self.during: list[int] = []
        self.behind: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.live.peak = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.during.append(self.live.peak // DENSE)
        self.behind.append(self.live.num_bytes // DENSE)


def fit_metered(strategy: dict[str, Any], sparse: bool) -> tuple[list[int], list[int]]:
    rows: Any = [torch.ones(SIDE) for _ in range(24)]
    with LiveStorages(DENSE) as live:  # all else is smaller
        net = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(8)])
        peaks = Peaks(live)
        plugins: list[Any] = [HalfPrecision("bf16-true")]
        if sparse:
            plugins = [SparseStatePrecision(sparsity=0.9)]
        run = make_trainer(strategy, max_epochs=1, callbacks=[peaks], plugins=plugins)
        run.fit(Regression(net, adamw), DataLoader(rows, batch_size=4))
    return peaks.during[2:], peaks.behind[2:]


@pytest.mark.parametrize(
    ("preset", "num_versions"), [more("1f1b", [1, 1]), ("cyclic_pipeline", [1, 2])]
)
def test_one_gradient_at_most_is_dense(preset: str, num_versions: list[int]) -> None:
    strategy = {"preset": preset, "stages": 2, "verify": False}
    for rank, (during, _) in enumerate(processes.run(fit_metered, 2, strategy, True)):
        assert set(during) == {4 * num_versions[rank] + 1}  # layers of a stage, and a gradient
    for during, behind in processes.run(fit_metered, 2, strategy, False):
        assert max(during) > 1 + max(behind)  # dense training is told from it


# ---------------------------------------------------------------------- freezing


class Thaws(Callback):
    """Lets a parameter be trained from the third step on."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            pl_module.get_parameter(self.name).requires_grad_()


class Frozen(FineTuned):
    """Begins with a parameter that is not trained."""

    def __init__(self, net: str, name: str, dropout: float = 0.0) -> None:
        super().__init__(net, dropout)
        self.get_parameter(name).requires_grad_(False)


def fit_thawing(job: Job, strategy: Any, name: str, folder: Path) -> Outcome:
    run = prepare(job, strategy, [Thaws(name)])
    run.trainer.fit(run.module, run.batches)
    path = folder / f"{'given' if strategy else 'plain'}.ckpt"
    run.trainer.save_checkpoint(path)
    return run.outcome()


@pytest.mark.parametrize(
    ("preset", "net", "name", "options"),
    [
        more("lockstep_dp", "llama", "model.lm_head.weight", {"compress": "bf16"}),
        ("1f1b", "gpt2", EMBEDDING, {"stages": 2}),  # which stages share
    ],
    ids=in_words,
)
def test_what_is_unfrozen_later_has_the_bits_of_one_device(
    preset: str, net: str, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    module: Callable[..., Any] = partial(Frozen, net, name)
    job = pruned(job_of(net, 6, module=module, num_microbatches=2 if preset in WHOLE else 4))
    plan = {"preset": preset, **options}
    ranks = pipelines(job, 2, name, tmp_path, function=fit_thawing, **plan)
    (plain,) = processes.run(fit_thawing, 1, job, None, name, tmp_path)
    begin = job.make().get_parameter(name).detach() * masks_of(job)[name]
    assert not torch.equal(plain["weights"][name], begin.bfloat16())  # it was trained
    for rank in ranks:
        assert_same(rank["weights"], plain["weights"])
    saved = (torch.load(tmp_path / f"{x}.ckpt", weights_only=True) for x in ("given", "plain"))
    assert_same(*(x["SparseStatePrecision"]["masters"] for x in saved))


# ---------------------------------------------------------------------- checkpoints


def fit_saving(job: Job, strategy: Any, folder: Path, begin: Path | None = None) -> Any:
    """Save each third step; begin with a file, which has the masks."""
    watch = Sent()
    saver = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    if begin:
        job = replace(job, plugins=(SparseStatePrecision,))
    run = prepare(job, strategy, [saver, watch], enable_checkpointing=True)
    run.trainer.fit(run.module, run.batches, ckpt_path=begin)
    return watch.found | {"masks": run.trainer.precision_plugin.masks}


@pytest.mark.parametrize(
    ("preset", "case", "module"),
    [("cyclic_zero", "cls_token", None), more("pipedream_2bw", "gpt2", SharedLayers)],
    ids=in_words,
)
def test_checkpoints_of_a_resumed_run_are_those_of_one_that_was_not_stopped(
    preset: str, case: str, module: Any, tmp_path: Path
) -> None:
    m = 2 if preset in WHOLE else 4
    job = pruned(job_of(case, 9, module=module, num_microbatches=m))
    first, second, plan = tmp_path / "a", tmp_path / "b", {"preset": preset, "stages": 2}
    pipelines(job, 2, first, function=fit_saving, **plan)
    ranks = pipelines(job, 2, second, first / "step=3.ckpt", function=fit_saving, **plan)
    assert_masters_are_there_once(ranks)
    for rank in ranks:
        assert_same(rank["masks"], masks_of(job))
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


def go_on(job: Job, strategy: None, path: Path, **flags: Any) -> int:
    run = prepare(replace(job, num_microbatches=1), strategy, max_steps=8, **flags)
    run.trainer.fit(run.module, run.batches, ckpt_path=path)
    return run.trainer.global_step


def test_checkpoints_go_to_one_device_and_to_plain_lightning(tmp_path: Path) -> None:
    job = job_of("cls_token", 12, num_microbatches=2)
    plan = {"preset": "cyclic_dp_v1", "stages": 2}
    pipelines(pruned(job), 2, tmp_path, function=fit_saving, **plan)
    path = tmp_path / "step=6.ckpt"
    saved = torch.load(path, weights_only=True)
    masters = saved["SparseStatePrecision"]["masters"]
    parameters = dict(job.make().named_parameters())
    assert masters.keys() == parameters.keys()
    for name, mask in masks_of(job).items():
        assert not saved["state_dict"][name][~mask].any()
        assert torch.equal(masters[name].bfloat16(), saved["state_dict"][name][mask])
    states = saved["optimizer_states"][0]["state"]
    shapes = [tuple(p.shape) for p in parameters.values()]
    assert [tuple(states[k]["exp_avg"].shape) for k in range(len(shapes))] == shapes
    plain = partial(go_on, precision="bf16-true")
    assert processes.run(plain, 1, job, None, path) == [8]
    job = replace(job, plugins=(SparseStatePrecision,))
    assert processes.run(go_on, 1, job, None, path) == [8]
