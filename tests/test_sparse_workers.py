"""Compressed states on several workers: the bits of dense ones that are multiplied by masks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic import SparseStatePrecision
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.plugin.precision.masks import Masks
from tests.harness import processes
from tests.harness.pipelines import Job, pipelines, prepare
from tests.harness.trainers import assert_same, make_trainer, train_data, weights_of
from tests.modules.classifier import Classifier, MicroBatches
from tests.references import asynchronous, sequential
from tests.references.pruned import DTYPES, LiveStorages, Regression, adamw, random_masks
from tests.references.replicated import by_stage
from tests.references.sequential import wire_of

pytestmark = pytest.mark.multi

NUM_STEPS = 16
RULES = {
    "cyclic_dp": "freshest", "cyclic_zero": "freshest", "cyclic_dp_v1": "delayed",
    "lockstep_dp": "sync",
}  # fmt: skip


class Sent(Callback):
    """Note what has been sent when the fit ends, and which master weights are here."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        transport = trainer.strategy._training.transport  # type: ignore[attr-defined]
        self.found["messages"] = dict(transport.messages)
        plugin = trainer.precision_plugin
        if not isinstance(plugin, SparseStatePrecision):
            return
        each = [s.master for s in plugin._states]
        here = [p for p in each if p.untyped_storage().nbytes() >= p.numel() * 4]
        self.found["trained"] = sum(p.numel() for p in each)
        self.found["masters"] = sum(p.numel() for p in here)
        exchange = trainer.strategy._training._session.engine._exchange  # type: ignore[attr-defined]
        layouts = {Payload.P: exchange._parameter_layouts, Payload.S: exchange._sum_layouts}
        self.found["elements"] = {
            payload: [sum(spec.size.numel() for spec in layout.specs) for layout in stages]
            for payload, stages in layouts.items()
        }


def fit(
    net: str, optimizer: str, strategy: dict[str, Any], compute: str, flags: dict[str, Any]
) -> dict[str, Any]:
    module = Classifier(net, optimizer)
    plugin = SparseStatePrecision(random_masks(module), compute=compute)  # type: ignore[arg-type]
    watch = Sent()
    run = make_trainer(strategy, max_epochs=1, plugins=[plugin], callbacks=[watch], **flags)
    run.fit(module, train_data(module, NUM_STEPS))
    return {
        "weights": weights_of(module),
        "stage_of": dict(run.strategy.stage_of),  # type: ignore[attr-defined]
        "plan": run.strategy.plan,  # type: ignore[attr-defined]
    } | watch.found


class MaskedMasters:
    """Update float32 master weights by gradients that are multiplied by masks.

    Args:
        module: whose weights get what the masters are, rounded.
        masks: name -> mask.
        dtype: of the weights.
        clip: largest norm of all gradients together.
    """

    def __init__(
        self, module: Any, masks: Masks, dtype: torch.dtype, clip: float | None = None
    ) -> None:
        self._weights = dict(module.named_parameters())
        self._masks, self._clip = masks, clip
        self._masters = {
            n: nn.Parameter(p.detach().float().clone()) for n, p in self._weights.items()
        }
        module.to(dtype)
        for p in self._weights.values():
            p.grad_dtype = None  # masters are given sums as they are
        module.parameters = lambda *_: iter(self._masters.values())  # type: ignore[method-assign]
        made = module.configure_optimizers()
        del module.parameters  # type: ignore[method-assign]
        schedulers: list[Any] = []
        if isinstance(made, dict):
            made, schedulers = made["optimizer"], [made["lr_scheduler"]]
        elif isinstance(made, tuple):
            (made,), schedulers = made
        self._optimizer, self._schedulers = made, [x["scheduler"] for x in schedulers]
        self._write()

    def step(self) -> None:
        for n, p in self._weights.items():
            grad = None if p.grad is None else p.grad.float() * self._masks.get(n, 1)
            self._masters[n].grad = grad
        if self._clip:  # by norms in the order of the optimizer
            name_of = {p: n for n, p in self._masters.items()}
            each = [p for group in self._optimizer.param_groups for p in group["params"]]
            grads = {name_of[p]: p.grad for p in each if p.grad is not None}
            kept = [g[self._masks[n]] if n in self._masks else g for n, g in grads.items()]
            total = torch.nn.utils.get_total_norm(kept)
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._clip, total)
        self._optimizer.step()
        self._write()

    def zero_grad(self) -> None:
        for p in self._weights.values():
            p.grad = None

    def schedule(self) -> None:
        for scheduler in self._schedulers:
            scheduler.step()

    @torch.no_grad()
    def _write(self) -> None:
        for n, master in self._masters.items():
            master.mul_(self._masks.get(n, 1))
            self._weights[n].copy_(master)


