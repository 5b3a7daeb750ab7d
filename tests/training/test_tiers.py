"""disk=...: the same bits, with optimizer state that is in memory only for its update."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.harness.rows import more
from tests.harness.runs import Result, run, saving, trained
from tests.harness.trainers import assert_same
from tests.modules.classifier import Classifier, micro_batches
from tests.modules.optimizers import LateState, Nested

pytestmark = pytest.mark.multi
NUM_BATCHES, NUM_EPOCHS = 4, 2
MODULE = ("batchnorm_mlp", "adamw")
MAKE = partial(Classifier, *MODULE)
OTHER_PLAN = ["The checkpoint was written under"]  # of one process, which trains plainly
AHEAD = 11_000  # bytes above the least limit, with which state comes and goes beside other work
WHOLE = 3036  # bytes of its weights, which a rank has at the beginning


class ByOptimizer(Classifier):
    """A classifier with an optimizer that tests choose."""

    def __init__(self, make: Any, **settings: Any) -> None:
        super().__init__("mlp")
        self._make, self._settings = make, settings

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters(), **self._settings)


def looked_at(trainer: Any, module: Classifier) -> dict[str, Any]:
    state = trainer.optimizers[0].state
    held = {n: state[p] for n, p in module.named_parameters() if p in state}
    tiers = getattr(getattr(trainer.strategy, "plan", None), "tiers", None)
    return {
        "losses": module.losses,
        "state": {
            f"{n}.{k}": torch.as_tensor(x).clone() for n in held for k, x in held[n].items()
        },
        "moved": 0 if tiers is None else sum(tiers.moved),
        "kept": 0 if tiers is None else sum(tiers.kept),
        "weights": 0 if tiers is None else sum(tiers.weights),
        "ahead": None if tiers is None else tiers.ahead,
        "early": None if tiers is None else tiers.early,
    }


def fit(
    strategy: Any, n: int, make: Any = MAKE, kind: str = "vectors", **flags: Any
) -> list[Result]:
    return trained(
        make, strategy, n, look=looked_at, data=partial(micro_batches, kind, NUM_BATCHES),
        valid=partial(micro_batches, kind, 1, 1), **({"max_epochs": NUM_EPOCHS} | flags),
    )  # fmt: skip


@cache
def least(
    preset: str, n: int, stages: int, make: Any = MAKE, kind: str = "vectors", **flags: Any
) -> int:
    """Return the least limit with which a run begins, which it names where it is given less."""
    few = WHOLE if preset == "cyclic_zero" else 1
    strategy = {"preset": preset, "stages": stages, "disk": "/tmp", "memory_limit_bytes": few}
    strategy |= {"clip_norm": "global"} if "gradient_clip_val" in flags else {}
    ends = run(make, strategy, n, data=partial(micro_batches, kind, 2), **flags)
    assert {end.error for end in ends} == {"PlanError"}, ends[0].text
    (named,) = {re.search(r"allowed: (\d+) or more", end.text)[1] for end in ends}  # type: ignore[index]
    return int(named)


def assert_alike(ones: list[Result], others: list[Result]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert_same(one.weights, other.weights)
        assert one.found["losses"] == other.found["losses"]
        assert one.metrics == other.metrics
        assert_same(one.found["state"], other.found["state"])


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("preset", "n", "stages", "above"),
    [
        ("cyclic_dp", 1, 4, 0),
        ("cyclic_dp", 1, 4, 2_500),  # room for some of it
        ("cyclic_dp", 1, 4, AHEAD),
        ("cyclic_dp_v1", 1, 4, AHEAD),  # which has old versions, also in one process
        ("lockstep_dp", 1, 3, 0),
        ("cyclic_dp", 2, 4, 0),
        ("cyclic_zero", 2, 4, 0),
        more("cyclic_dp_v1", 2, 4, 0),
        more("lockstep_dp", 2, 4, 0),
        more("cyclic_zero", 2, 4, 1_000),
        ("cyclic_dp", 4, 4, 0),
        more("cyclic_zero", 4, 4, 0),
        more("lockstep_dp", 4, 4, 0),
    ],
)
def test_weights_losses_metrics_and_state_are_those_of_a_run_in_memory(
    preset: str, n: int, stages: int, above: int, tmp_path: Path
) -> None:
    plan = {"preset": preset, "stages": stages}
    limit = least(preset, n, stages) + above
    whole = fit("ddp" if n == 1 and preset != "cyclic_dp_v1" else plan, n)
    apart = fit({**plan, "disk": str(tmp_path), "memory_limit_bytes": limit}, n)
    assert_alike(apart, whole)
    assert all(end.found["moved"] > 0 for end in apart)
    if n == 1:  # else some worker has room for some of its state
        assert apart[0].found["ahead"] == (above == AHEAD)
        assert apart[0].found["early"] == (preset != "cyclic_dp_v1")
    assert not list(tmp_path.iterdir())


def test_the_least_limit_fetches_nothing_ahead_and_four_times_as_much_would(
    tmp_path: Path,
) -> None:
    limit = least("cyclic_dp", 1, 4)
    ends = [
        fit({"stages": 4, "disk": str(tmp_path), "memory_limit_bytes": limit * k}, 1)[0].found
        for k in (1, 4)
    ]
    assert [end["ahead"] for end in ends] == [0, 1]
    assert [end["moved"] > 0 for end in ends] == [True, False]  # all state has room


class Looks(Callback):
    """Is told when a backward is over."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """Look at nothing."""


@final
class Warms(Classifier):
    """Has a learning rate that grows, set where Lightning says that it may be."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, *args: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (batch_idx + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, *args)


