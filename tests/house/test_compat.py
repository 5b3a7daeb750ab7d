"""Private names of torch and Lightning: all in one table, and refused where they are missing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

import lightning_cyclic
from lightning_cyclic import compat
from lightning_cyclic.errors import ConfigurationError
from tests.harness import processes

FILES = [x for x in Path(lightning_cyclic.__file__).parent.rglob("*.py") if x.name != "compat.py"]
HOSTS = {"lightning", "pytorch_lightning", "lightning_fabric"}
OPTIONAL = {"torch.optim._muon"}  # which older versions lack, and which is looked for by itself


def private_imports() -> Iterator[tuple[str, str]]:
    """Yield module and name of what is imported from torch and is private."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                package, *parts = node.module.split(".")
                if package == "torch" and node.module not in OPTIONAL:
                    is_private = any(part.startswith("_") for part in parts)
                    yield from (
                        (node.module, alias.name)
                        for alias in node.names
                        if is_private or alias.name.startswith("_")
                    )


def test_all_private_names_that_are_imported_are_in_the_table() -> None:
    found = set(private_imports()) | {
        (where, name) for name, where in compat._MODULE_OF.items() if name.startswith("_")
    }
    assert found
    assert found <= {(x.where, x.name) for x in compat.OF_TORCH + compat.OF_LIGHTNING}


def test_only_one_file_knows_where_the_host_is() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [m for m in modules if m.partition(".")[0] in HOSTS], file


def test_names_of_the_host_are_those_that_types_are_checked_with() -> None:
    source = Path(compat.__file__).read_text()
    (block,) = (n for n in ast.parse(source).body if isinstance(n, ast.If))
    imported = [alias.name for node in block.body for alias in node.names]  # type: ignore[attr-defined]
    assert sorted(imported) == sorted(compat._MODULE_OF)
    for name in imported:
        assert getattr(compat, name) is not None


def test_the_table_has_nothing_that_is_not_used() -> None:
    source = "\n".join(file.read_text() for file in FILES)
    for private in compat.OF_TORCH + compat.OF_LIGHTNING + compat.OF_TRAINERS:
        assert private.name in source, private


def test_what_a_module_lacks_is_named_with_the_version() -> None:
    for where in ("torch._C", "torch._no_such_module"):
        with pytest.raises(ConfigurationError) as told:
            compat.check_modules([compat.Private(where, "_gone", "this and that")])
        assert (
            f"has no {where}._gone, which lightning_cyclic needs for this and that; allowed"
            in str(told.value)
        )
        assert str(told.value).startswith("torch 2.")


def test_a_trainer_without_the_hook_for_signals_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor")
    trainer = Trainer(
        strategy="cyclic_dp", accelerator="cpu", devices=1, logger=False, max_steps=1
    )
    with pytest.raises(ConfigurationError, match=r"_broadcast_sigterm_tensor, which .* stopping"):
        trainer.fit(BoringModel())


@pytest.mark.parametrize("found", ["2.6.0", "2.6.0+cpu", "2.6.0a0+ecf3bae40a.nv25.01", "2.7.1"])
def test_what_is_declared_passes_whatever_was_built_from_it(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "requires", lambda _: ["torch>=2.6", "rich>=99"])
    monkeypatch.setattr(compat, "version", {"torch": found}.__getitem__)
    compat.check_versions()


def test_what_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "requires", lambda _: ["torch>=2.6", 'rich>=13; extra == "cli"'])
    monkeypatch.setattr(compat, "version", {"torch": "2.5.1+cpu"}.__getitem__)
    with pytest.raises(ConfigurationError) as told:
        compat.check_versions()
    assert str(told.value) == (
        "torch 2.5.1+cpu is installed; allowed: torch>=2.6; use pip install 'torch>=2.6'"
    )


def on_old_lightning() -> str:
    """Return what is said to a Trainer of a process that imports the package from here on."""
    told = metadata.version
    metadata.version = lambda name: "2.4.0" if name == "lightning" else told(name)
    for name in [x for x in sys.modules if x.partition(".")[0] == "lightning_cyclic"]:
        del sys.modules[name]
    with pytest.raises(ValueError) as refused:  # noqa: PT011  (its class is imported anew)
        Trainer(strategy="cyclic_dp", accelerator="cpu", devices=1, logger=False)
    return str(refused.value)


@pytest.mark.multi
def test_a_trainer_on_an_old_lightning_says_so() -> None:
    (said,) = processes.run(on_old_lightning, 1)
    assert "lightning 2.4.0 is installed; allowed: lightning" in said