def by_rule(
    net: str, optimizer: str, strategy: dict[str, Any], compute: str, plan: Plan,
    stage_of: dict[str, int], clip: float | None,
) -> dict[str, Tensor]:  # fmt: skip
    num_workers = plan.num_microbatches
    module = Classifier(net, optimizer)
    dtype = DTYPES[compute]
    masters: Any = MaskedMasters(module, random_masks(module), dtype, clip)
    data = MicroBatches(module.kind, NUM_STEPS * num_workers)

    def loss(module: nn.Module, t: int, i: int) -> Tensor:
        x, y = data[t * num_workers + i]
        return module.loss((x.to(dtype) if x.is_floating_point() else x, y), t)  # type: ignore[operator]

    sequential.train(
        module, by_stage(module, stage_of), masters, loss, rule=RULES[strategy["preset"]],
        num_workers=num_workers, num_steps=NUM_STEPS, slack=strategy.get("slack", 0),
        after_update=lambda t: masters.schedule(), wire=wire_of(plan),
    )  # fmt: skip
    return weights_of(module)


CASES: list[Any] = [
    ("mlp", "adamw", {"preset": "cyclic_dp", "stages": 3}, "bf16-true", 2, {}),



    ("gpt2", "adamw", {"preset": "cyclic_zero", "stages": 2}, "bf16-true", 2, {}),



    (
        "mlp", "adamw", {"preset": "cyclic_dp_v1", "stages": 3}, "bf16-true", 2,
        {"gradient_clip_val": 0.1},
    ),
    (
        "mlp", "sgd", {"preset": "lockstep_dp", "stages": 3}, "16-true", 2,
        {"gradient_clip_val": 0.1},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("net", "optimizer", "strategy", "compute", "num_workers", "flags"),
    CASES,
    ids=lambda x: x["preset"] if isinstance(x, dict) and "preset" in x else None,
)
def test_bits_are_those_of_dense_masked_training(
    net: str, optimizer: str, strategy: dict[str, Any], compute: str, num_workers: int,
    flags: dict[str, Any],
) -> None:  # fmt: skip
    ranks = processes.run(fit, num_workers, net, optimizer, strategy, compute, flags)
    (expected,) = processes.run(
        by_rule, 1, net, optimizer, strategy, compute, ranks[0]["plan"], ranks[0]["stage_of"],
        flags.get("gradient_clip_val"),
    )  # fmt: skip
    for rank in ranks:
        assert_same(rank["weights"], expected)


# ---------------------------------------------------------------------- what is kept, and travels


def test_messages_and_masters_are_those_of_what_is_kept() -> None:
    strategy = {"preset": "cyclic_dp", "stages": 2}
    ranks = processes.run(fit, 2, "mlp", "adamw", strategy, "bf16-true", {})
    dense = processes.run(fit_dense, 2, "mlp", strategy)
    assert {r["trained"] for r in ranks} == {sum(r["masters"] for r in ranks)}
    module = Classifier("mlp")
    kept = {n: p.numel() for n, p in module.named_parameters()}
    kept |= {n: int(mask.sum()) for n, mask in random_masks(module).items()}
    num = [0, 0]
    for name, j in ranks[0]["stage_of"].items():
        num[j] += kept[name]
    for rank, other in zip(ranks, dense, strict=True):
        assert rank["elements"] == {Payload.P: num, Payload.S: num}
        assert rank["messages"] == other["messages"]


def fit_dense(net: str, strategy: dict[str, Any]) -> dict[str, Any]:
    module, watch = Classifier(net, "adamw"), Sent()
    run = make_trainer(strategy, max_epochs=1, precision="bf16-true", callbacks=[watch])
    run.fit(module, train_data(module, NUM_STEPS))
    return watch.found


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


def fit_watched(strategy: dict[str, Any], sparse: bool) -> tuple[list[int], list[int]]:
    rows: Any = [torch.ones(SIDE) for _ in range(48)]
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
    ("preset", "num_versions"), [("1f1b", [1, 1]),
                                 ("cyclic_pipeline", [1, 2])]
)  # fmt: skip
def test_one_gradient_at_most_is_dense(preset: str, num_versions: list[int]) -> None:
    strategy = {"preset": preset, "stages": 2, "verify": False}
    for rank, (during, _) in enumerate(processes.run(fit_watched, 2, strategy, True)):
        assert set(during) == {4 * num_versions[rank] + 1}  # layers of a stage, and a gradient
    for during, behind in processes.run(fit_watched, 2, strategy, False):
        assert max(during) > 1 + max(behind)  # dense training is told from it


