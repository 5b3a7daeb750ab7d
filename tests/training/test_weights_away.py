"""A limit that is less than one worker's weights: the same bits, with weights in a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cyclic.plan.actions import Payload
from tests.harness.rows import more
from tests.harness.runs import Result, run, saving, trained
from tests.harness.trainers import assert_same
from tests.modules.classifier import Classifier, micro_batches

NUM_BATCHES, NUM_EPOCHS = 3, 2
WIDTH = 96


def wide(num_layers: int = 6) -> nn.Module:
    """Return layers of which one takes little of what all take."""
    layers: list[nn.Module] = [nn.Linear(12, WIDTH)]
    for _ in range(num_layers):
        layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


class Wide(Classifier):
    """A classifier of such layers."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__("mlp", optimizer)
        self.net = self.new_net()

    def new_net(self) -> nn.Module:
        return wide()


def looked_at(trainer: Any, module: Any) -> dict[str, Any]:
    tiers = getattr(getattr(trainer.strategy, "plan", None), "tiers", None)
    state = trainer.optimizers[0].state
    return {
        "losses": module.losses,
        "state": {f"{n}.{k}": torch.as_tensor(x).clone() for n, p in module.named_parameters()
                  for k, x in state.get(p, {}).items()},
        "weights": 0 if tiers is None else sum(tiers.weights),
        "early": tiers is not None and tiers.early,
    }  # fmt: skip


def fit(
    strategy: Any, make: Callable[[], Any] = Wide, kind: str = "vectors", **flags: Any
) -> Result:
    (end,) = trained(
        make, strategy, 1, look=looked_at, data=partial(micro_batches, kind, NUM_BATCHES),
        valid=partial(micro_batches, kind, 1, 1), **({"max_epochs": NUM_EPOCHS} | flags),
    )  # fmt: skip
    return end


@cache
def least(make: Any = Wide, stages: Any = 6, kind: str = "vectors", **flags: Any) -> int:
    """Return the least limit with which a run begins, which it names where it is given less."""
    data = partial(micro_batches, kind, 2)
    (end,) = run(make, way(Path("/tmp"), 1, stages), 1, data=data, **flags)
    assert end.error == "PlanError", end.text
    assert "weights and optimizer state of one stage" in end.text
    return int(re.search(r"allowed: (\d+) or more", end.text)[1])  # type: ignore[index]


def way(folder: Path, limit: int, stages: Any = 6, preset: str = "cyclic_dp") -> dict[str, Any]:
    stages = stages if isinstance(stages, int) else list(stages)
    return {"preset": preset, "stages": stages, "disk": str(folder), "memory_limit_bytes": limit}


def assert_alike(one: Result, other: Result) -> None:
    assert_same(one.weights, other.weights)
    assert one.found["losses"] == other.found["losses"]
    assert one.metrics == other.metrics
    assert_same(one.found["state"], other.found["state"])


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("preset", "above"),
    [("cyclic_dp", 0), ("cyclic_dp", 100_000), more("lockstep_dp", 0)],
)
def test_weights_losses_metrics_and_state_are_those_of_a_run_in_memory(
    preset: str, above: int, tmp_path: Path
) -> None:
    apart = fit(way(tmp_path, least() + above, preset=preset))
    num_bytes = sum(p.numel() * 4 for p in Wide().parameters())
    assert apart.found["weights"] > 0
    assert (apart.found["weights"] > num_bytes * 0.9) == (above == 0)
    assert_alike(apart, fit("auto"))
    assert not list(tmp_path.iterdir())