@final
class Schedules(Classifier):
    """Has a learning rate that falls in every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        falls = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": "step"}}


@pytest.mark.parametrize(
    ("make", "kind", "flags", "is_early"),
    [
        (partial(Schedules, "batchnorm_mlp"), "vectors", {}, True),
        (MAKE, "vectors", {"callbacks": [Looks()]}, False),  # it might read weights, or gradients
        (MAKE, "vectors", {"accumulate_grad_batches": 2}, False),
        (partial(Warms, *MODULE), "vectors", {}, False),
        (partial(Classifier, "gpt2", "adamw"), "tokens", {}, True),  # stages that share weights
    ],
)
def test_stages_are_updated_behind_their_backwards_where_nobody_can_tell(
    make: Any, kind: str, flags: dict[str, Any], is_early: bool, tmp_path: Path
) -> None:
    plan = {"preset": "cyclic_dp", "stages": 4}
    limit = {"disk": str(tmp_path), "memory_limit_bytes": 10**9}
    whole, apart = (fit(way, 1, make, kind, **flags) for way in ("ddp", {**plan, **limit}))
    assert apart[0].found["early"] == is_early
    assert_alike(apart, whole)


@final
class Sees(Classifier):
    """Sees the last weights of stage 1 where the backward of the first layer begins."""

    def __init__(self, net: str, optimizer: str, reads: bool = False) -> None:
        super().__init__(net, optimizer)
        self.reads = reads

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.held = self.net[4].bias.detach()  # in the step it would be its first use
        self.before = self.held.clone()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def look(_: Tensor) -> None:
            last = self.net[4].bias if self.reads else self.held
            self.seen = not torch.equal(self.before, last)

        def hook(module: Any, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(look)

        with self.net[0].register_forward_hook(hook):
            return super().training_step(batch, batch_idx)


def seen(trainer: Any, module: Sees) -> bool:
    return module.seen


@pytest.mark.parametrize("is_early", [True, False])
def test_an_update_is_over_before_the_next_backward(is_early: bool, tmp_path: Path) -> None:
    limit = {"disk": str(tmp_path), "memory_limit_bytes": 10**9}
    (end,) = trained(
        partial(Sees, *MODULE), {"preset": "lockstep_dp", "stages": 4, **limit}, 1,
        look=seen,
        callbacks=[] if is_early else [Looks()], data=partial(micro_batches, "vectors", 2),
    )  # fmt: skip
    assert end.found == is_early


def test_weights_that_a_backward_has_updated_are_not_read_in_it(tmp_path: Path) -> None:
    plan = {"preset": "lockstep_dp", "stages": 4, "disk": str(tmp_path)}
    data = partial(micro_batches, "vectors", 2)
    make = partial(Sees, *MODULE, reads=True)
    limit = {"memory_limit_bytes": 10**9}
    (early,) = run(make, plan | limit, 1, data=data)
    assert early.error == "StepError"
    assert "reads 'net.4.bias' in the backward" in early.text
    (late,) = run(make, plan | limit, 1, look=seen, data=data, callbacks=[Looks()])
    assert late.found is False, late.text


def test_they_need_less_room_then_where_gradients_weigh_more_than_activations() -> None:
    mlp = "cyclic_dp", 1, 4, partial(Classifier, "mlp", "adamw")
    assert least(*mlp, "vector") < least(*mlp, "vector", callbacks=(Looks(),))
    # what early stages have left is there when the last one's state comes
    assert least("cyclic_dp", 1, 4) > least("cyclic_dp", 1, 4, callbacks=(Looks(),))


@pytest.mark.parametrize("preset", ["cyclic_dp", "lockstep_dp"])
@pytest.mark.parametrize("flags", [{"gradient_clip_val": 0.05}, {"precision": "bf16-mixed"}])
def test_one_process_clips_by_the_norm_over_all_stages_and_may_compute_in_bfloat16(
    preset: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    clip = {"clip_norm": "global"} if "gradient_clip_val" in flags else {}
    strategy = {"preset": preset, "stages": 4, "disk": str(tmp_path), **clip}
    limit = least(preset, 1, 4, **flags)
    assert_alike(
        fit({**strategy, "memory_limit_bytes": limit}, 1, **flags), fit("ddp", 1, **flags)
    )


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    ],
)
def test_any_optimizer_that_makes_its_state_of_shapes(
    optimizer: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    make = partial(ByOptimizer, optimizer, **settings)
    limit = least("cyclic_dp", 1, 5, make)
    tight = {"stages": 5, "disk": str(tmp_path), "memory_limit_bytes": limit}
    apart, whole = fit(tight, 1, make), fit("ddp", 1, make)
    assert apart[0].found["moved"] > 0
    assert_alike(apart, whole)


def test_an_optimizer_without_state_has_nothing_to_move(tmp_path: Path) -> None:
    make = partial(ByOptimizer, torch.optim.SGD, lr=0.1)
    limit = least("cyclic_dp", 1, 5, make)
    apart = fit({"stages": 5, "disk": str(tmp_path), "memory_limit_bytes": limit}, 1, make)
    assert apart[0].found["moved"] == 0
    assert_alike(apart, fit("ddp", 1, make))


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("preset", "n"), [("cyclic_dp", 1), ("cyclic_dp", 2), ("cyclic_zero", 2)])
def test_a_checkpoint_is_that_of_a_run_in_memory_and_either_goes_on_from_it(
    preset: str, n: int, tmp_path: Path
) -> None:
    limit = {"disk": str(tmp_path), "memory_limit_bytes": least(preset, n, 4)}
    plan = {"preset": preset, "stages": 4}
    ends, files = {}, {}
    for name, tiers in (("whole", {}), ("apart", limit)):
        folder = tmp_path / name
        ends[name] = fit({**plan, **tiers}, n, **saving(folder))
        files[name] = sorted(folder.glob("*.ckpt"))[0]
    assert_alike(ends["apart"], ends["whole"])
    whole, apart = (torch.load(files[x], weights_only=False) for x in ("whole", "apart"))
    assert_same(flat(apart["optimizer_states"]), flat(whole["optimizer_states"]))
    on = [
        fit({**plan, **tiers}, n, ckpt_path=files[name], expects=OTHER_PLAN)
        for tiers, name in ((limit, "apart"), ({}, "apart"), (limit, "whole"))
    ]
    for end in on:
        for one, other in zip(end, ends["whole"], strict=True):
            assert_same(one.weights, other.weights)
            assert_same(one.found["state"], other.found["state"])


def flat(state: Any, at: str = "") -> dict[str, Tensor]:
    if isinstance(state, Tensor):
        return {at: state}
    each = state.items() if isinstance(state, dict) else enumerate(state)
    nested = [flat(x, f"{at}.{k}") for k, x in each if isinstance(x, dict | list | Tensor)]
    return {key: x for part in nested for key, x in part.items()}


def test_a_checkpoint_has_no_bytes_besides_those_of_its_tensors(tmp_path: Path) -> None:
    limit = {"disk": str(tmp_path), "memory_limit_bytes": least("cyclic_dp", 1, 4)}
    fit({"stages": 4, **limit}, 1, **saving(tmp_path))
    (file, *_) = sorted(tmp_path.glob("*.ckpt"))
    state = flat(torch.load(file, weights_only=False)["optimizer_states"])
    assert {
        x.untyped_storage().nbytes() - x.numel() * x.element_size() for x in state.values()
    } == {0}


# ---------------------------------------------------------------------- callbacks


class Reads(Callback):
    """Notes what optimizer state is behind each step."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        state = trainer.optimizers[0].state
        of_each = (state[p]["exp_avg_sq"].double().sum() for p in trainer.model.parameters())
        self.sums.append(sum(map(float, of_each)))


