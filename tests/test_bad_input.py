"""Bad input ends with a clear error, on every worker and without a hang.

Clear: what was given, what is allowed, what to do next. Two workers each, on loopback; a wait is
given ten seconds, and an error that needs it would be no clear one.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import MPSAccelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_cyclic import PRESETS, CyclicStrategy
from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plan.presets import AXES
from lightning_cyclic.plugin.checks import check_trainer
from tests import processes
from tests.corpus import make_trainer, strategy_of
from tests.rows import in_turn
from tests.test_failures import assert_stopped

TIMEOUT_S = 10.0
CDP, AXES_1F1B = (
    {axis: getattr(PRESETS[name], axis) for axis in AXES} for name in ("cyclic_dp", "1f1b")
)


def rank() -> int:
    return int(os.environ["NODE_RANK"])


# ---------------------------------------------------------------------- before any process


@pytest.mark.parametrize(
    ("kwargs", "given", "allowed", "todo"),
    [
        ({"preset": "cyclic"}, "preset 'cyclic' is unknown", "cyclic_dp", "use "),
        ({"preset": "1f1b"}, "preset '1f1b' is one of PipelineStrategy", "'cyclic_dp'", "use Pip"),
        ({"preset": AXES_1F1B}, "placement 'pipelined' is one of Pipe", "'replicated'", "use Pip"),
        ({"preset": {"weights": "old"}}, "'weights': 'old'", "a value for each", "use preset={"),
        ({"preset": CDP | {"weights": "old"}}, "weights 'old' is unknown", "freshest", "use pre"),
        ({"slack": -1}, "slack=-1", "0", "use "),
        ({"stages": 0}, "stages=0", "a number from 1", "use "),
        ({"stages": "two"}, "stages='two'", "a number from 1", "use "),
        ({"stages": "timed"}, "stages='timed'", '"measured" (by times)', "use "),
        ({"stages": "measured"}, "preset 'cyclic_dp'", "pipelines", "use stages='auto'"),
        ({"stages": [1, 2]}, "stages=[1, 2]", "list of module paths", "use "),
        ({"stages": [["a"]]}, "stages=[['a']]", "list of module paths", "use "),
        ({"preset": ["1f1b"]}, "preset ['1f1b'] is unknown", "cyclic_dp", "use "),
        ({"preset": CDP | {"weights": []}}, "weights [] is unknown", "freshest", "use pre"),
        ({"timeout": 5}, "timeout=5", "a datetime.timedelta above 0", "use timeout=timedelta("),
        ({"timeout": timedelta()}, "timeout=datetime.timedelta(0)", "above 0", "use timeout="),
        ({"clip_norm": "all"}, "clip_norm='all'", "'stage', 'global', None", "use "),
        ({"relay_buffers": "no"}, "relay_buffers='no'", "'auto', 'all'", "use "),
        ({"replicas": 2}, "'replicas'", "preset, stages", "is an option of PipelineStrategy"),
        ({"find_unused_parameters": True}, "'find_unused_parameters'", "preset", "remove it"),
        ({"static_graph": True}, "'static_graph'", "reduce_dtype, transport", "remove it"),
        ({"preset": CDP | {"weights": "sync"}}, "sync", "allowed", "use "),
    ],
)
def test_a_strategy_refuses_what_it_does_not_know(
    kwargs: dict[str, Any], given: str, allowed: str, todo: str
) -> None:
    with pytest.raises((PlanError, ConfigurationError)) as caught:
        CyclicStrategy(**kwargs)
    text = str(caught.value)
    assert given in text
    assert f"allowed: {allowed}" in text or (allowed in text and "allowed" in text)
    assert todo in text


def test_a_plan_without_a_runtime_is_refused_by_name() -> None:
    with pytest.raises(
        PlanError, match=r"'full' \(preset 'lockstep_dp'\) has no runtime yet.*; use"
    ):
        CyclicStrategy(dict(CDP, schedule="lockstep", weights="sync", sharding="full"))


def test_mps_is_refused() -> None:
    class OnMps:
        accelerator = MPSAccelerator.__new__(MPSAccelerator)

    with pytest.raises(ConfigurationError, match=r"'mps'.*allowed: 'cpu', 'cuda'; use "):
        check_trainer(OnMps(), LightningModule(), sync_batchnorm=False)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what two workers run


class Net(LightningModule):
    """Four layers, so that there are places for stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def order(self, batch_idx: int) -> list[nn.Module]:
        return list(self.layers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] if isinstance(batch, list | tuple) else batch
        x = x.float().reshape(-1, 4)
        for layer in self.order(batch_idx):
            x = torch.tanh(layer(x))
        return x.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OtherModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4 + rank())


class OtherFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(rank() == 0)


class ReducesInUpdate(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.ones(()), on_step=True, sync_dist=True)


class CompiledInPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


class NothingTrained(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.requires_grad_(False).parameters(), lr=0.1)


class Outside(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)


class SharedStorage(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = nn.Parameter(self.layers[0].weight.data)


class Fails(Net):
    """Goes wrong in one step.

    Args:
        how: "returns None", "has no graph", "is not finite" or "raises".
        at: in which step.
        ranks: on which.
    """

    def __init__(self, how: str, at: int, *ranks: int) -> None:
        super().__init__()
        self.how, self.at, self.ranks = how, at, ranks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx != self.at or rank() not in self.ranks:
            return loss
        if self.how == "raises":
            raise ZeroDivisionError("the batch is broken")
        return {"returns None": None, "has no graph": loss.detach()}.get(self.how, loss * math.nan)


class OtherOrderLater(Net):
    def order(self, batch_idx: int) -> list[nn.Module]:
        return list(self.layers) if batch_idx < 3 else list(self.layers)[::-1]


class OtherOrderOnOne(Net):
    def order(self, batch_idx: int) -> list[nn.Module]:
        return list(self.layers) if rank() == 0 else list(self.layers)[::-1]


class StatisticsLater(Net):
    """From step 3 on, the first stage's BatchNorm runs behind the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.BatchNorm1d(4)

    def order(self, batch_idx: int) -> list[nn.Module]:
        a, b, c, d = self.layers
        return [a, b, c, d] if batch_idx < 3 else [a, c, d, b]


class ReentrantCheckpoint(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].requires_grad_()
        for layer in (*self.layers, self.layers[3]):  # the last layer twice: two gradients
            x = checkpoint(layer, x, use_reentrant=True)
        return x.pow(2).mean()


class TwoBackwards(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class ChangesWithin(Net):
    """Changes weights in a hook that is called while a step is under way, behind the first one.

    Args:
        hook: its name.
        whose: "teacher", a frozen copy that follows, or "own", through ``.data``.
    """

    def __init__(self, hook: str, whose: str) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.whose = whose
        setattr(self, hook, self.change)

    def change(self, *_: Any) -> None:
        if self.trainer.global_step == 0:
            return
        if self.whose == "own":
            for p in self.layers.parameters():
                p.data.clamp_(-0.2, 0.2)
            return
        with torch.no_grad():
            for mine, its in zip(self.layers.parameters(), self.teacher.parameters(), strict=True):
                its.lerp_(mine, 0.1)


class UpdatesInBackward(Net):
    """Updates each parameter as soon as its gradient is there, in a hook."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self.update)

    def update(self, p: Tensor) -> None:
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None


class Vectors(Dataset[Any]):
    def __init__(self, num: int = 8) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, k: int) -> Any:
        return (torch.full((3, 4), 0.1 * k + 0.1),)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([Vectors()[k] for k in range(6 + 2 * rank())])


def data_of(kind: str) -> Any:
    x = torch.ones(8, 3, 4)
    if kind == "other structure" and rank() == 1:
        return DataLoader(TensorDataset(x, x), batch_size=None)
    if kind == "other dtype" and rank() == 1:
        return DataLoader(TensorDataset(x.double()), batch_size=None)
    if kind == "other dims" and rank() == 1:
        return DataLoader(TensorDataset(x.flatten(1)), batch_size=None)
    if kind == "other number":
        return DataLoader(Vectors(6 + rank()), batch_size=None)
    if kind == "other number, unsized":
        return DataLoader(Stream(), batch_size=None)
    return DataLoader(Vectors(), batch_size=None)