# ---------------------------------------------------------------------- freezing


class Unfreeze(Callback):
    """Let a layer be trained from the fourth batch of two workers on."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 4:
            pl_module.net[0].weight.requires_grad_()


def fit_frozen(strategy: Any, flags: dict[str, Any]) -> dict[str, Tensor]:
    module = Classifier("mlp", "adamw")
    module.net[0].weight.requires_grad_(False)
    plugin = SparseStatePrecision(random_masks(module))
    run = make_trainer(strategy, max_epochs=1, plugins=[plugin], callbacks=[Unfreeze()], **flags)
    run.fit(module, train_data(module, 16 // processes.here().num_ranks))
    return weights_of(module)


def test_a_layer_that_is_unfrozen_later_has_the_bits_of_one_device() -> None:
    strategy = {"preset": "lockstep_dp", "reduce_dtype": "bf16"}  # as one device adds
    ranks = processes.run(fit_frozen, 2, strategy, {})
    (expected,) = processes.run(fit_frozen, 1, "auto", {"accumulate_grad_batches": 2})
    module, name = Classifier("mlp"), "net.0.weight"
    begin = module.get_parameter(name).detach() * random_masks(module)[name]
    assert not torch.equal(expected[name], begin.bfloat16())  # it was trained
    for rank in ranks:
        assert_same(rank, expected)


# ---------------------------------------------------------------------- checkpoints


def fit_through(folder: str, strategy: dict[str, Any], resumed: str | None) -> dict[str, Any]:
    module = Classifier("batchnorm_mlp", "adamw")
    saving = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    masks = None if resumed else random_masks(module)
    plugin = SparseStatePrecision(masks)
    flags = {"enable_checkpointing": True, "callbacks": [saving], "plugins": [plugin]}
    run = make_trainer(strategy, max_epochs=1, **flags)
    run.fit(module, train_data(module, NUM_STEPS), ckpt_path=resumed)
    return {"weights": weights_of(module), "masks": plugin.masks}


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    strategy = {"preset": "cyclic_zero", "stages": 2}
    whole = processes.run(fit_through, 2, str(tmp_path / "a"), strategy, None)
    resumed = processes.run(
        fit_through, 2, str(tmp_path / "b"), strategy, str(tmp_path / "a" / "step=3.ckpt")
    )
    for rank in resumed:
        assert_same(rank["weights"], whole[0]["weights"])
        assert_same(rank["masks"], whole[0]["masks"])


def test_checkpoints_go_to_one_device_and_to_plain_lightning(tmp_path: Path) -> None:
    strategy = {"preset": "cyclic_dp_v1", "stages": 2}
    ranks = processes.run(fit_through, 2, str(tmp_path), strategy, None)
    path = tmp_path / "step=6.ckpt"
    saved = torch.load(path, weights_only=True)
    masks = ranks[0]["masks"]
    masters = saved["SparseStatePrecision"]["masters"]
    assert masters.keys() == dict(Classifier("batchnorm_mlp").named_parameters()).keys()
    for name, mask in masks.items():
        assert not saved["state_dict"][name][~mask].any()
        assert torch.equal(masters[name].bfloat16(), saved["state_dict"][name][mask])
    states = saved["optimizer_states"][0]["state"]
    shapes = [tuple(p.shape) for p in Classifier("batchnorm_mlp").parameters()]
    assert [tuple(states[k]["exp_avg"].shape) for k in range(len(shapes))] == shapes
    (plain,) = processes.run(go_on, 1, str(path), "bf16-true")
    (sparse,) = processes.run(go_on, 1, str(path), None)
    assert plain == sparse == 8


def go_on(path: str, precision: str | None) -> int:
    module = Classifier("batchnorm_mlp", "adamw")
    given: dict[str, Any] = {"precision": precision}
    if precision is None:
        given = {"plugins": [SparseStatePrecision()]}
    run = make_trainer("auto", max_steps=8, max_epochs=-1, **given)
    run.fit(module, train_data(module, NUM_STEPS), ckpt_path=path)
    return run.global_step


# ---------------------------------------------------------------------- refusals


def fit_with_own_masks() -> None:
    module = Classifier()
    masks = random_masks(module, kept=0.3 + 0.1 * processes.here().rank)
    run = make_trainer("cyclic_dp", max_epochs=1, plugins=[SparseStatePrecision(masks)])
    run.fit(module, train_data(module, 2))


def test_ranks_with_other_masks_are_refused() -> None:
    with pytest.raises(processes.RanksFailedError, match="ranks differ in masks: .*net"):
        processes.run(fit_with_own_masks, 2)


def fit_refused(strategy: dict[str, Any]) -> None:
    module = Classifier()
    run = make_trainer(strategy, max_epochs=1, plugins=[SparseStatePrecision(sparsity=0.5)])
    run.fit(module, train_data(module, 2))


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        ({"preset": "spectrain"}, "preset='spectrain', which predicts weights"),
        ({"save_distributed_checkpoint": True}, "save_distributed_checkpoint=True"),
        ({"error_feedback": True, "preset": "cyclic_pipeline"}, "error_feedback=True"),
    ],
)
def test_what_needs_dense_states_is_refused_by_name(strategy: dict[str, Any], what: str) -> None:
    with pytest.raises(processes.RanksFailedError, match=f"SparseStatePrecision.*{what}"):
        processes.run(fit_refused, 2, strategy)


# ---------------------------------------------------------------------- stages apart

STAGED = {
    "gpipe": "sync", "1f1b": "sync", "pipedream_2bw": "delayed", "cyclic_pipeline": "freshest",
    "pipedream": "stashed", "cyclic_mp": "freshest",
}  # fmt: skip


JOB = Job(case="resnet", num_steps=16, num_epochs=1)


def masks_of(job: Job, dense: str) -> Masks:
    """Return masks of all matrices but one, which is called so."""
    return {n: mask for n, mask in random_masks(job.make()).items() if n != dense}


def fit_staged(
    job: Job, strategy: dict[str, Any], compute: str, clip: float | None, dense: str = ""
) -> dict[str, Any]:
    masks = masks_of(job, dense)
    plugin = SparseStatePrecision(masks, compute=compute)  # type: ignore[arg-type]
    run = prepare(job, strategy, plugins=[plugin], gradient_clip_val=clip)
    run.trainer.fit(run.module, run.batches)
    strategy_: Any = run.trainer.strategy
    return run.outcome() | {
        "stage_of": strategy_.stage_of,
        "plan": strategy_.plan,
        "tied": strategy_._training._session.cuts.tied,
    }


def staged_by_rule(
    job: Job, compute: str, plan: Plan, stage_of: dict[str, int], clip: float | None,
    replicas: int, dense: str = "",
) -> dict[str, Tensor]:  # fmt: skip
    module, dtype = job.make(), DTYPES[compute]
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    masters: Any = MaskedMasters(module, masks_of(job, dense), dtype, clip)
    convert = HalfPrecision(compute) if dtype != torch.float32 else Precision()

    def loss(module: Any, t: int, i: int) -> Tensor:
        batch = convert.convert_input(job.batch(t * job.num_microbatches + i))
        with convert.train_step_context():
            output = module.training_step(batch, 0)
        return output["loss"] if isinstance(output, dict) else output

    stages, after = by_stage(module, stage_of), lambda t: masters.schedule()
    rule, wire = STAGED[plan.preset], wire_of(plan)
    if rule == "sync":
        sequential.train(
            module, stages, masters, loss, rule=rule, num_workers=job.num_microbatches,
            num_steps=job.num_steps, after_update=after, wire=wire,
        )  # fmt: skip
    else:
        asynchronous.train(
            module, stages, masters, loss, rule=rule, num_microbatches=job.num_microbatches,
            num_steps=job.num_steps, after_update=after, replicas=replicas, wire=wire,
        )  # fmt: skip
    return weights_of(module)


@pytest.mark.parametrize(
    ("preset", "num_ranks", "compute", "clip", "more"),
    [
        ("1f1b", 4, "bf16-true", 0.1, {"replicas": 2, "stages": 2}),
        ("pipedream_2bw", 2, "bf16-true", None, {}),
        ("cyclic_pipeline", 2, "bf16-true", None, {}),
        ("cyclic_mp", 2, "bf16-true", None, {"stages": 2}),
    ],
)
def test_stages_apart_have_the_bits_of_dense_masked_training(
    preset: str, num_ranks: int, compute: str, clip: float | None, more: dict[str, Any]
) -> None:
    job = replace(JOB, num_microbatches=1) if preset == "pipedream" else JOB
    strategy = {"preset": preset, "stages": 4} | more
    ranks = pipelines(job, num_ranks, compute, clip, function=fit_staged, **strategy)
    args = job, compute, ranks[0]["plan"], ranks[0]["stage_of"], clip, more.get("replicas", 1)
    (expected,) = processes.run(staged_by_rule, 1, *args)
    for rank in ranks:
        assert_same(rank["weights"], expected)