class Keeps(Callback):
    """Keeps views of optimizer state, of the stage that is updated and of all others."""

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.kept = [x["exp_avg"][:1] for x in trainer.optimizers[0].state.values()]


class Zeroes(Callback):
    """Begins each step with no momentum, as some methods do now and then."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        for x in trainer.optimizers[0].state.values():
            x["exp_avg"].zero_()


class Replaces(Zeroes):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        for x in trainer.optimizers[0].state.values():
            x["exp_avg"] = torch.zeros_like(x["exp_avg"])


def with_sums(trainer: Any, module: Classifier) -> Any:
    (reads,) = (c for c in trainer.callbacks if isinstance(c, Reads))
    return {**looked_at(trainer, module), "sums": reads.sums}


def test_callbacks_read_the_values_wherever_they_are(tmp_path: Path) -> None:
    limit = {"disk": str(tmp_path), "memory_limit_bytes": least("lockstep_dp", 1, 4)}
    sums = [
        trained(
            MAKE, strategy, 1, look=with_sums, callbacks=[Reads()],
            data=partial(micro_batches, "vectors", NUM_BATCHES),
        )[0].found["sums"]
        for strategy in ("ddp", {"preset": "lockstep_dp", "stages": 4, **limit})
    ]  # fmt: skip
    assert sums[0] == sums[1]
    assert len(sums[0]) == NUM_BATCHES


class Clamps(Callback):
    """Keeps weights small."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for p in module.parameters():
            p.data.clamp_(-0.2, 0.2)