def attempt(
    module: Callable[[], Net], data: str, strategy: dict[str, Any], flags: dict[str, Any]
) -> tuple[str, str, float]:
    """Return the error that training ends with on this rank: its type, text, and after when."""
    start = time.monotonic()
    try:
        trainer = make_trainer(
            strategy_of({"timeout": timedelta(seconds=TIMEOUT_S), **strategy}),
            max_epochs=2, **flags,
        )  # fmt: skip
        trainer.fit(module(), data_of(data))
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


def errors_of(
    module: Callable[[], Net], data: str = "", strategy: dict[str, Any] | None = None, **flags: Any
) -> list[tuple[str, str, float]]:
    return processes.run(
        attempt, 2, module, data, strategy or {}, flags, time_limit_s=40, after_failure_s=20
    )


def assert_everywhere(
    errors: list[tuple[str, str, float]], kind: str, *parts: str, limit_s: float = 8.0
) -> None:
    for error, text, seconds in errors:
        assert error == kind, f"{error}: {text}"
        assert seconds < limit_s, (seconds, text)
        for part in parts:
            assert part in text


# ---------------------------------------------------------------------- both refuse at once


@pytest.mark.multi
@pytest.mark.parametrize(
    ("module", "strategy", "flags", "kind", "parts"),
    [
        (Net, {"stages": 99}, {}, "PlanError", ["99", "4 places", "allowed: 1 to 4", "lower it"]),
        (Net, {"stages": ["layers.7"]}, {}, "PlanError", ["'layers.7'", "allowed:", "layers.1"]),
        (
            Net, {"stages": ["layers.2", "layers.1"]}, {}, "PlanError",
            ["one after the other", "allowed:", "reorder"],
        ),
        (Net, {"num_microbatches": 3}, {}, "PlanError", ["num_microbatches=3", "multiples of",
        "use "]),
        (Net, {"num_microbatches": 4}, {}, "PlanError", ["num_microbatches=4",
        "accumulate_grad_batches=2"]),
        (NothingTrained, {}, {}, "ConfigurationError", ["no parameter", "allowed:", "pass "]),
        (Outside, {}, {}, "ConfigurationError", ["1 parameter(s)", "allowed:", "register"]),
        (SharedStorage, {}, {}, "ConfigurationError", ["share one storage", "allowed:", "tie"]),
        (CompiledInPlace, {}, {}, "ConfigurationError", ["compiled as a whole", "block.compile"]),
        (
            partial(Fails, "has no graph", 0, 0, 1), {}, {}, "StepError",
            ["without a graph (step 0)", "allowed:", "detach"],
        ),
    ],
)  # fmt: skip
def test_every_worker_refuses(
    module: Any, strategy: Any, flags: Any, kind: str, parts: list[str]
) -> None:
    assert_everywhere(errors_of(module, strategy=strategy, **flags), kind, *parts)


@pytest.mark.multi
def test_a_meeting_of_workers_that_pass_at_other_times_is_refused() -> None:
    errors = errors_of(ReducesInUpdate)
    assert "StepError" in [error for error, _, _ in errors]
    for error, text, _ in errors:  # one refuses, the others name its reason or refuse as well
        assert error in ("StepError", "PeerError"), text
        assert "self.log('norm', ...) was called in on_before_optimizer_step" in text


@pytest.mark.multi
@pytest.mark.parametrize(
    ("module", "data", "kind", "parts"),
    [
        (OtherModule, "", "ConfigurationError", ["head.weight (4, 4)", "head.weight (5, 4)"]),
        (OtherFrozen, "", "ConfigurationError", ["layers.2.weight", "trained", "frozen"]),
        (Net, "other structure", "StepError", ["of 1: float32", "of 2: float32"]),
        (Net, "other dtype", "StepError", ["float32 with 2 dims", "float64 with 2 dims"]),
        (Net, "other dims", "StepError", ["float32 with 2 dims", "float32 with 1 dim"]),
        (Net, "other number", "ConfigurationError", ["rank 0: 6", "rank 1: 7", "training ba"]),
    ],
)
def test_every_worker_says_how_they_differ(
    module: type[Net], data: str, kind: str, parts: list[str]
) -> None:
    assert_everywhere(errors_of(module, data), kind, *parts, "allowed:")


