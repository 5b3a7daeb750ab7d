"""Private names of torch and Lightning: all in one table, and refused where they are missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

import lightning_cyclic
from lightning_cyclic import compat
from lightning_cyclic.errors import ConfigurationError

FILES = [x for x in Path(lightning_cyclic.__file__).parent.rglob("*.py") if x.name != "compat.py"]
OPTIONAL = {"torch.optim._muon"}  # which older versions lack, and which is looked for by itself


def private_imports() -> Iterator[tuple[str, str]]:
    """Yield module and name of what is imported from torch and Lightning and is private."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                package, *parts = node.module.split(".")
                if package in ("torch", "lightning") and node.module not in OPTIONAL:
                    is_private = any(part.startswith("_") for part in parts)
                    yield from (
                        (node.module, alias.name)
                        for alias in node.names
                        if is_private or alias.name.startswith("_")
                    )


def test_all_private_names_that_are_imported_are_in_the_table() -> None:
    found = set(private_imports())
    assert found
    assert found <= {(x.where, x.name) for x in compat.OF_TORCH + compat.OF_LIGHTNING}


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