class Assigns(Callback):
    """Gives weights other memory."""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        for p in module.parameters():
            p.data = p.data * 0.9


@pytest.mark.parametrize("preset", ["lockstep_dp", "cyclic_dp"])
@pytest.mark.parametrize("change", [Zeroes, Replaces, Clamps, Assigns])
def test_what_a_callback_changes_between_steps_of_one_process_counts(
    change: Any, preset: str, tmp_path: Path
) -> None:
    limit = {"disk": str(tmp_path), "memory_limit_bytes": least(preset, 1, 4) + AHEAD}
    ways = "ddp", {"preset": preset, "stages": 4, **limit}
    whole, apart = (fit(way, 1, callbacks=[change()]) for way in ways)
    assert_alike(apart, whole)
    assert apart[0].found["ahead"] == 1
    assert apart[0].found["losses"] != fit("ddp", 1)[0].found["losses"]


class Forgets(Callback):
    """Begins the fourth step with no momentum, on each rank that has some."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            for x in trainer.optimizers[0].state.values():
                x["exp_avg"].zero_()


@pytest.mark.parametrize(("preset", "above"), [("cyclic_dp_v1", 12_000), ("lockstep_dp", 6_000)])
def test_what_is_changed_between_steps_of_several_processes_counts(
    preset: str, above: int, tmp_path: Path
) -> None:
    plan = {"preset": preset, "stages": 4}
    # the last stage leaves beside other work where there is room for that
    limit = {"disk": str(tmp_path), "memory_limit_bytes": least(preset, 2, 4) + above}
    whole, apart = (fit(way, 2, callbacks=[Forgets()]) for way in (plan, {**plan, **limit}))
    assert_alike(apart, whole)
    assert (apart[0].found["moved"] > 0, apart[0].found["ahead"]) == (True, 1)


class Freezes(Callback):
    """Trains the first layer in the second of three epochs alone."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.net[0].requires_grad_(trainer.current_epoch == 1)


