"""SparseStatePrecision: the bits of dense training with masks, and the bytes of the paper."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn

from lightning_cyclic import ConfigurationError, GradientNorms, SparseStatePrecision
from tests.references import pruned as t

pytestmark = t.PLAIN_LIGHTNING
STEPS = 30


def fit(module: LightningModule, plugin: Any, given: list[Tensor], **flags: Any) -> Any:
    trainer = t.trainer(plugin, **flags)
    trainer.fit(module, t.loader(given))
    return trainer


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def masters(plugin: SparseStatePrecision) -> dict[str, Tensor]:
    return {s.name: s.layout.expand(s.master.detach().clone()) for s in plugin._trained}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [n for n, x in found.items() if x.dtype != wanted[n].dtype] == []
    assert [n for n, x in found.items() if not torch.equal(x, wanted[n])] == []


# ---------------------------------------------------------------------- bits


@pytest.mark.parametrize("compute", t.DTYPES)
@pytest.mark.parametrize("make", [t.adamw, t.momentum])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_bits_are_those_of_masked_dense_training(
    compute: Any, make: t.Make, clip: float | None
) -> None:
    module, given = t.Regression(t.mlp(), make), t.batches(STEPS)
    masks = t.random_masks(module)
    wanted, wanted_masters = t.dense_run(module, masks, t.DTYPES[compute], given, clip=clip)
    plugin = SparseStatePrecision(mask=masks, compute=compute)
    before = dict(module.named_parameters())
    fit(module, plugin, given, gradient_clip_val=clip)
    assert_same(weights(module), wanted)
    if compute != "32-true":
        assert_same(masters(plugin), wanted_masters)
    assert all(p is before[n] for n, p in module.named_parameters())  # identity and names
    assert all(bool((wanted[n][~mask] == 0).all()) for n, mask in masks.items())
    assert_same(plugin.masks, masks)


@pytest.mark.parametrize("make_net", [t.with_norms, t.tied])
def test_norms_and_tied_weights(make_net: Callable[[], nn.Module]) -> None:
    module, given = t.Regression(make_net(), schedule=True), t.batches(STEPS)
    masks = t.random_masks(module)
    copied = copy.deepcopy(module)
    wanted, _ = t.dense_run(copied, masks, torch.bfloat16, given)
    fit(module, SparseStatePrecision(mask=masks), given)
    assert_same(weights(module), wanted)


def test_gradients_of_several_batches_are_added() -> None:
    module, given = t.Regression(t.mlp(), schedule=True), t.batches(STEPS)
    masks = t.random_masks(module)
    wanted, _ = t.dense_run(module, masks, torch.bfloat16, given, clip=0.05, accumulate=2)
    fit(
        module,
        SparseStatePrecision(mask=masks),
        given,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
    )
    assert_same(weights(module), wanted)


def test_clipping_by_value_sees_compressed_gradients() -> None:
    seen: list[float] = []

    def look(optimizer: Any, *_: Any) -> None:
        grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
        seen.append(max(float(grad.abs().max()) for grad in grads))

    def make(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(look)
        return optimizer

    module = t.Regression(t.mlp(), make)
    flags = {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}
    fit(module, SparseStatePrecision(sparsity=0.5), t.batches(3), **flags)
    assert seen == [pytest.approx(1e-4)] * 3


def test_norms_of_gradients_are_those_of_kept_elements() -> None:
    module, given = t.Regression(t.mlp()), t.batches(2)
    masks = t.random_masks(module)
    copied = copy.deepcopy(module).bfloat16()
    norms = GradientNorms(1, per_parameter=True)
    fit(module, SparseStatePrecision(mask=masks), given[:1], callbacks=[norms])
    with torch.no_grad():
        for name, mask in masks.items():
            copied.get_parameter(name).mul_(mask)
    t.loss_of(copied.net, given[0].bfloat16()).backward()
    grads = {n: p.grad.float() for n, p in copied.named_parameters() if p.grad is not None}
    wanted = {n: float((g[masks[n]] if n in masks else g).norm()) for n, g in grads.items()}
    assert norms.each[0] == wanted
    assert norms.totals[0] == float(torch.tensor(list(wanted.values())).norm())


OPTIMIZERS: dict[str, t.Make] = {
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.001, centered=True),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_other_optimizers(make: t.Make) -> None:
    module, given = t.Regression(t.mlp(), make), t.batches(8)
    masks = t.random_masks(module)
    wanted, _ = t.dense_run(module, masks, torch.bfloat16, given)
    fit(module, SparseStatePrecision(mask=masks), given)
    assert_same(weights(module), wanted)


def test_groups_and_their_values_are_kept() -> None:
    def make(parameters: Any) -> Any:
        one, *others = parameters
        return torch.optim.SGD([{"params": [one], "lr": 0.0}, {"params": others}], lr=0.1)

    module = t.Regression(t.mlp(), make)
    first = module.net[0].weight
    masks = t.random_masks(module)
    trainer = fit(module, SparseStatePrecision(mask=masks), t.batches(3))
    (optimizer,) = trainer.optimizers
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 5]
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.1]
    start = t.mlp()[0].weight * masks["net.0.weight"]
    assert torch.equal(first, start.bfloat16())


# ---------------------------------------------------------------------- bytes

SIDE = 64
SMALLEST = 512  # bytes; counts of steps, losses, and batches of one are smaller


def square() -> nn.Module:
    return nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)])


class Measure(Callback):
    """Notes bytes at the optimizer's step, and the peak of each backward."""

    def __init__(self, live: t.LiveStorages) -> None:
        self.live = live
        self.at_step: list[int] = []
        self.between: list[int] = []
        self.peaks: list[int] = []
        self.num_kept = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.num_kept = sum(int(m.sum()) for m in trainer.precision_plugin.masks.values())
        (optimizer,) = trainer.optimizers
        optimizer.register_step_post_hook(lambda *_: self.at_step.append(self.live.num_bytes))

    def on_before_backward(self, *args: Any) -> None:
        self.live.peak = 0

    def on_after_backward(self, *args: Any) -> None:
        self.peaks.append(self.live.peak)

    def on_train_batch_end(self, *args: Any) -> None:
        self.between.append(self.live.num_bytes)


