"""Every preset has the same bits over every transport, and over one with NCCL's rules.

These are: no names, one queue per channel, rendezvous. Each run has a flush and a checkpoint in
the middle of its epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cyclic.plan.program import Program
from lightning_cyclic.runtime.transport import AbstractTransport, NamedTransport
from tests.harness import processes
from tests.harness.nccl_model import GlooModel, Rules
from tests.harness.pipelines import Job, loader, pipelines, prepare
from tests.harness.races import Device, Watched, noted
from tests.harness.rows import more
from tests.harness.trainers import assert_same, fit
from tests.modules.classifier import Classifier

pytestmark = pytest.mark.multi

TIMEOUT_S = 30.0
MANY = 1000  # operations that a fit has at the least
FLAGS = {"val_check_interval": 2, "limit_val_batches": 1, "enable_checkpointing": True}


class Lines:
    """Let the messages of all programs travel as NCCL would carry them.

    Args:
        device: a model of one that the host runs ahead of. [the host]
    """

    def __init__(self, device: Device | None) -> None:
        self.models: list[GlooModel] = []
        self._device = device

    def connect(self, named: NamedTransport, program: Program) -> AbstractTransport:
        """Stand in for the transport's own method."""
        rules = Rules(program.channels, program.depths)
        model = GlooModel(TIMEOUT_S, rules, named.crew.names.rank_of)
        self.models.append(model)
        return model if self._device is None else Watched(model, self._device)

    def check(self) -> None:
        """Check that each receive met its send, and that none is left."""
        assert self.models
        for model in self.models:
            assert not model.mismatches
            model.assert_idle()


@contextmanager
def over_nccl(device: Device | None = None) -> Iterator[None]:
    """Let messages travel by these rules, and check what they did."""
    lines = Lines(device)
    with pytest.MonkeyPatch.context() as patch:
        # a function, as methods of classes are found: it is told which transport is asked
        stands_in = lambda named, program: lines.connect(named, program)  # noqa: E731, PLW0108
        patch.setattr(NamedTransport, "connect", stands_in)
        yield
    lines.check()


@contextmanager
def on_a_device() -> Iterator[None]:
    """Let the host run ahead of the model of a device, besides."""
    device = Device()
    with noted(device), over_nccl(device):
        yield
    assert device.operations > MANY
    device.check()
    assert device.waited == []


ROUTES = {"nccl": over_nccl, "device": on_a_device}


def over(route: str, strategy: dict[str, Any], train: Callable[..., Any]) -> Any:
    """Train over a transport, or over the model of NCCL."""
    options = {} if route in ROUTES else {"transport": route}
    with ROUTES.get(route, nullcontext)(), TemporaryDirectory() as folder:
        saver = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=1)
        return train(strategy | options, [saver])


def stages(job: Job, strategy: dict[str, Any], route: str) -> Any:
    def train(chosen: dict[str, Any], callbacks: Any) -> Any:
        run = prepare(job, chosen, callbacks, **FLAGS)
        run.trainer.fit(run.module, run.batches, loader(job, 1))
        return run.outcome()

    return over(route, strategy, train)


def whole_steps(net: str, strategy: dict[str, Any], route: str, rounds: int) -> Any:
    def train(chosen: dict[str, Any], callbacks: Any) -> Any:
        flags = FLAGS | {"accumulate_grad_batches": rounds, "callbacks": callbacks}
        return fit(partial(Classifier, net, "sgd"), chosen, 4 * rounds, flags)

    return over(route, strategy, train)


def assert_alike(given: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare weights, losses and metrics of every rank with those by name."""
    for one, other in zip(given, expected, strict=True):
        assert_same(one["weights"], other["weights"])
        for what in ("metrics", "losses", "logged", "global_step"):
            assert one.get(what) == other.get(what), what


@cache
def of_pipeline(preset: str, case: str, num_ranks: int, route: str) -> list[Any]:
    job = Job(case=case, num_microbatches=4, num_epochs=1)
    if preset in ("pipedream", "pipeoptim", "spectrain"):
        job = Job(case=case, num_microbatches=1, num_epochs=1)
    plan = {"stages": 2, "replicas": 2} if preset == "1f1b" else {"stages": num_ranks}
    return pipelines(job, num_ranks, route, function=stages, preset=preset, **plan)


@pytest.mark.parametrize(
    ("preset", "case", "num_ranks", "route"),
    [
        more("1f1b", "resnet", 4, "nccl"), ("cyclic_pipeline", "gpt2", 2, "nccl"),
        more("pipedream", "gpt2", 2, "nccl"), ("pipedream_2bw", "resnet", 2, "nccl"),
        ("pipedream_2bw", "resnet", 2, "device"), ("1f1b", "gpt2", 2, "device"),
        ("pipedream_2bw", "resnet", 2, "edges"), ("pipedream_2bw", "resnet", 2, "host_staged"),
        more("pipeoptim", "vit", 2, "nccl"), ("cyclic_mp", "resnet", 4, "nccl"),
        more("cyclic_pipeline", "gpt2", 4, "nccl"), more("pipedream", "gpt2", 4, "nccl"),
        more("pipedream_2bw", "resnet", 4, "nccl"), more("pipeoptim", "vit", 4, "nccl"),
    ],
)  # fmt: skip
def test_pipelines(preset: str, case: str, num_ranks: int, route: str) -> None:
    named = of_pipeline(preset, case, num_ranks, "named")
    assert_alike(of_pipeline(preset, case, num_ranks, route), named)


@cache
def of_whole_steps(
    preset: str, slack: int, net: str, num_ranks: int, num_stages: int, rounds: int, route: str
) -> list[Any]:
    plan = {"preset": preset, "slack": slack, "stages": num_stages}
    return processes.run(whole_steps, num_ranks, net, plan, route, rounds, time_limit_s=90.0)


@pytest.mark.parametrize("route", ["edges", "host_staged", "nccl", "device"])
@pytest.mark.parametrize(
    "given",
    [
        ("cyclic_dp", 0, "batchnorm_mlp", 3, 3, 2),
        ("cyclic_zero", 2, "gpt2", 3, 6, 1),
        more(("cyclic_dp_v1", 0, "gpt2", 2, 4, 1)),
        more(("lockstep_dp", 0, "batchnorm_mlp", 2, 2, 1)),
    ],
    ids=lambda given: given[0],
)
def test_whole_micro_batches(given: Any, route: str) -> None:
    assert_alike(of_whole_steps(*given, route), of_whole_steps(*given, "named"))