@pytest.mark.multi
def test_every_worker_refuses_stages_that_one_worker_ran_in_another_order() -> None:
    errors = errors_of(OtherOrderOnOne, strategy={"stages": 4})
    said = "rank 1 entered the stages that rank 0 has in the order [3, 2, 1]; allowed:"
    assert_everywhere(errors, "StepError", said, "stages=1")


# ---------------------------------------------------------------------- one fails, all learn why


@pytest.mark.multi
@pytest.mark.parametrize(
    ("how", "at", "culprit", "kind", "reason", "preset"),
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
    how: str, at: int, culprit: int, kind: str, reason: str, preset: str
) -> None:
    errors = errors_of(partial(Fails, how, at, culprit), strategy={"preset": preset})
    assert_everywhere([errors[culprit]], kind, reason)
    assert_everywhere([errors[1 - culprit]], "PeerError", reason, "in step ")
    assert_stopped(errors[1 - culprit][1], 1 - culprit, culprit)


# cyclic_dp_v1 makes the updates of all stages on one rank, in whose hook weights may change
HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward"]
OF_UPDATE = [("on_before_optimizer_step", "teacher", "cyclic_dp_v1")]


@pytest.mark.multi
@pytest.mark.parametrize(
    ("hook", "whose", "preset"),
    [
        *in_turn(HOOKS, ["own", "teacher"], ["cyclic_dp", "cyclic_dp_v1", "lockstep_dp"]),
        *OF_UPDATE,
    ],
)
def test_weights_that_a_hook_changes_within_a_step_are_refused(
    hook: str, whose: str, preset: str
) -> None:
    module = partial(ChangesWithin, hook, whose)
    errors = errors_of(module, strategy={"preset": preset})
    assert "StepError" in {kind for kind, _, _ in errors}
    for kind, text, seconds in errors:
        assert kind in ("StepError", "PeerError"), text
        assert f"parameter '{'layers' if whose == 'own' else 'teacher'}." in text
        assert "while step" in text
        assert "but ranks have several versions or copies of it" in text
        assert seconds < 8.0


@pytest.mark.multi
@pytest.mark.parametrize(
    "strategy",
    [
        {"preset": "cyclic_dp"},
        {"preset": "1f1b", "stages": ["layers.2"], "num_microbatches": 3},
        {"preset": "cyclic_pipeline", "stages": ["layers.2"], "num_microbatches": 3},
    ],
)
def test_updates_within_a_backward_are_refused(strategy: dict[str, Any]) -> None:
    errors = errors_of(UpdatesInBackward, strategy=strategy)
    assert "StepError" in {kind for kind, _, _ in errors}
    for kind, text, _ in errors:
        assert kind in ("StepError", "PeerError"), text
        assert "while step 0 was under way" in text


@pytest.mark.multi
@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1"])
def test_statistics_that_come_too_late_to_be_relayed_are_refused(preset: str) -> None:
    errors = errors_of(StatisticsLater, strategy={"preset": preset, "stages": ["layers.2"]})
    assert "StepError" in {kind for kind, _, _ in errors}
    for kind, text, seconds in errors:
        assert kind in ("StepError", "PeerError")
        assert "buffer 'layers.1.num_batches_tracked'" in text
        assert "changed after it had been handed on" in text
        assert seconds < 8.0


@pytest.mark.multi
@pytest.mark.parametrize(
    ("module", "part"),
    [
        (OtherOrderLater, "ran its stages in the order [3, 2, 1]"),
        (ReentrantCheckpoint, "use_reentrant=False"),
        (TwoBackwards, "one backward that reaches each parameter once"),
    ],
)
def test_a_step_that_breaks_the_order_says_so(module: type[Net], part: str) -> None:
    errors = errors_of(module, strategy={"stages": 4})
    assert "StepError" in {kind for kind, _, _ in errors}
    for kind, text, seconds in errors:
        assert kind in ("StepError", "PeerError")
        assert part in text
        assert seconds < 8.0


@pytest.mark.multi
@pytest.mark.parametrize("preset", ["cyclic_dp", "lockstep_dp"])
def test_streams_of_different_length_are_refused(preset: str) -> None:
    errors = errors_of(Net, "other number, unsized", {"preset": preset})
    for kind, text, _ in errors:
        assert kind in ("StepError", "ConfigurationError", "PeerError"), text
        assert "number" in text
        assert "batches" in text
