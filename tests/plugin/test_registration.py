"""The strategies' names: known in whatever order things are imported, at no cost and only once."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_cyclic
from lightning_cyclic.plan import PRESETS
from lightning_cyclic.registration import register
from tests.harness.commands import Command, Commands, asked_for

SUFFIXES = ("", "_spawn", "_fork", "_notebook")
NAMES = sorted(preset + suffix for preset in PRESETS for suffix in SUFFIXES)
CHECK = f"""
from lightning.pytorch.strategies import StrategyRegistry
missing = set({NAMES}) - set(StrategyRegistry)
assert not missing, missing
"""
QUIET = "logger=False, enable_checkpointing=False, accelerator='cpu', devices=1"
ASK = f"from lightning.pytorch import Trainer\nTrainer(strategy='cyclic_dp', {QUIET})\n"
REFUSED = f"""
try:
    from lightning.pytorch import Trainer
    Trainer(strategy='cyclic_dp', {QUIET})
except ValueError as error:
    assert 'cyclic_dp' in str(error), error
else:
    raise AssertionError('known')
"""
BARE = """
import sys, lightning_cyclic
lightning_cyclic.make_plan('cyclic_dp', num_stages=2, num_workers=2)
assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)
"""
OTHER_HOST = f"""
import pytorch_lightning
from lightning_cyclic import CyclicStrategy, PipelineStrategy
for strategy in ('cyclic_dp', '1f1b', CyclicStrategy(), PipelineStrategy()):
    pytorch_lightning.Trainer(strategy=strategy, {QUIET})
assert not [name for name in sys.modules if name.partition('.')[0] == 'lightning']
import lightning
for strategy in ('cyclic_dp', CyclicStrategy()):
    try:
        lightning.Trainer(strategy=strategy, {QUIET})
    except ValueError as error:
        print(error)
"""
BOTH = f"""
import lightning, pytorch_lightning
pytorch_lightning.Trainer(strategy='cyclic_dp', {QUIET})
from lightning_cyclic import CyclicStrategy
pytorch_lightning.Trainer(strategy=CyclicStrategy(), {QUIET})
"""
BY_ITSELF, BY_IMPORT = "1", "0"  # whether torch finds the entry point
CODES = {  # name -> code for a fresh interpreter, and which of the two
    "lightning alone": ("import lightning.pytorch" + CHECK, BY_ITSELF),
    "no autoload": (REFUSED + "import lightning_cyclic\n" + ASK, BY_IMPORT),
    "bare": (BARE, BY_ITSELF),
    "other host": ("import sys" + OTHER_HOST, BY_ITSELF),
    "both": (BOTH, BY_ITSELF),
}


def command(code: str, autoload: str = BY_ITSELF) -> Command:
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    return Command(arguments=[sys.executable, "-c", code], env=env)


@pytest.fixture(scope="module")
def fresh(request: pytest.FixtureRequest) -> Iterator[Commands]:
    names = asked_for(request, "code")
    with Commands({name: command(*CODES[name]) for name in names}) as commands:
        yield commands


@pytest.mark.multi
@pytest.mark.parametrize("code", ["lightning alone"])
def test_every_name_is_known_in_whatever_order_things_are_imported(
    code: str, fresh: Commands
) -> None:
    fresh.output(code)


@pytest.mark.multi
@pytest.mark.parametrize("code", ["no autoload"])
def test_without_autoload_a_name_needs_the_import(code: str, fresh: Commands) -> None:
    fresh.output(code)


@pytest.mark.multi
@pytest.mark.parametrize("code", ["bare"])
def test_the_import_needs_neither_torch_nor_lightning(code: str, fresh: Commands) -> None:
    fresh.output(code)


def test_registering_again_changes_nothing() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    before = dict(StrategyRegistry)
    register(StrategyRegistry, "lightning")
    lightning_cyclic._autoload.register_when_lightning_is_imported()
    assert dict(StrategyRegistry) == before


def test_the_waiter_is_gone_once_lightning_is_there() -> None:
    import lightning.pytorch  # noqa: F401

    finders = [f for f in sys.meta_path if isinstance(f, lightning_cyclic._autoload._Waiter)]
    waiting = [finder.awaited for finder in finders]
    assert "lightning.pytorch.strategies" not in waiting
    assert len(waiting) == len(set(waiting))


@pytest.mark.parametrize(
    ("suffix", "start_method"),
    [("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")],
)
@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1", "lockstep_dp", "cyclic_zero"])
def test_a_name_stands_for_its_preset_and_launcher(
    preset: str, suffix: str, start_method: str
) -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    strategy = StrategyRegistry.get(preset + suffix)
    assert isinstance(strategy, lightning_cyclic.CyclicStrategy)
    assert (strategy.preset, strategy._start_method) == (preset, start_method)


def test_a_name_may_be_written_in_capitals() -> None:
    from lightning.pytorch import Trainer

    trainer = Trainer(
        strategy="Cyclic_DP", accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    assert trainer.strategy.preset == "cyclic_dp"


def test_names_contain_nothing_that_lightning_matches() -> None:
    assert not [name for name in NAMES if "ddp" in name or "deepspeed" in name]


def test_all_names_what_the_package_offers() -> None:
    assert lightning_cyclic.__all__ == sorted(lightning_cyclic.__all__, key=_isort)
    assert set(dir(lightning_cyclic)) == set(lightning_cyclic.__all__)
    for name in lightning_cyclic.__all__:
        assert getattr(lightning_cyclic, name).__doc__ is not None


def _isort(name: str) -> tuple[bool, bool, str]:
    return (not name.isupper(), not name[0].isupper(), name)


def test_the_package_tells_its_version() -> None:
    found = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert lightning_cyclic.__version__ == found["project"]["version"]


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lightning_cyclic.nothing  # noqa: B018


@pytest.mark.multi
@pytest.mark.parametrize("code", ["other host"])
def test_a_process_trains_with_the_host_that_it_has(code: str, fresh: Commands) -> None:
    out = fresh.output(code)
    for what in ("a strategy", "CyclicStrategy(...)"):
        assert f"{what} was asked of a Trainer of `lightning`, but lightning_cyclic was" in out
    assert out.count("import Trainer and LightningModule from `pytorch_lightning`") == 2


@pytest.mark.multi
@pytest.mark.parametrize("code", ["both"])
def test_of_two_hosts_the_one_that_asks_decides(code: str, fresh: Commands) -> None:
    fresh.output(code)