class Recomputes(nn.Module):
    """A block that runs its forward again in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return found


@final
class Checkpointed(Wide):
    """Has checkpointed blocks."""

    def new_net(self) -> nn.Module:
        blocks = [Recomputes() for _ in range(5)]
        return nn.Sequential(nn.Linear(12, WIDTH), *blocks, nn.Linear(WIDTH, 3))


class Squeezes(nn.Linear):
    """A layer that changes its weights in its forward, in one of two ways."""

    def __init__(self, *, by_data: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.by_data = by_data

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.by_data:
            self.weight.data.clamp_(-0.05, 0.05)
        elif self.training:
            with torch.no_grad():
                self.weight.mul_(0.9)
        return super().forward(x)


@final
class Changes(Wide):
    """Changes weights in the forward."""

    def new_net(self) -> nn.Module:
        layers = [Squeezes(by_data=k % 2 == 0) for k in range(4)]
        return nn.Sequential(nn.Linear(12, WIDTH), *layers, nn.Linear(WIDTH, 3))


@final
class Adapted(Wide):
    """Trains small layers behind frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.net:
            layer.requires_grad_(isinstance(layer, nn.BatchNorm1d))


@final
class Penalised(Wide):
    """Asks for a gradient within its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).square().sum(), x, create_graph=True)
        return super().training_step(batch, batch_idx) + slope.square().mean()


@final
class Returns(Wide):
    """Uses its first layer once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, 12)
        self.out = nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.net[:-1](x)
        return nn.functional.cross_entropy(self.out(self.net[0](self.again(hidden))), y)


