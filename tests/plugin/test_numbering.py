"""Numbers of ranks, given to Lightning and torch."""

from __future__ import annotations

import os
import pickle
import socket
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.numbering import _number, numbered
from lightning_cyclic.strategy import CyclicStrategy


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> SLURMEnvironment:
    """Task 1 of 2 on one node."""
    for name, value in {"NTASKS": "2", "NTASKS_PER_NODE": "2", "PROCID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return SLURMEnvironment()


def no_meeting(*_: Any, **__: Any) -> Any:
    raise AssertionError("ranks of one host need not meet")


@pytest.mark.parametrize("rank_order", ["auto", "launch", [socket.gethostname()]])
def test_ranks_of_one_host_keep_their_numbers_without_meeting(
    rank_order: Any, slurm: SLURMEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "rendezvous", no_meeting)
    with numbered(slurm, rank_order, 2, 1.0):
        assert slurm.global_rank() == 1


def test_on_one_host_no_other_can_be_listed(slurm: SLURMEnvironment) -> None:
    with (
        pytest.raises(ConfigurationError, match="names no rank's host with .'elsewhere'"),
        numbered(slurm, [socket.gethostname(), "elsewhere"], 2, 1.0),
    ):
        pass


def test_environments_that_ignore_numbers_have_them(slurm: SLURMEnvironment) -> None:
    _number(slurm, 5)
    assert slurm.global_rank() == 5
    slurm.set_global_rank(7)  # which it ignores
    assert slurm.global_rank() == 5
    assert pickle.loads(pickle.dumps(slurm)).global_rank() == 5


def test_torchruns_variable_has_the_new_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    environment = TorchElasticEnvironment()
    _number(environment, 2)
    assert environment.global_rank() == 2
    assert os.environ["RANK"] == "2"


@pytest.mark.parametrize("given", ["nearest", [], ["a", "a"], ["a", ""], ["a", 1], None, 3])
def test_what_is_no_order_is_refused_at_once(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="rank_order=.* is not understood; allowed: "):
        CyclicStrategy("cyclic_dp", rank_order=given)