def measured(compute: Any, make: t.Make, sparsity: float, net: Callable[[], nn.Module]) -> Measure:
    given = [torch.ones(1, SIDE) for _ in range(3)]
    with t.LiveStorages(SMALLEST) as live:
        module = t.Regression(net(), make)
        measure = Measure(live)
        fit(
            module,
            SparseStatePrecision(sparsity=sparsity, compute=compute),
            given,
            callbacks=[measure],
        )
    return measure


@pytest.mark.parametrize(
    ("compute", "make", "kept", "dense", "scaled", "between"),
    [
        ("bf16-true", t.adamw, 0.1, 2, 22, 16),
        ("bf16-true", t.adamw, 0.5, 2, 22, 16),
        ("16-true", t.adamw, 0.25, 2, 22, 16),
        ("bf16-true", t.momentum, 0.1, 2, 18, 12),
        ("32-true", t.adamw, 0.1, 4, 20, 12),
        ("32-true", t.momentum, 0.5, 4, 16, 8),
    ],
)
def test_bytes_of_a_parameter(
    compute: Any, make: t.Make, kept: float, dense: int, scaled: int, between: int
) -> None:
    torch.manual_seed(0)
    total = 4 * SIDE * SIDE
    num_kept = total - round((1 - kept) * total)
    found = measured(compute, make, 1 - kept, square)
    assert found.at_step[-1] == dense * total + scaled * num_kept
    assert found.between[-1] == dense * total + between * num_kept  # no gradients


@pytest.mark.parametrize("compute", t.DTYPES)
def test_peak_of_backward(compute: Any) -> None:
    torch.manual_seed(0)
    found = measured(compute, t.adamw, 0.9, square)
    size = t.DTYPES[compute].itemsize
    largest, gradients = SIDE * SIDE * size, found.num_kept * size
    assert max(found.peaks[1:]) <= found.between[-1] + gradients + largest
    assert max(found.peaks[1:]) <= found.at_step[-1] + largest
    assert max(found.peaks[1:]) > found.between[-1]  # it was looked at