@pytest.mark.parametrize(("preset", "n"), [("cyclic_dp", 1), ("lockstep_dp", 2)])
def test_layers_may_be_frozen_and_unfrozen(preset: str, n: int, tmp_path: Path) -> None:
    limit = {"disk": str(tmp_path), "memory_limit_bytes": least(preset, n, 4) + 5_000}
    plan = {"preset": preset, "stages": 4}
    ways = "auto" if n == 1 else plan, {**plan, **limit}
    whole, apart = (fit(way, n, callbacks=[Freezes()], max_epochs=3) for way in ways)
    assert_alike(apart, whole)
    assert apart[0].found["moved"] > 0


def test_what_a_callback_changes_while_updates_are_on_their_way_is_refused(tmp_path: Path) -> None:
    limit = {"disk": str(tmp_path), "memory_limit_bytes": least("cyclic_dp", 2, 4)}
    ends = run(
        MAKE, {"stages": 4, **limit}, 2, callbacks=[Zeroes()],
        data=partial(micro_batches, "vectors", NUM_BATCHES),
    )  # fmt: skip
    assert any(
        "the state of the optimizer was changed between two steps" in end.text for end in ends
    )


def test_a_callback_that_keeps_state_is_refused(tmp_path: Path) -> None:
    limit = {"disk": str(tmp_path), "memory_limit_bytes": least("cyclic_dp", 1, 4)}
    (end,) = run(
        MAKE, {"stages": 4, **limit}, 1, callbacks=[Keeps()],
        data=partial(micro_batches, "vectors", NUM_BATCHES),
    )  # fmt: skip
    assert end.error == "StepError"
    assert "has kept tensors of it" in end.text


# ---------------------------------------------------------------------- bad input


class Cycles(Callback):
    """Lets momentum begin with the third step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.optimizers[0].param_groups[0]["momentum"] = 0.9 if batch_idx > 1 else 0.0


class Differentiates(Classifier):
    """Uses torch.func, within which torch lets nobody see what is saved."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        slope = torch.func.grad(lambda x: x.square().sum())(batch[0])
        return super().training_step(batch, batch_idx) + 0 * slope.sum()


def refused(make: Any = None, n: int = 1, options: Any = None, **flags: Any) -> str:
    ends = run(
        make or MAKE, {"stages": 4, "disk": "/tmp"} | (options or {}), n,
        data=partial(micro_batches, "vectors", NUM_BATCHES), **flags,
    )  # fmt: skip
    assert {end.error for end in ends} <= {"ConfigurationError", "StepError"}, ends
    return ends[0].text


ROOM = {"memory_limit_bytes": 20_000}


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ("of CPUs a folder, disk='/tmp'", {"options": {**ROOM, "disk": None}}),
        ("disk='/proc/nowhere'", {"options": {"disk": "/proc/nowhere", **ROOM}}),
        ("it has other optimizers", {"make": partial(ByOptimizer, Nested), "options": ROOM}),
        ("has made 'momentum_buffer'", {
            "make": partial(ByOptimizer, torch.optim.SGD, lr=0.1), "options": ROOM,
            "callbacks": [Cycles()],
        }),
        ("steps without torch.func", {"make": Differentiates, "options": ROOM}),
        ("has made 'late'", {"make": partial(ByOptimizer, LateState), "options": ROOM}),
        ("by the norm over the stages", {
            "n": 2, "gradient_clip_val": 1.0,
            "options": {**ROOM, "preset": "lockstep_dp", "clip_norm": "global"},
        }),
        ("and sharded weights", {
            "n": 2, "accumulate_grad_batches": 2, "options": {**ROOM, "preset": "cyclic_zero"},
        }),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(said: str, given: dict[str, Any]) -> None:
    assert said in refused(**given)
