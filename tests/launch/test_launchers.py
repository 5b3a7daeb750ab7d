"""Whichever way two processes are launched, training ends with the same bits."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor

from lightning_cyclic import CyclicStrategy
from lightning_cyclic.registration import make_strategy
from tests.harness import processes
from tests.harness.commands import Command, Commands, asked_for
from tests.harness.rows import more
from tests.harness.trainers import assert_same
from tests.scripts import launched

pytestmark = pytest.mark.multi

ROOT = Path(__file__).parents[2]
Weights = dict[str, Tensor]
SCRIPT = [launched.__file__]
TORCHRUN = [
    "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", launched.__file__
]  # fmt: skip
FORKED = ["-m", "tests.harness.agent", "2", "0", launched.__name__]
CLI = [
    "cli", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=1",
    "--trainer.logger=false", "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false", "--seed_everything=false",
]  # fmt: skip
LAUNCHES = {  # name -> what Python is given; behind it the file for the weights, and more
    "spawn": (SCRIPT, ["cyclic_dp_spawn"]),
    "torchrun": (TORCHRUN, ["cyclic_dp"]),
    "torchrun, forked": (FORKED, ["cyclic_dp"]),
    "popen": (SCRIPT, ["cyclic_dp"]),
    "fork": (SCRIPT, ["cyclic_dp_fork"]),
    "cli, name": (SCRIPT, [*CLI, "--trainer.strategy=cyclic_dp_fork"]),
    "cli, class": (SCRIPT, [*CLI, "--config={config}"]),
}
BY_CLASS = """
trainer:
  strategy:
    class_path: lightning_cyclic.CyclicStrategy
    init_args:
      preset: cyclic_dp
      slack: 2
      start_method: fork
      stages: [net.3, net.5]
"""


@pytest.fixture(scope="module")
def weights_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Weights]]:
    """Name of a launch -> what it ends with."""
    folder = tmp_path_factory.mktemp("launches")
    config = folder / "config.yaml"
    config.write_text(BY_CLASS)

    def command(name: str) -> Command:
        script, arguments = LAUNCHES[name]
        arguments = [text.format(config=config) for text in arguments]
        # else Lightning takes one that anybody's connection may have until it listens
        env = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": str(processes.free_port())}
        return Command(
            arguments=[sys.executable, *script, str(folder / name), *arguments], is_forked=True,
            env=env, folder=ROOT,
        )  # fmt: skip

    names = asked_for(request, "launch")
    with Commands({name: command(name) for name in names}) as commands:

        def weights_of(name: str) -> Weights:
            commands.output(name)
            return torch.load(folder / name)

        yield weights_of


def by_hand(out: Path, strategy: CyclicStrategy) -> Weights:
    """Return what two ranks that are started by hand end with."""
    processes.run(one_node, 2, out, strategy)
    return torch.load(out)


def one_node(out: Path, strategy: CyclicStrategy) -> None:
    launched.fit(out, strategy, devices=1, num_nodes=2)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return by_hand(tmp_path_factory.mktemp("by_hand") / "out", CyclicStrategy("cyclic_dp"))


# others begin interpreters, as README's lines do by popen; by fork it is launched by name, too
FEW = ["torchrun, forked", "cli, name"]


@pytest.mark.parametrize(
    "launch", [x if x in FEW else more(x) for x in LAUNCHES if x != "cli, class"]
)
def test_every_launcher_ends_with_the_same_bits(
    launch: str, weights_of: Callable[[str], Weights], expected: Weights
) -> None:
    assert_same(weights_of(launch), expected)


def fit_copy(out: Path) -> None:
    """Train what comes out of a pickle, which is all that a rank has that is spawned."""
    trainer = launched.make_trainer(CyclicStrategy("cyclic_dp"), devices=1, num_nodes=2)
    copied, module = pickle.loads(pickle.dumps((trainer, launched.Tiny())))
    copied.fit(module)
    launched.save(out, copied, module)


def test_what_is_spawned_is_pickled(expected: Weights, tmp_path: Path) -> None:
    processes.run(fit_copy, 2, tmp_path / "out")
    assert_same(torch.load(tmp_path / "out"), expected)


class OfActors(LightningEnvironment):
    """Numbers ranks as Ray Train does: several on a node, each with the one device of its CPUs."""

    creates_processes_externally = True

    def world_size(self) -> int:
        return processes.here().num_ranks

    def global_rank(self) -> int:
        return processes.here().rank

    def local_rank(self) -> int:
        return processes.here().rank

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...


def fit_actor(out: Path, preset: str) -> None:
    launched.fit(out, make_strategy(preset, cluster_environment=OfActors()), devices=1)


@pytest.mark.parametrize("preset", ["cyclic_dp"])
def test_ranks_of_one_node_may_share_the_one_device_of_its_cpus(
    preset: str, tmp_path: Path
) -> None:
    processes.run(fit_actor, 2, tmp_path / "out", preset)
    expected = by_hand(tmp_path / "by_hand", make_strategy(preset))
    assert_same(torch.load(tmp_path / "out"), expected)


@pytest.mark.parametrize("launch", ["cli, class"])
def test_lightning_cli_takes_a_class_with_arguments(
    launch: str, weights_of: Callable[[str], Weights], tmp_path: Path
) -> None:
    strategy = CyclicStrategy("cyclic_dp", slack=2, stages=["net.3", "net.5"])
    assert_same(weights_of(launch), by_hand(tmp_path / "out", strategy))
