"""The strategies' names: known in whatever order things are imported, at no cost and only once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import lightning_cyclic
from lightning_cyclic.plan import PRESETS
from lightning_cyclic.registration import register

SUFFIXES = ("", "_spawn", "_fork", "_notebook")
NAMES = sorted(preset + suffix for preset in PRESETS for suffix in SUFFIXES)
CHECK = f"""
from lightning.pytorch.strategies import StrategyRegistry
missing = set({NAMES}) - set(StrategyRegistry)
assert not missing, missing
"""
QUIET = "logger=False, enable_checkpointing=False, accelerator='cpu', devices=1"


def in_fresh_interpreter(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, text=True, timeout=100, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.multi
@pytest.mark.parametrize(
    "imports",
    [
        "import lightning.pytorch, lightning_cyclic",
        "import lightning_cyclic, lightning.pytorch",
        "import lightning.pytorch  # and torch finds the entry point by itself",
    ],
)
def test_every_name_is_known_in_whatever_order_things_are_imported(imports: str) -> None:
    in_fresh_interpreter(imports + CHECK)


@pytest.mark.multi
def test_without_autoload_a_name_needs_the_import() -> None:
    ask = f"from lightning.pytorch import Trainer\nTrainer(strategy='cyclic_dp', {QUIET})\n"
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    refused = (
        "try:\n    " + ask.replace("\n", "\n    ") + "\n"
        "except ValueError as error:\n    assert 'cyclic_dp' in str(error), error\n"
        "else:\n    raise AssertionError('known')\n"
    )
    in_fresh_interpreter(refused, **off)
    in_fresh_interpreter("import lightning_cyclic\n" + ask, **off)


@pytest.mark.multi
def test_the_import_needs_neither_torch_nor_lightning() -> None:
    in_fresh_interpreter(
        "import sys, lightning_cyclic\n"
        "lightning_cyclic.make_plan('cyclic_dp', num_stages=2, num_workers=2)\n"
        "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)\n"
    )


def test_registering_again_changes_nothing() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    before = dict(StrategyRegistry)
    register(StrategyRegistry)
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
@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1", "lockstep_dp"])
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


def test_a_preset_without_a_runtime_is_refused_when_the_trainer_is_made() -> None:
    from lightning.pytorch import Trainer

    with pytest.raises(lightning_cyclic.PlanError, match="'cyclic_mp'.* has no runtime yet"):
        Trainer(strategy="cyclic_mp", accelerator="cpu", devices=2, logger=False)


def test_names_contain_nothing_that_lightning_matches() -> None:
    assert not [name for name in NAMES if "ddp" in name or "deepspeed" in name]


def test_all_names_what_the_package_offers() -> None:
    assert lightning_cyclic.__all__ == sorted(lightning_cyclic.__all__, key=_isort)
    assert set(dir(lightning_cyclic)) == set(lightning_cyclic.__all__)
    for name in lightning_cyclic.__all__:
        assert getattr(lightning_cyclic, name).__doc__ is not None


def _isort(name: str) -> tuple[bool, bool, str]:
    return (not name.isupper(), not name[0].isupper(), name)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lightning_cyclic.nothing  # noqa: B018


@pytest.mark.multi
def test_the_other_copy_of_lightning_says_which_one_is_meant() -> None:
    pytest.importorskip("pytorch_lightning")
    out = in_fresh_interpreter(
        "import pytorch_lightning\n"
        "try:\n"
        f"    pytorch_lightning.Trainer(strategy='cyclic_dp', {QUIET})\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    assert "strategy 'cyclic_dp' was asked of a Trainer of `pytorch_lightning`" in out
    assert "use `from lightning.pytorch import Trainer" in out