def test_three_quarters_are_saved_at_90_percent() -> None:
    def net() -> nn.Module:
        layers = [[nn.LayerNorm(SIDE), nn.Linear(SIDE, SIDE)] for _ in range(6)]
        return nn.Sequential(*[layer for pair in layers for layer in pair])

    torch.manual_seed(0)
    with t.LiveStorages() as live:
        module, measure = t.Regression(net()), Measure(live)
        fit(
            module,
            SparseStatePrecision(sparsity=0.9),
            [torch.ones(1, SIDE)] * 3,
            callbacks=[measure],
        )
    numel = sum(p.numel() for p in module.parameters())
    assert measure.at_step[-1] <= 0.26 * 20 * numel


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("compute", t.DTYPES)
def test_resumed_run_has_the_bits_of_the_whole(compute: Any, tmp_path: Path) -> None:
    def run(**flags: Any) -> tuple[Any, Any, Any]:
        ckpt = flags.pop("ckpt_path", None)
        module = t.Regression(t.mlp(), schedule=True)
        plugin = SparseStatePrecision(sparsity=0.7, compute=compute)
        trainer = t.trainer(plugin, **flags)
        trainer.fit(module, t.loader(t.batches(10)), ckpt_path=ckpt)
        return module, plugin, trainer

    whole, plugin, _ = run(max_epochs=2)
    _, half, trainer = run(max_epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again, other, _ = run(max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    assert_same(weights(again), weights(whole))
    assert_same(other.masks, half.masks)
    if compute != "32-true":
        assert_same(masters(other), masters(plugin))


def test_masks_come_from_the_checkpoint(tmp_path: Path) -> None:
    """Others would be drawn: an element that is kept has become zero."""
    module, plugin = t.Regression(t.mlp()), SparseStatePrecision(sparsity=0.7)
    trainer = fit(module, plugin, t.batches(2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    saved["state_dict"]["net.0.weight"].zero_()
    torch.save(saved, tmp_path / "a.ckpt")
    again = SparseStatePrecision(sparsity=0.7)
    trainer = t.trainer(again, max_epochs=2)
    trainer.fit(t.Regression(t.mlp()), t.loader(t.batches(2)), ckpt_path=tmp_path / "a.ckpt")
    assert_same(again.masks, plugin.masks)


def test_plain_lightning_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    module, plugin, given = t.Regression(t.mlp()), SparseStatePrecision(sparsity=0.7), t.batches(6)
    trainer = fit(module, plugin, given)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    dense = t.Regression(t.mlp())
    other = t.trainer(None, max_epochs=1)
    other.fit(dense, t.loader(given), ckpt_path=tmp_path / "a.ckpt")  # ends at once
    assert_same(weights(dense), {n: p.float() for n, p in weights(module).items()})
    (optimizer,) = other.optimizers
    for p, state in zip(dense.parameters(), plugin._trained, strict=True):
        own = trainer.optimizers[0].state[state.master]["exp_avg"]
        assert torch.equal(optimizer.state[p]["exp_avg"], state.layout.expand(own))
    longer = t.trainer(None, max_epochs=2)
    longer.fit(dense, t.loader(given), ckpt_path=tmp_path / "a.ckpt")
    assert longer.global_step == 12


def test_going_on_from_a_checkpoint_of_plain_lightning(tmp_path: Path) -> None:
    given = t.batches(6)
    dense = t.Regression(t.mlp())
    plain = fit(dense, None, given)
    plain.save_checkpoint(tmp_path / "a.ckpt")
    masks = t.random_masks(dense)
    module, plugin = t.Regression(t.mlp()), SparseStatePrecision(mask=masks)
    trainer = t.trainer(plugin, max_epochs=1)
    trainer.fit(module, t.loader(given), ckpt_path=tmp_path / "a.ckpt")  # ends at once
    wanted = {n: p * masks.get(n, 1) for n, p in weights(dense).items()}
    assert_same(masters(plugin), wanted)  # to the bit, not rounded
    for p, state in zip(dense.parameters(), plugin._trained, strict=True):
        values = trainer.optimizers[0].state[state.master]["exp_avg_sq"]
        assert torch.equal(
            values, state.layout.compress(plain.optimizers[0].state[p]["exp_avg_sq"])
        )


def test_checkpoint_of_another_mask_is_refused(tmp_path: Path) -> None:
    module = t.Regression(t.mlp())
    trainer = fit(module, SparseStatePrecision(mask=t.random_masks(module)), t.batches(2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = SparseStatePrecision(mask=t.random_masks(module, kept=0.5))
    with pytest.raises(ConfigurationError, match=r"'net.0.weight' has another mask in the checkp"):
        t.trainer(other, max_epochs=2).fit(
            t.Regression(t.mlp()), t.loader(t.batches(2)), ckpt_path=tmp_path / "a.ckpt"
        )


def test_a_second_fit_begins_with_master_weights_of_the_first() -> None:
    begun: list[Any] = []

    class Look(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            begun.append((masters(plugin), plugin.masks))

    module, given = t.Regression(t.mlp(), t.momentum), t.batches(4)
    plugin = SparseStatePrecision(sparsity=0.5)
    fit(module, plugin, given)
    ended = masters(plugin), plugin.masks
    fit(module, plugin, given, callbacks=[Look()])
    assert_same(begun[0][0], ended[0])
    assert_same(begun[0][1], ended[1])
    assert any(not torch.equal(x, ended[0][n]) for n, x in masters(plugin).items())


# ---------------------------------------------------------------------- other code


def test_what_hooks_write_into_weights_counts() -> None:
    class Clamp(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            with torch.no_grad():
                for p in pl_module.parameters():
                    p.clamp_(-0.0625, 0.0625)

    module = t.Regression(t.mlp(), t.momentum)
    masks = t.random_masks(module)
    plugin = SparseStatePrecision(mask=masks)
    fit(module, plugin, t.batches(6), callbacks=[Clamp()])
    assert all(float(p.detach().abs().max()) <= 0.0625 for p in module.parameters())
    assert all(float(x.abs().max()) < 0.2 for x in masters(plugin).values())


def test_gradients_that_are_zeroed_are_gone() -> None:
    class EverySecond(t.Regression):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()  # whose gradients the next one drops

    module, given = EverySecond(t.mlp()), t.batches(8)
    masks = t.random_masks(module)
    wanted, _ = t.dense_run(module, masks, torch.bfloat16, given[1::2])
    fit(module, SparseStatePrecision(mask=masks), given)
    assert_same(weights(module), wanted)


def test_sparse_gradients() -> None:
    class Tokens(t.Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(torch.arange(8)).float().square().mean()

    module = Tokens(nn.Embedding(50, 6, sparse=True), t.momentum)
    masks = t.random_masks(module, kept=0.5)
    before = module.net.weight.detach() * masks["net.weight"]
    fit(module, SparseStatePrecision(mask=masks), t.batches(3))
    moved = module.net.weight.float() != before.bfloat16().float()
    assert bool(moved[:8][masks["net.weight"][:8]].all())
    assert not bool(moved[~masks["net.weight"]].any())


def test_gradients_are_plain_behind_the_fit() -> None:
    module = t.Regression(t.mlp())
    fit(module, SparseStatePrecision(sparsity=0.5), t.batches(2))
    t.loss_of(module.net, t.batches(1)[0].bfloat16()).backward()
    assert all(p.grad is not None for p in module.parameters())


def test_evaluation_prunes_nothing() -> None:
    class Evaluated(t.Regression):
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            assert batch.dtype == torch.bfloat16
            assert bool((self.net[0].weight != 0).all())

    plugin = SparseStatePrecision(sparsity=0.5)
    t.trainer(plugin).test(Evaluated(t.mlp()), t.loader(t.batches(2)), verbose=False)
    assert plugin.masks == {}


def test_masks_of_a_file(tmp_path: Path) -> None:
    module, given = t.Regression(t.mlp()), t.batches(4)
    masks = t.random_masks(module)
    fit(module, SparseStatePrecision(mask=masks), given)
    torch.save(masks, tmp_path / "ticket.pt")
    other = t.Regression(t.mlp())
    fit(other, SparseStatePrecision(mask=tmp_path / "ticket.pt"), given)
    assert_same(weights(other), weights(module))


def test_masks_of_model_pruning() -> None:
    module, given = t.Regression(t.mlp()), t.batches(4)
    layers = [(module.net[k], "weight") for k in (0, 2, 4)]
    callback = ModelPruning(
        "l1_unstructured",
        layers,
        amount=0.5,
        use_lottery_ticket_hypothesis=False,
        make_pruning_permanent=True,
    )
    fit(module, None, given, callbacks=[callback])
    masks = {f"net.{k}.weight": module.net[k].weight != 0 for k in (0, 2, 4)}
    plugin = SparseStatePrecision(sparsity=0.5)
    fit(module, plugin, given)
    assert_same(plugin.masks, masks)
