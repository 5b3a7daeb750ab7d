"""The hosts: a torch or Lightning that is too old is named, before anything else fails."""

from __future__ import annotations

import sys

import pytest

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin import hosts
from tests.commands import Command, Commands

OLD_LIGHTNING = """
from importlib import metadata
told = metadata.version
metadata.version = lambda name: "2.4.0" if name == "lightning" else told(name)
from lightning.pytorch import Trainer
try:
    Trainer(strategy="cyclic_dp", accelerator="cpu", devices=1, logger=False)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("found", ["2.6.0", "2.6.0+cpu", "2.6.0a0+ecf3bae40a.nv25.01", "2.7.1"])
def test_what_is_declared_passes_whatever_was_built_from_it(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "requires", lambda _: ["torch>=2.6", "rich>=99"])
    monkeypatch.setattr(hosts, "version", {"torch": found}.__getitem__)
    hosts.check_hosts()


def test_what_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "requires", lambda _: ["torch>=2.6", 'rich>=13; extra == "cli"'])
    monkeypatch.setattr(hosts, "version", {"torch": "2.5.1+cpu"}.__getitem__)
    with pytest.raises(ConfigurationError) as told:
        hosts.check_hosts()
    assert str(told.value) == (
        "torch 2.5.1+cpu is installed; allowed: torch>=2.6; use pip install 'torch>=2.6'"
    )


def test_sources_that_are_not_installed_declare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_PACKAGE", "no-such-package-is-installed")
    hosts.check_hosts()


@pytest.mark.multi
def test_a_trainer_on_an_old_lightning_says_so() -> None:
    command = Command(arguments=[sys.executable, "-c", OLD_LIGHTNING])
    with Commands({"old": command}) as commands:
        output = commands.output("old")
    assert "lightning 2.4.0 is installed; allowed: lightning" in output