@pytest.mark.parametrize(
    ("make", "kind", "flags"),
    [
        (Checkpointed, "blocks", {}),
        (Changes, "vectors", {}),
        (Adapted, "vectors", {}),
        (Penalised, "vectors", {}),
        (Returns, "vectors", {}),
        (partial(Classifier, "gpt2", "adamw"), "tokens", {}),  # stages that share weights
        (partial(Classifier, "resnet", "adamw"), "images", {}),
        (Wide, "vectors", {"precision": "bf16-mixed"}),
        (Wide, "vectors", {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    ],
    ids=["checkpointed", "changes", "adapted", "penalised", "returns", "gpt2", "resnet", "bf16",
         "clipped"],
)  # fmt: skip
def test_modules_of_all_kinds(make: Any, kind: str, flags: dict[str, Any], tmp_path: Path) -> None:
    stages: Any = 4
    if kind == "blocks":
        kind, stages = "vectors", ("net.2", "net.3", "net.4")
    apart = fit(way(tmp_path, least(make, stages, kind, **flags), stages), make, kind, **flags)
    assert apart.found["weights"] > 0
    assert_alike(apart, fit("auto", make, kind, **flags))


class Looks(Callback):
    """Is told when a backward is over, so that no stage is updated before."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """Look at nothing."""


class Sums(Callback):
    """Notes what weights are between steps, and changes them."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.sums += [float(p.detach().double().sum()) for p in module.parameters()]
        for p in module.parameters():
            p.data.clamp_(-0.2, 0.2)
        module.net[1 if len(self.sums) % 2 else 2].weight.data = module.net[2].weight.data * 0.5


class Freezes(Callback):
    """Trains the first layer in the second of three epochs alone."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.net[0].requires_grad_(trainer.current_epoch == 1)


@pytest.mark.parametrize(("made", "is_early"), [(Looks, False), (Sums, True), (Freezes, True)])
def test_callbacks(made: Any, is_early: bool, tmp_path: Path) -> None:
    limit = least(callbacks=(Looks(),)) if made is Looks else least() + 10_000
    ways = way(tmp_path, limit), "auto"
    apart, whole = (fit(how, callbacks=[made()], max_epochs=3) for how in ways)
    assert_alike(apart, whole)
    assert apart.found["weights"] > 0
    assert apart.found["early"] == is_early


def test_a_checkpoint_is_that_of_a_run_in_memory_and_either_goes_on_from_it(
    tmp_path: Path,
) -> None:
    ends, files = {}, {}
    for name, how in (("whole", "auto"), ("apart", way(tmp_path, least()))):
        ends[name] = fit(how, **saving(tmp_path / name))
        files[name] = sorted((tmp_path / name).glob("*.ckpt"))[0]
    whole, apart = (torch.load(files[x], weights_only=False) for x in ("whole", "apart"))
    assert_same(apart["state_dict"], whole["state_dict"])
    held = [x for x in apart["state_dict"].values() if isinstance(x, Tensor)]
    assert {x.untyped_storage().nbytes() - x.numel() * x.element_size() for x in held} == {0}
    for how, name in (
        ("auto", "apart"),
        (way(tmp_path, least()), "whole"),
        (way(tmp_path, least()), "apart"),
    ):
        on = fit(how, ckpt_path=files[name], expects=["The checkpoint was written under"])
        assert_same(on.weights, ends["whole"].weights)
        assert_same(on.found["state"], ends["whole"].found["state"])


# ---------------------------------------------------------------------- never whole


@final
class Hollow(Wide):
    """Has layers that are made when they are needed."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = wide()

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Identity()


class Watches(Callback):
    """Notes which weights stay in memory, and how many bytes are there where the fit begins."""

    def __init__(self) -> None:
        self.stays: list[str] = []
        self.at_first = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        places = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in module.parameters()}
        self.at_first = sum(place.nbytes() for place in places.values())

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        tier = trainer.strategy._training._session.engine._tiers.of(Payload.P)
        named = module.named_parameters()
        self.stays = [n for n, p in named if tier is None or not tier.moves(p)]


def watched(trainer: Any, module: Any) -> dict[str, Any]:
    (watches,) = (c for c in trainer.callbacks if isinstance(c, Watches))
    return looked_at(trainer, module) | vars(watches)


def watch(make: Any, limit: int, folder: Path, kind: str = "vectors") -> Result:
    (end,) = trained(
        make, way(folder, limit), 1, look=watched, callbacks=[Watches()], max_epochs=NUM_EPOCHS,
        data=partial(micro_batches, kind, NUM_BATCHES), valid=partial(micro_batches, kind, 1, 1),
    )  # fmt: skip
    return end


def test_layers_on_the_meta_device_never_come_as_a_whole(tmp_path: Path) -> None:
    few, many = (watch(Hollow, least(Hollow) + above, tmp_path) for above in (0, 10**9))
    assert_alike(few, many)
    assert [end.found["weights"] > 0 for end in (few, many)] == [True, False]
    assert few.found["stays"] == []
    assert few.found["at_first"] < 1000  # one element of each


def test_a_run_with_such_layers_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    limit = least(Hollow)
    whole = fit(way(tmp_path, limit), Hollow, **saving(tmp_path))
    (file, *_) = sorted(tmp_path.glob("*.ckpt"))
    for above in (0, 10**9):
        on = fit(way(tmp_path, limit + above), Hollow, ckpt_path=file)
        assert_same(on.weights, whole.weights)
        assert_same(on.found["state"], whole.found["state"])
        assert (on.found["weights"] > 0) == (above == 0)


def test_what_several_modules_share_stays(tmp_path: Path) -> None:
    gpt2 = partial(Classifier, "gpt2", "adamw")
    tied = watch(gpt2, least(gpt2, 6, "tokens"), tmp_path, "tokens")
    assert "net.transformer.wte.weight" in tied.found["stays"]


# ---------------------------------------------------------------------- refused


class Keeps(Callback):
    """Keeps views of weights of the stage that is updated, and of all others."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, *_: Any) -> None:
        self.kept = [p.detach()[:1] for p in module.parameters()]


@final
class KeepsInForward(Wide):
    """Keeps a view of a weight that its forward uses."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def keep(layer: Any, *_: Any) -> None:
            self.kept = layer.weight.detach()

        with self.net[2].register_forward_hook(keep):
            return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("make", "flags"), [(Wide, {"callbacks": [Keeps()]}), (KeepsInForward, {})]
)
def test_who_keeps_weights_that_leave_is_refused(make: Any, flags: Any, tmp_path: Path) -> None:
    (end,) = run(
        make,
        way(tmp_path, least()),
        1,
        data=partial(micro_batches, "vectors", NUM_BATCHES),
        **flags,
    )
    assert end.error == "StepError", end.text
    assert "has kept tensors of" in end.text


def test_batches_that_are_added_up_need_all_weights_in_memory(tmp_path: Path) -> None:
    (end,) = run(
        Wide, way(tmp_path, least()), 1, data=partial(micro_batches, "vectors", NUM_BATCHES),
        accumulate_grad_batches=2,
    )  # fmt: skip
    assert end.error == "PlanError"
    assert "with optimizer state of one stage" in end.text
